"""A save that is killed, or whose disk fails, at every one of its file-system calls: enumerated, not sampled."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.bases import FLUX_TINY
from bootstrap.run_file import RunFile
from bootstrap.state import State, list_states, newest_whole, remove_leftovers, verify
from bootstrap.volume import Volume
from tests.runs import make_job, make_run, make_trained, make_weights
from tests.tracer import CAN_FAIL, apart, can_trace, trace
from trainer import state_files
from trainer.checkpoint import Saver
from trainer.make_optimizer import make_optimizer
from trainer.optimizer import Optimizer
from trainer.trained import Trained
from trainer.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_trace(), reason="this machine lets no process trace its child"),
]

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
SAVED, REFUSED = 0, 3  # codes of a child: the state stands; the save raised OSError


class Alone(World):
    """One process without a process group, whose threads a fork would not take along."""

    def __init__(self) -> None:
        super().__init__(0, 1, torch.device("cpu"), control=None)  # type: ignore[arg-type]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def from_lead(self, value: Any) -> Any:
        return value

    def agree(self, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def meet(self) -> None:
        pass


@dataclass(frozen=True)
class Setup:
    """A run with two states, the older one thinned, and what the third is made of."""

    run: RunFile
    tensors: list[Trained]
    optimizer: Optimizer
    background: bool  # whether a thread writes the state

    def save(self, volume: Path, step: int = 3) -> State:
        state_files.PAUSE = 0.0
        saver = Saver(replace(self.run, volume=volume), Alone(), lambda: (1 << 50) * self.background)
        saver.begin(step, self.tensors, self.optimizer, {})
        assert saver.writing is not None
        assert (saver.writing.thread is not None) == self.background
        return saver.publish()

    def save_or_refuse(self, volume: Path) -> int:
        try:
            self.save(volume)
        except OSError:
            return REFUSED
        return SAVED


@pytest.fixture(params=[False, True], ids=["now", "in the background"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    job = make_job(method="lora", lora={"rank": 2}, save={"states": 1, "weights": 2})
    run = make_run(tmp_path / "before", job, make_weights(Path("/nowhere")), threads=2)
    layer = "transformer_blocks.0.attn.to_out.0.lora_{}.default.weight"
    width = FLUX_TINY.width
    tensors = make_trained({layer.format("A"): torch.ones(2, width), layer.format("B"): torch.ones(width, 2)})
    optimizer = make_optimizer(tensors, job, run.plan, Alone())
    optimizer.begin_step(0, 1e-3, torch.ones(()))
    for tensor in tensors:
        tensor.parameter.grad = torch.ones(tensor.shape)
    optimizer.finish_step()
    made = Setup(run, tensors, optimizer, request.param)
    for step in (1, 2):
        apart(partial(made.save, run.volume, step))
    assert [(s.step, s.resumable) for s in list_states(run.folder.states)[0]] == [(1, False), (2, True)]
    return made


def states_of(setup: Setup, volume: Path) -> Path:
    return Volume(volume).run(setup.run.job.name).states


def at_every_call(
    setup: Setup, folder: Path, check: Callable[[Path, str, int | None], None], errors: tuple[int, ...] = ()
) -> list[str]:
    """Repeats the save with a kill, or with one of ``errors`` in turn, at its first call, at its second, and so on,
    until it gets through; ``check`` is given the volume, the call and the child's code."""
    calls: list[str] = []
    for number in range(1000):
        volume = folder / str(number)
        shutil.copytree(setup.run.volume, volume)
        save = partial(setup.save_or_refuse, volume)
        if errors:
            seen = trace(save, volume, fail_at=(number, errors[number % len(errors)]))
        else:
            seen = trace(save, volume, kill_at=number)
        if len(seen.calls) <= number:
            return calls
        calls.append(seen.calls[number])
        check(volume, f"call {number}: {seen.calls[number]}", seen.code)
        shutil.rmtree(volume)
    raise AssertionError("the save does not end")


def test_a_kill_at_any_call_leaves_the_old_state_or_the_new_one(setup: Setup, tmp_path: Path) -> None:
    newest_after = []

    def check(volume: Path, call: str, code: int | None) -> None:
        assert code is None, call
        states = states_of(setup, volume)
        newest, notes = newest_whole(states)
        assert newest is not None, call
        assert (newest.step in (2, 3), notes) == (True, []), call
        newest_after.append(newest.step)
        for state in list_states(states)[0]:
            verify(state)
        assert len(list(states.glob(".step-*"))) <= 1, call
        if len(newest_after) % 4 and newest.step == 3:
            return
        remove_leftovers(states)  # as the next start does
        assert all(path.name.startswith("step-") for path in states.iterdir() if path.is_dir()), call
        setup.save(volume)
        kept = [(s.step, s.resumable) for s in list_states(states)[0]]
        assert kept == [(2, False), (3, True)], call
        assert not [path for path in states.rglob(".*") if ".writers." not in path.name], call

    calls = apart(lambda: (at_every_call(setup, tmp_path, check), newest_after))
    kinds = {call.split()[0] for call in calls[0]}
    assert {"pwrite64", "fsync", "ftruncate"} <= kinds
    assert any(kind.startswith("rename") for kind in kinds)
    assert any(kind.startswith("unlink") for kind in kinds)
    assert calls[1] == sorted(calls[1])  # the old one up to the rename, the new one from there
    assert set(calls[1]) == {2, 3}


@pytest.mark.skipif(not CAN_FAIL, reason="failing a call needs x86-64")
@pytest.mark.parametrize("turn", range(4 if os.environ.get("FLUXPOD_TEST_EVERY_ERROR") else 1))
def test_a_disk_that_fails_at_any_call_costs_no_state(turn: int, setup: Setup, tmp_path: Path) -> None:
    """Four errors take turns; with FLUXPOD_TEST_EVERY_ERROR=1 each comes at each call."""
    if setup.background:
        return  # the same code writes
    codes = []

    def check(volume: Path, call: str, code: int | None) -> None:
        assert code in (SAVED, REFUSED), call
        codes.append(code)
        states = states_of(setup, volume)
        newest, notes = newest_whole(states)
        assert newest is not None, call
        assert notes == [], call
        if code == REFUSED:
            # Where only the last look at the new one failed, it stands as well, and nothing is pruned yet.
            kept = [(s.step, s.resumable) for s in list_states(states)[0] if s.step < 3]
            assert kept == [(1, False), (2, True)], call
            assert not list(states.glob(".step-*")), call
        else:
            assert newest.step == 3, call

    codes = apart(lambda: (at_every_call(setup, tmp_path, check, ERRORS[turn:] + ERRORS[:turn]), codes)[1])
    assert set(codes) == {SAVED, REFUSED}
