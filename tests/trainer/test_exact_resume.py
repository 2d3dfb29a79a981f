"""A run that is stopped or killed at any moment and gone on with is the run that nobody touched, to the bit.

In one process, this one: a kill is an end without a word, after which only what stands on the disk is there. Kills of
real processes, two of them, are in tests/soak.py.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bootstrap.outcome import STOPPED
from bootstrap.run_file import RunFile
from bootstrap.state import State, list_states, newest_whole, remove_leftovers
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import RunFolder, Volume
from jobs.values import OPTIMIZERS, SCHEDULES
from tests.runs import make_world
from tests.training import fill_volume, prepared, read_metrics, shared_folder
from trainer import train as trainer
from trainer.train import Training, train
from trainer.world import World

pytestmark = pytest.mark.timeout(600)
SMALL: dict[str, Any] = {"resolution": 64, "images_per_step": 2, "caption_dropout": 0.4, "max_grad_norm": None}
MEMORY = 1 << 50  # enough for a copy of any state


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, flux_tiny_schnell: Path) -> Volume:
    bases = (flux_tiny, flux_tiny_schnell)
    return Volume(shared_folder(tmp_path_factory, "training", lambda root: fill_volume(root, *bases)))


@pytest.fixture
def world(control: dist.ProcessGroup) -> World:
    torch.set_num_threads(1)
    return make_world(control)


def resumed(run: RunFile) -> RunFile:
    """As the entrypoint starts it."""
    remove_leftovers(run.folder.states)
    state, notes = newest_whole(run.folder.states)
    assert notes == []
    run = replace(run, resume=state.path if state else None)
    run.write(run.read_items())
    return run


def start(run: RunFile, world: World, *, stop: int = 0, kill: int = 0, in_pass: bool = False) -> Training:
    """Trains from the newest state: to the end, to a TERM in step ``stop``, or to a kill in step ``kill``, in the
    middle of its passes or when it is done and, where that was due, its save was begun."""
    t = Training.set_up(resumed(run), world)
    t.saver.free_memory = lambda: MEMORY
    world.stop_requested = False
    steps, take = t.steps, t.take_step

    def watched() -> Iterator[int]:
        for done in steps():
            world.stop_requested |= done == stop
            yield done
            if done == kill:
                raise Killed

    def interrupted(step: int, data: Any, waited: float) -> Any:
        if in_pass and step == kill - 1:
            half = replace(data, batches=data.batches[: max(1, len(data.batches) // 2)])
            take(step, half, waited)
            raise Killed
        return take(step, data, waited)

    t.steps, t.take_step = watched, interrupted  # type: ignore[method-assign]
    try:
        train(t)
    except Killed:
        t.saver.discard()
        t.metrics.close()
    return t


def end(run: RunFile) -> State:
    return list_states(run.folder.states)[0][-1]


def assert_same(run: RunFile, other: RunFile) -> None:
    """Every step once, each loss and rate to the last digit, and the last state to the bit."""
    keys = ("step", "loss", "lr")
    lines, others = ([[line[k] for k in keys] for line in read_metrics(r.folder.metrics)] for r in (run, other))
    assert lines == others
    assert [line[0] for line in lines] == list(range(1, run.plan.steps + 1))
    one, two = end(run), end(other)
    assert one.step == two.step == run.plan.steps
    assert one.optimizer.read_bytes() == two.optimizer.read_bytes()
    assert one.manifest.optimizer_scalars == two.manifest.optimizer_scalars
    weights, expected = read_tensors(one.model), read_tensors(two.model)
    assert all(torch.equal(weights[name], expected[name]) for name in weights | expected)


# ---------------------------------------------------------------- moments

EVERY = {"steps": 7, "warmup": 4, "schedule": "cosine", "save": {"every": 2, "states": 2, "weights": 4}}
MOMENTS: dict[str, list[dict[str, Any]]] = {
    "killed before the first save": [{"kill": 1}],
    "killed in the middle of an accumulation": [{"kill": 3, "in_pass": True}],
    "killed when a save is begun": [{"kill": 4}],
    "killed in the last step": [{"kill": 7, "in_pass": True}],
    "stopped in warm-up": [{"stop": 1}],
    "five times": [{"stop": 1}, {"kill": 2, "in_pass": True}, {"kill": 3}, {"stop": 5}, {"kill": 6}],
}


@pytest.fixture(scope="module")
def straight(volume: Volume, control: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """14 items in buckets of 4 sizes, 2 a step in passes of 1: an epoch has 8 steps of several buckets."""
    torch.set_num_threads(1)
    keys = SMALL | EVERY | {"plan": {"images_per_pass": 1}}
    shared_folder(
        tmp_path_factory, "straight", lambda _: start(prepared(volume, name="straight", **keys), make_world(control))
    )
    return RunFile.read(volume.run("straight").run_file)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_full_run_interrupted_at(moment: str, straight: RunFile, volume: Volume, world: World) -> None:
    name = "full-" + "".join(letter if letter.isalnum() else "-" for letter in moment)
    run = prepared(volume, name=name, **SMALL, **EVERY, plan={"images_per_pass": 1})
    for interruption in MOMENTS[moment]:
        start(run, world, **interruption)
        assert end_step(run) < run.plan.steps
    start(run, world)
    assert_same(run, straight)


def end_step(run: RunFile) -> int:
    states = list_states(run.folder.states)[0]
    return states[-1].step if states else 0


# ---------------------------------------------------------------- optimizers and schedules

PAIRS = list(zip(OPTIMIZERS, itertools.cycle(SCHEDULES)))  # every optimizer, and every schedule


@pytest.mark.parametrize(("optimizer", "schedule"), PAIRS)
def test_every_optimizer_goes_on_as_if_nothing_had_been(
    optimizer: str, schedule: str, volume: Volume, world: World
) -> None:
    keys: dict[str, Any] = SMALL | {"method": "lora", "lora": {"rank": 2, "targets": ["*_blocks.0.attn.*"]}}
    keys |= {"optimizer": optimizer, "schedule": schedule, "learning_rate": 1.0 if optimizer == "Prodigy" else 1e-2}
    keys |= {"steps": 5, "warmup": 1, "save": {"every": 2}}
    one, other = (prepared(volume, name=f"{optimizer}-{kind}", **keys) for kind in ("straight", "broken"))
    start(one, world)
    start(other, world, kill=3)
    start(other, world, stop=3)
    start(other, world)
    assert_same(other, one)
    losses = [line["loss"] for line in read_metrics(one.folder.metrics)]
    assert all(math.isfinite(loss) for loss in losses)


def test_every_schedule_has_its_turn() -> None:
    assert {schedule for _, schedule in PAIRS} == set(SCHEDULES)


# ---------------------------------------------------------------- lengths


def test_total_steps_are_absolute_and_a_longer_job_goes_on(volume: Volume, world: World) -> None:
    """P03: killed at 3, stopped at 5, then made longer: every step is executed once."""
    keys = SMALL | {"method": "lora", "lora": {"rank": 2}, "save": {"every": 1}, "warmup": 0}
    run = prepared(volume, name="longer", **keys, steps=6)
    for interruption in ({"kill": 3}, {"stop": 5}, {}):
        start(run, world, **interruption)
    longer = replace(run, plan=replace(run.plan, steps=8), job=run.job.model_copy(update={"steps": 8}))
    longer.write(run.read_items())
    start(longer, world)
    start(longer, world)  # is done: nothing happens
    assert [line["step"] for line in read_metrics(run.folder.metrics)] == list(range(1, 9))


# ---------------------------------------------------------------- asked for while it runs


def steps_saved(folder: RunFolder) -> list[int]:
    return [state.step for state in list_states(folder.states)[0]]


def test_a_file_asks_for_a_state(volume: Volume, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.requests.GLANCE", 0.0)
    run = prepared(volume, name="save-now", **SMALL, method="lora", lora={"rank": 2}, steps=3, save={"every": 100})
    run.folder.save_now.touch()
    start(run, world)
    assert steps_saved(run.folder) == [1, 3]
    assert not run.folder.save_now.exists()


def test_a_file_pauses_the_run_its_state_saved(volume: Volume, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.requests.GLANCE", 0.0)
    run = prepared(volume, name="pause", **SMALL, method="lora", lora={"rank": 2}, steps=3, save={"every": 100})
    paused: list[list[int]] = []
    sleep = trainer.time.sleep

    def wake(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # another test's sign of life
            sleep(seconds)
            return
        paused.append(steps_saved(run.folder))
        if len(paused) == 3:
            run.folder.pause.unlink()
        sleep(0.01)

    monkeypatch.setattr("trainer.requests.time.sleep", wake)
    t = Training.set_up(resumed(run), world)
    world.stop_requested = False
    first = t.take_step

    def pause_in_step_2(step: int, data: Any, waited: float) -> Any:
        if step == 1:
            run.folder.pause.touch()
        return first(step, data, waited)

    t.take_step = pause_in_step_2  # type: ignore[method-assign]
    assert train(t).code == 0
    assert paused[:3] == [[2], [2], [2]]
    assert steps_saved(run.folder) == [2, 3]


def test_a_stop_ends_a_pause(volume: Volume, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepared(volume, name="stopped-pause", **SMALL, method="lora", lora={"rank": 2}, steps=3)
    run.folder.pause.touch()
    t = Training.set_up(resumed(run), world)
    world.stop_requested = False
    taken: list[int] = []
    take = t.take_step

    def counted(step: int, data: Any, waited: float) -> Any:
        taken.append(step)
        return take(step, data, waited)

    t.take_step = counted  # type: ignore[method-assign]
    monkeypatch.setattr("trainer.requests.time.sleep", lambda seconds: setattr(world, "stop_requested", True))
    assert train(t).code == STOPPED
    assert taken == []  # paused before the first step: a pause outlasts a restart
    assert steps_saved(run.folder) == []


def test_states_by_the_clock_and_by_epochs(volume: Volume, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = SMALL | {"method": "lora", "lora": {"rank": 2}, "steps": 6}
    run = prepared(volume, name="epochs", **common | {"images_per_step": 7, "save": {"every": "1 epoch"}})
    start(run, world)
    assert run.plan.steps_per_epoch == 2
    assert steps_saved(run.folder) == [2, 4, 6]
    run = prepared(volume, name="minutes", **common | {"save": {"every": "1m"}})
    t = Training.set_up(resumed(run), world)
    world.stop_requested = False
    take = t.take_step

    def slowly(step: int, data: Any, waited: float) -> Any:
        t.requests.saved -= 25.0
        return take(step, data, waited)

    t.take_step = slowly  # type: ignore[method-assign]
    train(t)
    assert steps_saved(run.folder) == [3, 6]
