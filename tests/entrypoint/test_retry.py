"""A run whose GPU runs out of memory, from the job to its end, by the real launcher, on CPU.

What runs out is an optimizer that a job may name: it raises the error of torch, in its words, as long as the plan
keeps all activations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.bases import FLUX_TINY
from bootstrap.dataset import Dataset
from bootstrap.outcome import CRASH, POD_WRONG, STOPPED, Outcome
from bootstrap.plan import Plan, make_plan
from bootstrap.run_file import RunFile
from bootstrap.shortage import Shortage, read_failed
from bootstrap.volume import Volume, read_json
from entrypoint import run as run_module
from entrypoint.launch import Stop
from entrypoint.run import Prepared, Running
from entrypoint.status import StatusFile
from jobs.load import LoadedJob, load_job
from tests.entrypoint.test_run import begin, losses, outcome_of
from tests.runs import make_run
from tests.training import JOB, POD, fill_volume

pytestmark = pytest.mark.timeout(600)

TOLD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 44.50 GiB of which 4.00 MiB is "
    "free. Of the allocated memory 30.00 MiB is allocated by PyTorch, and 2.00 MiB is reserved by PyTorch but "
    "unallocated."
)
NAME = "tests.entrypoint.test_retry.RunsOut"
RETRY: dict[str, Any] = JOB | {
    "name": "retry",
    "steps": 5,
    "images_per_step": 2,
    "save": {"every": 2},
    "optimizer": NAME,
}


class RunsOut(torch.optim.SGD):
    """SGD that needs memory for activations in the fourth step, which only a checkpointing plan leaves."""

    def __init__(self, parameters: Any, lr: float, **options: Any):
        super().__init__(parameters, lr=lr, **options)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        plan = json.loads(Path(sys.argv[-1]).read_text())["plan"]
        if plan["checkpointed_blocks"] == 0 and self.steps == 4:
            raise torch.OutOfMemoryError(TOLD)
        return super().step(closure)


@pytest.mark.slow
def test_it_goes_on_from_the_newest_state_by_a_plan_that_needs_less(tmp_path: Path, flux_tiny: Path) -> None:
    """That checkpointing changes no bit is shown in tests/trainer."""
    program = begin(fill_volume(tmp_path / "volume", flux_tiny), RETRY)
    assert program.ends() == 0, program.said()
    said = program.said()
    assert outcome_of(program.folder).code == 0
    assert "out of GPU memory: in step 4 process 0 held " in said
    assert "It is planned anew, with less memory and the same numbers" in said
    assert "going on at step 2 of 5" in said
    assert list(losses(program.folder)) == [1, 2, 3, 4, 5]
    plan = read_json(program.folder.run_file)["plan"]
    assert plan["checkpointed_blocks"] == 5
    assert any(choice["name"] == "retry" and choice["value"] == "plan 2" for choice in plan["choices"])
    (failed,) = read_failed(program.folder.memory)
    assert failed.setting == plan["setting"]
    assert plan["memory_per_gpu"] < failed.planned
    assert "Traceback" not in said


# ---------------------------------------------------------------- how often, and when not


DATA = Dataset((), images=10, captions=10, notes=(), parts=())
SHORTAGE = Shortage("step 4", 0, 20 << 20, 30 << 20, 2 << 20, 0, 0)
OUT = Outcome(POD_WRONG, "out of GPU memory: in step 4", 0, SHORTAGE)


@dataclass
class Scripted:
    """``_run`` with a trainer whose outcomes are told beforehand; the real preparation, of made-up data."""

    running: Running
    outcomes: list[Outcome]
    stopping: bool  # a signal comes while it trains
    plans: list[Plan] = field(default_factory=list)

    def prepare(self, loaded: LoadedJob, running: Running) -> Prepared:
        job = loaded.job
        failed = read_failed(running.folder.memory)
        plan = make_plan(job, POD, FLUX_TINY, DATA.summary(), failed)
        return Prepared(replace(make_run(running.volume.root, job), plan=plan), DATA, POD)

    def train(self, run: RunFile, running: Running, uploads: Any) -> Outcome:
        self.plans.append(run.plan)
        running.stop.requested = self.stopping
        return self.outcomes.pop(0)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, Scripted]]:
    def go(outcomes: list[Outcome], stopping: bool = False, **keys: Any) -> tuple[Outcome, Scripted]:
        volume = Volume(tmp_path)
        volume.create()
        file = volume.jobs / "a.yaml"
        file.write_text(json.dumps(JOB | {"name": "a", "images_per_step": 8} | keys))
        folder = volume.run("a")
        folder.root.mkdir(parents=True, exist_ok=True)
        running = Running(file, file.read_text(), volume, folder, StatusFile(folder.status), Stop())
        scripted = Scripted(running, outcomes, stopping)
        for name in ("prepare", "train"):
            monkeypatch.setattr(run_module, name, getattr(scripted, name))
        monkeypatch.setattr(run_module, "encode", lambda *_: None)
        return run_module._outcome_of(load_job(file), running), scripted

    return go


Go = Callable[..., tuple[Outcome, Scripted]]


def test_it_is_tried_three_times_more_and_then_held(script: Go) -> None:
    outcome, scripted = script([OUT] * 9)
    assert [plan.memory_per_gpu for plan in scripted.plans] == sorted(
        {plan.memory_per_gpu for plan in scripted.plans}, reverse=True
    ), "each needs less"
    assert len(scripted.plans) == 4
    assert len(read_failed(scripted.running.folder.memory)) == 4
    assert outcome.code == POD_WRONG
    assert Outcome.read(scripted.running.folder.outcome) == outcome


def test_a_job_that_wants_no_retry_is_held_at_once(script: Go) -> None:
    outcome, scripted = script([OUT], plan={"retry": False})
    assert (outcome.code, len(scripted.plans)) == (POD_WRONG, 1)
    assert len(read_failed(scripted.running.folder.memory)) == 1


def test_any_other_end_is_no_matter_of_the_plan(script: Go) -> None:
    outcome, scripted = script([OUT, Outcome(CRASH, "a stone in the way", 0)])
    assert outcome == Outcome(CRASH, "a stone in the way", 0)
    assert len(read_failed(scripted.running.folder.memory)) == 1


def test_a_stop_is_heard_between_two_plans(script: Go) -> None:
    outcome, scripted = script([OUT] * 2, stopping=True)
    assert (outcome.code, len(scripted.plans)) == (STOPPED, 1)
    assert len(read_failed(scripted.running.folder.memory)) == 1, "what was measured is kept for the next start"
