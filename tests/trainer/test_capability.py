"""What is chosen for cards that cannot be measured here: Ampere (8.x), Ada (8.9), Blackwell (10.0, 12.0)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap import estimate
from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import MODELS, GpuModel, find_gpu
from tests.runs import make_job
from trainer.attention import candidates

CARD = torch.device("cuda", 0)

OLDER = ["flash", "efficient", "math"]


@pytest.mark.parametrize(
    ("name", "plain", "masked"),
    [
        ("A100 80GB", OLDER, OLDER[1:]),
        ("A40", OLDER, OLDER[1:]),
        ("RTX A6000", OLDER, OLDER[1:]),
        ("RTX 3090", OLDER, OLDER[1:]),
        ("L40S", OLDER, OLDER[1:]),
        ("RTX 4090", OLDER, OLDER[1:]),
        ("H100", ["cudnn", *OLDER], OLDER[1:]),
        ("H200", ["cudnn", *OLDER], OLDER[1:]),
        ("B200", ["cudnn", *OLDER], OLDER[1:]),
        ("RTX 5090", ["cudnn", *OLDER], OLDER[1:]),
    ],
)
def test_attention(name: str, plain: list[str], masked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2 by torch on Ampere and Ada; cuDNN's, which is faster from Hopper on, only there."""
    card = model(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
    assert [attention.name for attention in candidates(CARD, masked=False)] == plain
    assert [attention.name for attention in candidates(CARD, masked=True)] == masked


def test_a_card_older_than_ampere_is_left_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert [attention.name for attention in candidates(CARD, masked=False)] == ["efficient", "math"]


def test_only_hopper_is_estimated_with_what_was_measured_there() -> None:
    work = replace(estimate.work_of(make_job(), FluxShape(), [(1024, 1024, 1)]), trained=0, optimizer=0)  # no update
    way = estimate.Arrangement(1, 1, 1, False, False, 0, True, True, 0, 0)
    for card in MODELS:
        if card.bf16:
            share = 3 * work.forward / (card.tflops * 1e12 * estimate.seconds_per_step(work, way, card, 1))
            hopper = card.capability[0] == 9
            assert share == pytest.approx(estimate.EFFICIENCY_HOPPER if hopper else estimate.EFFICIENCY, rel=0.01), card


# ---------------------------------------------------------------- our kernels

COMPILED = [(8, 0), (8, 6), (8, 9)]


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compiler, which needs no card; torch's builds for CPUs come without it."""
    found = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return found


@pytest.mark.parametrize("capability", COMPILED)
@pytest.mark.parametrize("adam", [True, False], ids=["adam", "lion"])
@pytest.mark.parametrize("eight_bit", [True, False], ids=["8 bits", "32 bits"])
def test_the_update_becomes_machine_code(triton: Any, capability: tuple[int, int], adam: bool, eight_bit: bool) -> None:
    from trainer.blockwise_kernel import BLOCK, ROWS, _step

    state = "*u8" if eight_bit else "*fp32"
    signature = {"weight": "*bf16", "gradient": "*bf16", "one": state, "two": state}
    signature |= dict.fromkeys(("scales_one", "scales_two", "go"), "*fp32") | {"skipped": "*i32", "count": "i32"}
    signature |= dict.fromkeys(("first", "key_1", "key_2"), "i64")
    rates = ("learning_rate", "beta1", "beta2", "eps", "decay", "step_size", "root_correction")
    signature |= dict.fromkeys(rates, "fp32")
    constants = {"adam": adam, "eight_bit": eight_bit, "stochastic": True, "even": True, "rows": ROWS, "block": BLOCK}
    assert machine_code(triton, _step, signature, constants, capability)


@pytest.mark.parametrize("capability", COMPILED)
def test_the_rounding_becomes_machine_code(triton: Any, capability: tuple[int, int]) -> None:
    from trainer.rounding_kernel import BLOCK, _round

    signature = {"source": "*fp32", "target": "*bf16", "count": "i32", "first": "i64", "key_1": "i64", "key_2": "i64"}
    assert machine_code(triton, _round, signature, {"block": BLOCK}, capability)


def machine_code(
    triton: Any, kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: tuple[int, int]
) -> bytes:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32))
    return built.asm["cubin"]


def model(name: str) -> GpuModel:
    found = find_gpu(name)
    assert found
    return found
