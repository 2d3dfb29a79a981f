"""Which folders are states, which of them a run goes on from, which bytes go, and which job may go on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap import state as module
from bootstrap.state import (
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    VERSION,
    StateError,
    Validated,
    best_of,
    folder_name,
    list_states,
    newest_whole,
    prune,
    read_state,
    thin,
    verify,
    write_manifest,
)
from jobs.schema import Lora, Save
from tests.states import flip_a_bit, make_state


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def inside(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted(folder.iterdir())}


BOTH = sorted([MANIFEST, MODEL_FILE, OPTIMIZER_FILE])
WEIGHTS = sorted([MANIFEST, MODEL_FILE])

# ---------------------------------------------------------------- one state


def test_a_state_comes_back(tmp_path: Path) -> None:
    scalars = {"groups": {"a": {"d": 1e-6, "k": 3}}, "values": {"a.step": 7}}
    lora = Lora(rank=4, targets=("a*",))
    state = read_state(make_state(tmp_path, 500, lora=lora, optimizer_scalars=scalars))
    assert state.manifest.optimizer_scalars == scalars
    assert state.manifest.lora == lora
    assert (state.step, state.resumable) == (500, True)
    assert state.model == tmp_path / "step-000500" / MODEL_FILE
    assert state.optimizer == tmp_path / "step-000500" / OPTIMIZER_FILE
    verify(state)


def test_names_sort_by_step_for_people() -> None:
    assert [folder_name(step) for step in (1, 500, 1_000_000)] == ["step-000001", "step-000500", "step-1000000"]


def test_a_folder_that_was_not_finished(tmp_path: Path) -> None:
    path = make_state(tmp_path, 500)
    (path / MANIFEST).unlink()
    with pytest.raises(StateError, match=r"step-000500 has no state\.json"):
        read_state(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_manifest_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    path = make_state(tmp_path, 500)
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(StateError, match=r"step-000500/state\.json is of another version, or damaged"):
        read_state(path)


def test_a_manifest_of_another_format(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=f"is of format 99; this program reads {VERSION}"):
        read_state(make_state(tmp_path, 500, version=99))


@pytest.mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE])
def test_a_file_of_another_size(file: str, tmp_path: Path) -> None:
    path = make_state(tmp_path, 500)
    size = (path / file).stat().st_size
    cut(path / file)
    with pytest.raises(StateError, match=f"step-000500/{file} has {size // 2} bytes, not {size}"):
        read_state(path)
    (path / file).write_bytes(b"")
    with pytest.raises(StateError, match="has 0 bytes"):
        read_state(path)
    (path / file).unlink()
    with pytest.raises(StateError, match="is missing"):
        read_state(path)


def test_a_manifest_that_does_not_cover_every_byte(tmp_path: Path) -> None:
    path = make_state(tmp_path, 500)
    manifest = read_state(path).manifest
    for extents in (manifest.extents[1:], manifest.extents[:-1], manifest.extents[:1] * 2 + manifest.extents[1:]):
        write_manifest(path, replace(manifest, extents=extents))
        with pytest.raises(StateError, match="says nothing about byte"):
            read_state(path)


def test_a_manifest_without_weights(tmp_path: Path) -> None:
    path = make_state(tmp_path, 500)
    write_manifest(path, replace(read_state(path).manifest, files={}, extents=()))
    with pytest.raises(StateError, match=f"names no {MODEL_FILE}"):
        read_state(path)


@pytest.mark.parametrize("place", [0, 333, -1])
def test_verifying_names_the_damaged_run_of_bytes(place: int, tmp_path: Path) -> None:
    path = make_state(tmp_path, 500)
    flip_a_bit(path / MODEL_FILE, place)
    state = read_state(path)
    with pytest.raises(StateError, match=rf"{MODEL_FILE} is damaged between bytes (\d+) and (\d+)") as caught:
        verify(state)
    first, last = (int(word) for word in str(caught.value).split() if word.isdigit())
    assert first <= place % state.manifest.files[MODEL_FILE] < last


def test_a_file_that_cannot_be_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = read_state(make_state(tmp_path, 500))

    def fail(descriptor: int, extent: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "_hash", fail)
    with pytest.raises(StateError, match="Input/output error"):
        verify(state)


# ---------------------------------------------------------------- the newest one


def test_the_step_is_a_number_and_not_a_name(tmp_path: Path) -> None:
    """P32: step-500 sorts after step-1000, and the padding of names changes."""
    make_state(tmp_path, 500, "step-500")
    make_state(tmp_path, 1000, "step-1000")
    make_state(tmp_path, 900_000, "step-0900000")
    make_state(tmp_path, 100_000, "step-100000")
    states, notes = list_states(tmp_path)
    assert [state.step for state in states] == [500, 1000, 100_000, 900_000]
    assert notes == []
    newest, _ = newest_whole(tmp_path)
    assert newest is not None
    assert newest.step == 900_000


def test_no_states_yet(tmp_path: Path) -> None:
    assert list_states(tmp_path / "states") == ([], [])
    assert newest_whole(tmp_path / "states") == (None, [])


DAMAGE = {
    "half its weights": lambda path: cut(path / MODEL_FILE),
    "weights of no bytes": lambda path: (path / MODEL_FILE).write_bytes(b""),
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "half its manifest": lambda path: cut(path / MANIFEST),
    "no optimizer": lambda path: (path / OPTIMIZER_FILE).unlink(),
    "a flipped bit in its weights": lambda path: flip_a_bit(path / MODEL_FILE, 100),
    "a flipped bit in its optimizer": lambda path: flip_a_bit(path / OPTIMIZER_FILE, 1000),
    "a file in its place": lambda path: (shutil.rmtree(path), path.write_bytes(b"")),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_newest_is_told_and_the_one_before_is_used(case: str, tmp_path: Path) -> None:
    """P01: killed in mid-save, or after a power cut."""
    make_state(tmp_path, 100)
    DAMAGE[case](make_state(tmp_path, 200))
    newest, notes = newest_whole(tmp_path)
    assert newest is not None
    assert newest.step == 100
    assert len(notes) == 1
    assert "step-000200" in notes[0]


def test_half_written_folders_are_hidden_and_never_looked_at(tmp_path: Path) -> None:
    make_state(tmp_path, 100)
    make_state(tmp_path, 200, ".step-000200.part")
    assert [state.step for state in list_states(tmp_path)[0]] == [100]


def test_a_checkpoint_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    make_state(tmp_path, 100)
    make_state(tmp_path, 200, whole=False)
    newest, notes = newest_whole(tmp_path)
    assert newest is not None
    assert (newest.step, notes) == (100, [])


def test_all_damaged(tmp_path: Path) -> None:
    for step in (100, 200):
        flip_a_bit(make_state(tmp_path, step) / MODEL_FILE, 7)
    newest, notes = newest_whole(tmp_path)
    assert newest is None
    assert len(notes) == 2


# ---------------------------------------------------------------- thinning


def test_older_states_become_checkpoints_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        make_state(tmp_path, step)
    prune(tmp_path, 400, Save(every=1, states=1, weights=2))
    assert inside(tmp_path) == {"step-000300": WEIGHTS, "step-000400": BOTH}
    for state in list_states(tmp_path)[0]:
        verify(state)
    before = inside(tmp_path)
    prune(tmp_path, 400, Save(every=1, states=1, weights=2))
    assert inside(tmp_path) == before


def test_all_weights_may_stay(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        make_state(tmp_path, step)
    prune(tmp_path, 300, Save(every=1, states=2, weights="all"))
    assert inside(tmp_path) == {"step-000100": WEIGHTS, "step-000200": BOTH, "step-000300": BOTH}


def test_what_is_no_state_is_not_touched(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        make_state(tmp_path, step)
    (tmp_path / "step-000100" / MANIFEST).unlink()
    (tmp_path / "mine").mkdir()
    prune(tmp_path, 300, Save(every=1, states=1, weights=1))
    assert inside(tmp_path) == {
        "mine": [],
        "step-000100": sorted([MODEL_FILE, OPTIMIZER_FILE]),
        "step-000300": BOTH,
    }


def test_a_damaged_newer_state_never_counts_for_a_good_one(tmp_path: Path) -> None:
    """The newest, 500, has a flipped bit, so the run went on from 250 and was stopped at 260: 260 must stay whole."""
    make_state(tmp_path, 250)
    flip_a_bit(make_state(tmp_path, 500) / OPTIMIZER_FILE, 9)
    assert newest_whole(tmp_path)[0] == read_state(tmp_path / "step-000250")
    make_state(tmp_path, 260)
    prune(tmp_path, 260, Save(every=1, states=1, weights=2))
    assert newest_whole(tmp_path)[0] == read_state(tmp_path / "step-000260")


def test_what_a_kill_left_goes_with_the_next_call(tmp_path: Path) -> None:
    make_state(tmp_path, 100)
    make_state(tmp_path, 200, ".step-000200.part")
    make_state(tmp_path, 50, ".step-000050.old")
    prune(tmp_path, 100, Save(every=1, states=1, weights=1))
    assert inside(tmp_path) == {"step-000100": BOTH}


class Killed(BaseException):
    pass


def kill(*_: object, **__: object) -> None:
    raise Killed


def test_a_kill_between_manifest_and_unlink_leaves_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_state(tmp_path, 100)
    make_state(tmp_path, 200)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        with pytest.raises(Killed):
            prune(tmp_path, 200, Save(every=1, states=1, weights=2))
    assert inside(tmp_path)["step-000100"] == BOTH
    state = read_state(path)
    assert not state.resumable
    verify(state)
    prune(tmp_path, 200, Save(every=1, states=1, weights=2))
    assert inside(tmp_path)["step-000100"] == WEIGHTS, "the optimizer of a real model is 24 GB"


def test_a_kill_before_the_new_manifest_leaves_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_state(tmp_path, 100)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill)
        with pytest.raises(Killed):
            thin(read_state(path))
    state = read_state(path)
    assert state.resumable
    verify(state)


def test_a_kill_in_mid_removal_leaves_nothing_that_looks_like_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_state(tmp_path, 100)
    make_state(tmp_path, 200)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(Killed):
            prune(tmp_path, 200, Save(every=1, states=1, weights=1))
    assert [state.step for state in list_states(tmp_path)[0]] == [200]
    assert list_states(tmp_path)[1] == []
    prune(tmp_path, 200, Save(every=1, states=1, weights=1))
    assert inside(tmp_path) == {"step-000200": BOTH}


def test_a_manifest_is_readable_by_people(tmp_path: Path) -> None:
    value = json.loads((make_state(tmp_path, 500) / MANIFEST).read_text())
    assert (value["step"], value["files"].keys()) == (500, {MODEL_FILE, OPTIMIZER_FILE})


def test_the_state_of_the_lowest_validation_loss_stays(tmp_path: Path) -> None:
    losses = {100: 0.1, 200: 0.5, 300: 0.4, 400: None, 500: 0.6}
    for step, loss in losses.items():
        pictures = "others" if step == 100 else "these"  # of other pictures: not compared
        make_state(tmp_path, step, validation=None if loss is None else Validated(loss, pictures))
    best = best_of(list_states(tmp_path)[0])
    assert best is not None
    assert best.step == 300
    prune(tmp_path, 500, Save(every=1, states=1, weights=1), keep_best=True)
    assert inside(tmp_path) == {"step-000300": WEIGHTS, "step-000500": BOTH}
    make_state(tmp_path, 600, validation=Validated(0.3, "these"))
    prune(tmp_path, 600, Save(every=1, states=1, weights=1), keep_best=True)
    assert inside(tmp_path) == {"step-000600": BOTH}
    assert best_of([]) is None
