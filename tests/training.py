"""Real trainings of flux-tiny on a volume of its own.

``train`` starts the trainer's processes as the launcher does, but by a fork server that has imported torch once: a
world of two is up in a second instead of fifteen. Runs by the whole program, launcher included, are in
tests/entrypoint/test_run.py.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.assistant import assistant_bytes, find_assistant
from bootstrap.cache import Cache
from bootstrap.dataset import scan
from bootstrap.outcome import Outcome
from bootstrap.plan import make_plan
from bootstrap.pod import Pod
from bootstrap.run_file import RunFile
from bootstrap.state import State, list_states
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import Volume
from bootstrap.wanted import Wanted
from bootstrap.weights import fetch_weights
from entrypoint.launch import free_port
from jobs.schema import Job
from tiny.drawn import draw_dataset

POD = Pod(gpus=(), cpus=1, memory=8 << 30, shm=0, disk_free=1 << 40)  # one CPU: one thread, so sums have one order
IMAGES = 10  # drawn: in four buckets, the last of which gives a smaller step
LIMIT = 240.0  # seconds after which a training is taken to hang

JOB: dict[str, Any] = {
    "base": "flux-tiny",
    "method": "full",
    "datasets": [{"path": "datasets/drawn"}],
    "resolution": 64,
    "bucket_step": 16,  # 64 x 64, 80 x 48, 48 x 80 and more: steps of several buckets
    "steps": 6,
    "warmup": 2,
    "learning_rate": 1e-3,  # random weights move visibly in a few steps
    "caption_dropout": 0.0,
}
"""The keys that these trainings share; a test adds a name and changes what it is about."""


def shared_folder(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that ``make`` fills once in a session, also where several workers need it."""
    root = factory.getbasetemp()
    if root.name.startswith("popen-"):  # a worker's own folder, inside the session's
        root = root.parent
    folder, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def fill_volume(root: Path, *bases: Path) -> Volume:
    """Drawn pictures in datasets/drawn, and links to the bases in models/."""
    volume = Volume(root)
    volume.create()
    draw_dataset(volume.datasets / "drawn", IMAGES)
    for base in bases:
        (volume.models / base.name).symlink_to(base)
    return volume


# ---------------------------------------------------------------- processes

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["tests.training", "trainer.train", "trainer.encode"])


def start(
    work: Callable[..., int | None], *arguments: Any, log: Path, rank: int = 0, size: int = 1, port: int = 0
) -> Any:
    """A process of a world as the launcher starts it; its exit code is what ``work`` gives."""
    environment = {
        "ACCELERATE_USE_CPU": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    process = _forked.Process(target=_begin, args=(work, arguments, log, environment), daemon=True)
    process.start()
    return process


def _begin(work: Callable[..., int | None], arguments: tuple[Any, ...], log: Path, environment: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(environment)
    sys.exit(work(*arguments))


def finish(processes: list[BaseProcess], log: Path, limit: float = LIMIT) -> list[int | None]:
    """Exit codes. What hangs is killed and told with its log."""
    deadline = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [process for process in processes if process.exitcode is None]
    for process in hanging:
        process.kill()
        process.join()
    assert not hanging, f"still running after {limit:g} s; the log:\n{log.read_text(errors='replace')}"
    return [process.exitcode for process in processes]


# ---------------------------------------------------------------- runs


def prepared(volume: Volume, resume: State | None = None, **keys: Any) -> RunFile:
    """A job on its way up to ``run.json``, by the product's own steps; ``keys`` come over those of ``JOB``."""
    job = Job.model_validate(JOB | keys)
    weights = fetch_weights(job, volume, None, lambda line: None)
    dataset = scan(job, volume)
    assistant = assistant_bytes(job, weights.shape, volume)
    plan = replace(make_plan(job, POD, weights.shape, dataset.summary(), assistant=assistant), threads=1)
    run = RunFile(job, plan, weights, volume.root, resume.path if resume else None, find_assistant(job, volume))
    assert not run.folder.root.exists(), f"there is a run called {job.name} already"
    run.write(dataset.items, dataset.held_out)
    cache = Cache(run.cache)
    if Wanted.of(job, plan, dataset.items, weights, dataset.held_out).beyond(cache):
        log = run.folder.log
        assert finish([start(_encode, run.folder.run_file, log=log)], log) == [0], log.read_text()
    return run


def _encode(run_file: Path) -> int:
    from trainer.encode import main

    return main([str(run_file)])


def _train(run_file: Path) -> int:
    from trainer.train import main

    return main(run_file)


@dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    run: RunFile
    codes: list[int | None]  # of the processes

    @property
    def outcome(self) -> Outcome:
        outcome = Outcome.read(self.run.folder.outcome)
        assert outcome is not None, self.log
        return outcome

    @property
    def log(self) -> str:
        return self.run.folder.log.read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.run.folder.metrics)

    def values(self, key: str) -> list[float]:
        return [line[key] for line in self.metrics]

    @property
    def states(self) -> list[State]:
        return list_states(self.run.folder.states)[0]

    @property
    def output(self) -> Path:
        return self.run.folder.output / f"{self.run.job.name}.safetensors"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return read_tensors(self.output)


def read_metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(
    run: RunFile,
    processes: int | None = None,
    work: Callable[[Path], int | None] = _train,
    limit: float = LIMIT,
) -> Trained:
    """Trains in as many processes as planned, or in another number of them."""
    size = processes or run.plan.processes
    log, port = run.folder.log, free_port()
    world = [start(work, run.folder.run_file, log=log, rank=r, size=size, port=port) for r in range(size)]
    return Trained(run, finish(world, log, limit))


def trained(volume: Volume, resume: State | None = None, limit: float = LIMIT, **keys: Any) -> Trained:
    """Trains a job to its end, which must be a good one."""
    result = train(prepared(volume, resume, **keys), limit=limit)
    assert result.outcome.code == 0, result.log
    assert result.codes == [0] * result.run.plan.processes
    return result
