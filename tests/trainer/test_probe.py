from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bootstrap.probe import CARD_PARTS
from entrypoint.launch import free_port
from tests.training import finish, start
from trainer import probe

CPU = torch.device("cpu")


def test_every_part_that_the_entrypoint_asks_for_is_known() -> None:
    assert list(probe.CARD) == list(CARD_PARTS)


def test_speeds_are_numbers() -> None:
    assert probe.matrix_product(CPU, size=64, seconds=0.01) > 0
    assert probe.attention(CPU, tokens=64, seconds=0.01) > 0
    assert probe.memory(CPU, most=1 << 16, seconds=0.01) > 0
    assert probe.from_host(CPU, size=1 << 16, seconds=0.01) > 0
    assert probe.to_host(CPU, size=1 << 16, seconds=0.01) > 0


def test_one_8_bit_step_is_right() -> None:
    assert probe.eight_bit_step(CPU) < 1e-3


def test_a_wrong_8_bit_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import functional as kernels

    monkeypatch.setattr(kernels, "optimizer_update_8bit_blockwise", lambda *_: None)
    with pytest.raises(RuntimeError, match="8-bit AdamW is off by"):
        probe.eight_bit_step(CPU)


def test_a_device_that_adds_up_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fault" not in probe.device(CPU)
    monkeypatch.setattr(torch, "arange", lambda *_, **__: torch.zeros(1))
    assert "not 499500" in probe.device(CPU)["fault"]


def test_findings_are_lines_and_a_part_that_fails_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("out of luck\nwith a traceback")

    monkeypatch.setattr(probe, "end_with_parent", lambda: None)
    monkeypatch.setattr(probe, "CARD", {"one": lambda device: 1.5, "two": fails})
    assert probe.main(["card", "one", "two"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"part": "one", "begun": True},
        {"part": "one", "value": 1.5},
        {"part": "two", "begun": True},
        {"part": "two", "error": "RuntimeError: out of luck"},
    ]


def test_between_two_processes(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    world = [start(probe.measure_links, 4096, log=log, rank=rank, size=2, port=port) for rank in range(2)]
    assert finish(world, log) == [0, 0]
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [each["part"] for each in found] == ["links", "links", "all-reduce", "GPU to GPU"]
    assert all(each["value"] > 0 for each in found[2:])
