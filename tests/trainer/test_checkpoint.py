"""A state is whole or not there, holds the trainer's very numbers, and takes them back."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.run_file import RunFile
from bootstrap.state import MANIFEST, MODEL_FILE, OPTIMIZER_FILE, State, list_states, newest_whole, read_state, verify
from bootstrap.tensor_files import read_header, read_tensors
from tests.runs import make_job, make_run, make_weights, make_world
from trainer import checkpoint
from trainer.adapter_files import resume_adapter
from trainer.checkpoint import Saver, load_optimizer, publish_output
from trainer.make_optimizer import make_optimizer
from trainer.model import build_model, fill, sources
from trainer.optimizer import Optimizer, Piece
from trainer.state_files import NonFiniteError, lay_out
from trainer.trained import Trained, trained_tensors
from trainer.world import World

Setup = tuple[RunFile, list[Trained], Optimizer]
LORA = {"method": "lora", "lora": {"rank": 4, "alpha": 2}}
# A scale of 1.5 / 4 is multiplied into this layout's matrices, and rounded.
ROUNDED = {"method": "lora", "lora": {"rank": 4, "alpha": 1.5, "layout": "diffusers"}}


@pytest.fixture
def world(control: dist.ProcessGroup) -> World:
    return make_world(control)


@pytest.fixture
def set_up(flux_tiny: Path, tmp_path: Path, world: World) -> Callable[..., Setup]:
    def make(**keys: Any) -> Setup:
        run = make_run(tmp_path, make_job(**keys), make_weights(flux_tiny))
        places = sources(FLUX_TINY, [flux_tiny / SINGLE_FILE], "bfl")
        model = build_model(run.job, run.plan, FLUX_TINY, world, lambda model: fill(model, places, world))
        tensors = trained_tensors(model, 0, 1)
        return run, tensors, make_optimizer(tensors, run.job, run.plan, world)

    return make


def take_steps(tensors: list[Trained], optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.begin_step(step, 1e-3, torch.ones(()))
        for number, tensor in enumerate(tensors):
            generator = torch.Generator().manual_seed(1000 * step + number)
            tensor.parameter.grad = torch.randn(tensor.shape, generator=generator).to(tensor.weight.dtype)
        optimizer.finish_step()


def save(setup: Setup, step: int, world: World) -> State:
    run, tensors, optimizer = setup
    saver = Saver(run, world)
    saver.begin(step, tensors, optimizer, {"modelspec.title": "test"})
    return saver.publish()


def test_a_full_state_before_any_step_is_the_base_file(
    set_up: Callable[..., Setup], flux_tiny: Path, world: World
) -> None:
    state = save(set_up(), 1, world)
    base, saved = read_tensors(flux_tiny / SINGLE_FILE), read_tensors(state.model)
    assert saved.keys() == base.keys()
    assert all(torch.equal(saved[name], base[name]) for name in base)
    assert read_header(state.model).metadata == {"modelspec.title": "test"}


@pytest.mark.parametrize("keys", [{}, LORA, {"optimizer": "AdamW"}, LORA | {"optimizer": "Prodigy"}])
def test_what_is_saved_is_whole_and_found(keys: dict[str, Any], set_up: Callable[..., Setup], world: World) -> None:
    run, tensors, optimizer = set_up(**keys)
    take_steps(tensors, optimizer, 0, 2)
    state = save((run, tensors, optimizer), 2, world)
    assert sorted(path.name for path in state.path.iterdir()) == sorted([MODEL_FILE, OPTIMIZER_FILE, MANIFEST])
    assert read_state(state.path) == state
    verify(state)
    assert newest_whole(run.folder.states) == (state, [])
    assert [path.name for path in run.folder.states.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("keys", [LORA, LORA | {"optimizer": "Prodigy"}, ROUNDED | {"optimizer": "AdamW8bit"}, ROUNDED])
def test_an_adapter_goes_on_from_a_state(keys: dict[str, Any], set_up: Callable[..., Setup], world: World) -> None:
    run, straight, optimizer = set_up(**keys)
    take_steps(straight, optimizer, 0, 2)
    state = save((run, straight, optimizer), 2, world)
    take_steps(straight, optimizer, 2, 4)
    _, tensors, again = set_up(**keys)
    resume_adapter(read_state(state.path), tensors, run.job.lora)
    load_optimizer(read_state(state.path), again)
    take_steps(tensors, again, 2, 4)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(tensors, straight, strict=True))


def test_a_full_model_goes_on_from_a_state(set_up: Callable[..., Setup], flux_tiny: Path, world: World) -> None:
    run, straight, optimizer = set_up()
    take_steps(straight, optimizer, 0, 2)
    state = save((run, straight, optimizer), 2, world)
    take_steps(straight, optimizer, 2, 4)
    places = sources(FLUX_TINY, [state.model], "bfl")
    model = build_model(run.job, run.plan, FLUX_TINY, world, lambda model: fill(model, places, world))
    tensors = trained_tensors(model, 0, 1)
    again = make_optimizer(tensors, run.job, run.plan, world)
    load_optimizer(state, again)
    take_steps(tensors, again, 2, 4)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(tensors, straight, strict=True))


def test_older_states_are_thinned_after_the_new_one_stands(set_up: Callable[..., Setup], world: World) -> None:
    setup = set_up(save={"states": 1, "weights": 2})
    for step in (1, 2, 3):
        save(setup, step, world)
    states, notes = list_states(setup[0].folder.states)
    assert [(state.step, state.resumable) for state in states] == [(2, False), (3, True)]
    assert notes == []


def test_a_state_tells_what_its_writing_took_not_when_it_was_published(
    set_up: Callable[..., Setup], world: World
) -> None:
    """In between, samples may be drawn for minutes."""
    run, tensors, optimizer = set_up()
    saver, begun = Saver(run, world, free_memory=lambda: 1 << 40), time.monotonic()
    saver.begin(1, tensors, optimizer, {})
    assert saver.writing
    assert saver.writing.thread
    saver.writing.thread.join()
    at_most = time.monotonic() - begun
    time.sleep(0.01)
    assert saver.publish().manifest.seconds <= at_most + 0.001  # milliseconds are told


def test_a_copy_slower_than_writing_leaves_the_next_state_to_be_written_at_once(
    set_up: Callable[..., Setup], world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run, tensors, optimizer = set_up()
    saver, copied = Saver(run, world, free_memory=lambda: 1 << 40), []
    caplog.set_level("INFO", checkpoint.__name__)
    for step in (1, 2, 3):
        saver.begin(step, tensors, optimizer, {})
        assert saver.writing
        copied.append(saver.writing.thread is not None)
        saver.writing.copying *= 1e6 if step == 1 else 0
        saver.publish()
    assert copied == [True, False, True]
    told = [message for message in caplog.messages if "copying it took longer than writing" in message]
    assert len(told) == 1
    assert "step 1 " in told[0]


def test_what_is_copied_is_the_same_in_memory_of_its_own(world: World) -> None:
    tensors = [
        torch.randn(3, 1_000_001).to(torch.bfloat16),  # more than is copied at a time, and not a multiple of it
        torch.randint(0, 255, (5, 256), dtype=torch.uint8),
        torch.tensor(2.5),
        torch.randn(7, 6).T,
    ]
    pieces = [Piece(str(number), tensor, tuple(tensor.shape)) for number, tensor in enumerate(tensors)]
    layout = lay_out("file", pieces, {}, world)
    copied, before = layout.copied(3), [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(piece.tensor, old) for piece, old in zip(copied.pieces, before, strict=True))
    assert [(s.offset, s.length) for s in copied.spans()] == [(s.offset, s.length) for s in layout.spans()]
    assert lay_out("none", [], {}, world).copied(3).pieces == ()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_never_saved(value: float, set_up: Callable[..., Setup], world: World) -> None:
    """P06: such a file saves and loads without complaint elsewhere."""
    setup = set_up(**LORA)
    before = save(setup, 1, world)
    setup[1][3].weight.view(-1)[0] = value
    with pytest.raises(NonFiniteError, match="holds NaN or infinity"):
        save(setup, 2, world)
    assert newest_whole(setup[0].folder.states) == (before, [])
    assert [path.name for path in setup[0].folder.states.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("place", ["create_files", "write_spans", "write_manifest", "read_state"])
def test_a_disk_that_does_not_take_it_leaves_the_older_state(
    place: str, set_up: Callable[..., Setup], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = set_up(**LORA)
    before = save(setup, 1, world)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, place, full)
    with pytest.raises(OSError, match="No space"):
        save(setup, 2, world)
    assert [path.name for path in setup[0].folder.states.iterdir()] == ["step-000001"]
    assert newest_whole(setup[0].folder.states) == (before, [])


def test_a_leftover_of_a_kill_is_no_hindrance(set_up: Callable[..., Setup], world: World) -> None:
    setup = set_up(**LORA)
    for name in (".step-000001.part", "step-000001"):
        (setup[0].folder.states / name).mkdir(parents=True)
        (setup[0].folder.states / name / MODEL_FILE).write_bytes(b"half")
    state = save(setup, 1, world)
    verify(state)
    assert [path.name for path in setup[0].folder.states.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("links", [True, False])
def test_the_output_is_the_states_weights_and_outlives_it(
    links: bool, set_up: Callable[..., Setup], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = save(set_up(**LORA), 1, world)
    expected = state.model.read_bytes()
    if not links:

        def refuse(*_: object) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "output" / "test.safetensors"
    monkeypatch.setattr(checkpoint, "COPIED_AT_ONCE", 1000)
    signs: list[int] = []
    for _ in range(2):  # a longer run replaces it
        publish_output(state, target, lambda: signs.append(1))
    assert len(signs) == (0 if links else 2 * math.ceil(len(expected) / 1000))  # a copy tells that it gets further
    assert (os.stat(target).st_ino == os.stat(state.model).st_ino) == links
    state.model.unlink()
    assert target.read_bytes() == expected
    assert [path.name for path in target.parent.iterdir()] == ["test.safetensors"]


def test_the_manifest_tells_how_it_was_trained(set_up: Callable[..., Setup], world: World) -> None:
    run, tensors, optimizer = set_up(**LORA)
    manifest = save((replace(run, plan=replace(run.plan, processes=1)), tensors, optimizer), 7, world).manifest
    assert (manifest.step, manifest.method, manifest.lora, manifest.optimizer) == (7, "lora", run.job.lora, "AdamW")
    assert manifest.versions["torch"].startswith(torch.__version__.split("+")[0])


# ---------------------------------------------------------------- an adapter's file


@pytest.mark.parametrize("many_writers", [True, False])
@pytest.mark.parametrize("memory", [0, 1 << 40])
def test_an_adapter_that_is_not_what_was_trained_is_no_state(
    many_writers: bool, memory: int, set_up: Callable[..., Setup], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written now, in the background, or by rank 0: it is read back, and the state before it stands."""
    setup = set_up(**LORA)
    run, tensors, optimizer = setup
    take_steps(tensors, optimizer, 0, 1)
    first = save(setup, 1, world)
    monkeypatch.setattr(checkpoint, "takes_many_writers", lambda *_: many_writers)
    real = checkpoint.fill_places

    def spoil(path: Path) -> bytes:
        head = real(path)
        with path.open("r+b") as file:
            file.seek(-2000, os.SEEK_END)
            file.write(bytes(1000))
        return head

    monkeypatch.setattr(checkpoint, "fill_places", spoil)
    saver = Saver(run, world, lambda: memory)
    take_steps(tensors, optimizer, 1, 2)

    def again() -> None:
        saver.begin(2, tensors, optimizer, {})
        saver.publish()

    with pytest.raises(OSError, match="does not hold what was trained: "):
        again()
    assert newest_whole(run.folder.states) == (first, [])
    assert [path.name for path in run.folder.states.iterdir()] == ["step-000001"]
