"""``fluxpod states RUN``."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.outcome import DONE, JOB_WRONG
from bootstrap.state import MANIFEST, MODEL_FILE
from bootstrap.volume import Volume
from entrypoint.states import find_state, named_part, show_states
from tests.states import flip_a_bit, make_state


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def shown(volume: Volume, capsys: pytest.CaptureFixture[str], hash_all: bool = False) -> tuple[int, list[str]]:
    """Its code and lines, with single spaces."""
    code = show_states(volume, "test", hash_all)
    return code, [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_oldest_first(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    folder = volume.run("test").states
    make_state(folder, 1000)
    make_state(folder, 500, whole=False)
    code, (first, second) = shown(volume, capsys)
    assert code == DONE
    assert first == f"step 500 - 0.000 GB weights only {folder / 'step-000500'}"
    assert second == f"step 1000 - 0.000 GB state {folder / 'step-001000'}"


def test_hashing_every_byte_finds_a_flipped_bit(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    make_state(volume.run("test").states, 500)
    flip_a_bit(make_state(volume.run("test").states, 1000) / MODEL_FILE, 5)
    assert shown(volume, capsys)[0] == DONE
    code, (first, second) = shown(volume, capsys, hash_all=True)
    assert code == JOB_WRONG
    assert first.endswith("step-000500 verified")
    assert f"DAMAGED: step-001000/{MODEL_FILE} is damaged" in second


def test_a_folder_that_is_no_state_is_told(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    (make_state(volume.run("test").states, 500) / MANIFEST).unlink()
    code, lines = shown(volume, capsys)
    assert code == JOB_WRONG
    assert lines[0].startswith("not a state: step-000500 has no state.json")


def test_no_states(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = shown(volume, capsys)
    assert code == DONE
    assert lines[0].startswith("no states in ")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("test", ("test", "")),
        ("test/", ("test", "")),
        ("test/500", ("test", "500")),
        ("test/step-000500", ("test", "500")),
        ("test/all", ("test", "all")),
        ("test/output", ("test", "output")),
        ("test/output/test.safetensors", ("test", "output")),
        ("test/output/other.safetensors", ("test", "output/other.safetensors")),
        ("runs/test/all", ("test", "all")),
        ("runs/test/states/all", ("test", "all")),
        ("runs/test/states/step-000500/model.safetensors", ("test", "500")),
        ("/", ("/", "")),
        ("", ("", "")),
        ("black-forest-labs/FLUX.1-dev", ("black-forest-labs", "FLUX.1-dev")),
    ],
)
@pytest.mark.parametrize("here", [".", "runs", "runs/test", "runs/test/states"])
def test_names_and_paths_of_parts_of_runs(
    text: str, meant: tuple[str, str], here: str, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_state(volume.run("test").states, 500)
    monkeypatch.chdir(volume.root / here)
    if text.startswith("black") and here != ".":
        return  # a path below a run, which is not there
    assert named_part(volume, text) == meant
    if meant[0] == "test":
        absolute = volume.runs / text.removeprefix("runs/")
        assert named_part(volume, str(absolute)) == meant
        assert find_state(volume, str(absolute)) == (
            volume.run("test").states / "step-000500" if meant[1] in ("", "500") else None
        )
