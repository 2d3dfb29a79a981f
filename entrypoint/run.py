"""One job from its file to its outcome: load, look at the pod, fetch, scan, plan, encode, launch.

Data goes one way; each step is one function of bootstrap or one child process. What stands on the volume is all that
the next start needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap.cache import Cache, wanted_latents, wanted_texts, with_keys
from bootstrap.dataset import Item, scan
from bootstrap.outcome import (
    ACCESS_REFUSED,
    CRASH,
    DONE,
    JOB_WRONG,
    POD_WRONG,
    STOPPED,
    AccessError,
    Outcome,
    PodError,
)
from bootstrap.plan import Plan, make_plan
from bootstrap.pod import read_pod
from bootstrap.run_file import RunFile
from bootstrap.state import State, newest_whole, resume_problems
from bootstrap.volume import RunFolder, Volume, write_atomically
from bootstrap.weights import fetch_weights
from entrypoint.check import render_plan
from entrypoint.launch import Stop, describe_exit, encoder_command, end_leftovers, run_children, trainer_command
from entrypoint.progress import Tail, TrainingProgress
from entrypoint.status import Phase, StatusFile
from jobs.load import LoadedJob, load_job
from jobs.problem import JobError, Problem
from jobs.schema import Job

LAST_LINES = 50  # of the log, shown when something fails
PHASES: dict[int, Phase] = {
    DONE: "done",
    JOB_WRONG: "held",
    POD_WRONG: "held",
    ACCESS_REFUSED: "held",
    STOPPED: "pending",
}

Say = Callable[[str], None]


class Stopped(Exception):
    """Somebody asked to stop while the job was being prepared."""


@dataclass(frozen=True)
class Running:
    """What every step of one job's way needs."""

    job_file: Path
    volume: Volume
    folder: RunFolder
    status: StatusFile
    stop: Stop

    def say(self, line: str) -> None:
        """A line for people, on the terminal and in the run's log; a chance to stop."""
        print(line, flush=True)
        with self.folder.log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        if self.stop.requested:
            raise Stopped

    def preparing(self, line: str) -> None:
        self.status.tell("preparing", line)
        self.say(line)


def run_job(job_file: Path, volume_root: Path, stop: Stop | None = None) -> int:
    """Runs a job to its outcome, whose code it gives; every problem is told in words, here and in ``status.json``."""
    if stop is None:
        stop = Stop()
        stop.on_signals()
    volume = Volume(volume_root.absolute())
    volume.create()
    try:
        loaded = load_job(job_file)
    except JobError as error:
        print(error, flush=True)
        hold_unreadable(volume, job_file, str(error))
        return JOB_WRONG
    folder = volume.run(loaded.job.name)
    folder.root.mkdir(parents=True, exist_ok=True)
    running = Running(job_file, volume, folder, StatusFile(folder.status), stop)
    try:
        outcome = _run(loaded, running)
    except JobError as error:
        outcome = Outcome(JOB_WRONG, str(_in_file(error, job_file)), 0)
    except PodError as error:
        outcome = Outcome(POD_WRONG, str(error), 0)
    except AccessError as error:
        outcome = Outcome(ACCESS_REFUSED, str(error), 0)
    except Stopped:
        outcome = Outcome(STOPPED, "stopped by a signal before training; what was prepared stays", 0)
    _tell(outcome, running)
    return outcome.code


def hold_unreadable(volume: Volume, job_file: Path, message: str) -> None:
    """A job that cannot be read has no name but its file's; its problems stand where its run would be."""
    StatusFile(volume.run(job_file.stem).status).tell("held", message, code=JOB_WRONG)


def _in_file(error: JobError, file: Path) -> JobError:
    return JobError([p if p.file else replace(p, file=file.name) for p in error.problems])


def _tell(outcome: Outcome, running: Running) -> None:
    phase = PHASES.get(outcome.code, "failed")
    running.status.tell(phase, outcome.reason, step=outcome.step, code=outcome.code)
    print(f"{phase}: {outcome.reason}", flush=True)


def _run(loaded: LoadedJob, running: Running) -> Outcome:
    job, folder = loaded.job, running.folder
    if already_done(loaded, folder):
        return Outcome(DONE, f"{job.name} is done already: {output_of(folder, job)}", _last_step(folder))
    end_leftovers(running.volume, job.name)
    for warning in loaded.warnings:
        running.say(f"warning: {warning}")
    folder.outcome.unlink(missing_ok=True)
    write_atomically(folder.job, loaded.text)
    run, items = prepare(job, running)
    if run.resume and _last_step_of(run) >= run.plan.steps and output_of(folder, job).exists():
        return Outcome(DONE, f"{job.name} is done already: {output_of(folder, job)}", run.plan.steps)
    encode(run, items, running)
    return train(run, running)


def already_done(loaded: LoadedJob, folder: RunFolder) -> bool:
    """Whether this very job ended well before, without looking at anything else."""
    outcome = Outcome.read(folder.outcome)
    same = folder.job.exists() and folder.job.read_text(encoding="utf-8") == loaded.text
    return outcome is not None and outcome.code == DONE and same and output_of(folder, loaded.job).exists()


def output_of(folder: RunFolder, job: Job) -> Path:
    return folder.output / f"{job.name}.safetensors"


def prepare(job: Job, running: Running) -> tuple[RunFile, tuple[Item, ...]]:
    """Weights, data, plan and ``run.json``. On a pod without a GPU a real model gets as far as the plan."""
    volume = running.volume
    pod = read_pod(volume.root)
    for note in pod.notes:
        running.say(f"pod: {note}")
    running.preparing(f"weights: {job.base}")
    weights = fetch_weights(job, volume, os.environ.get("HF_TOKEN"), running.say)
    running.preparing("data: looking through the pictures")
    dataset = scan(job, volume, running.say)
    for note in dataset.notes:
        running.say(f"data: {note}")
    plan = make_plan(job, pod, weights.shape, dataset.summary())
    running.say(render_plan(plan, job, pod))
    state = state_to_go_on_from(job, plan, running)
    items = with_keys(dataset.items, weights, job.t5_mask)
    run = RunFile(job, plan, weights, volume.root, state.path if state else None)
    run.write(items)
    return run, items


def state_to_go_on_from(job: Job, plan: Plan, running: Running) -> State | None:
    """The newest whole state; says where the run goes on. Raises JobError where the job no longer fits it."""
    state, notes = newest_whole(running.folder.states)
    for note in notes:
        running.say(f"states: {note}")
    if state is None:
        running.say(f"starting at step 0 of {plan.steps}")
        return None
    if problems := resume_problems(state, job):
        raise JobError(problems)
    running.say(f"going on at step {state.step} of {plan.steps}")
    if state.manifest.processes != plan.processes:
        running.say(
            f"saved on {state.manifest.processes} processes, going on with {plan.processes}: nothing else changes"
        )
    return state


def encode(run: RunFile, items: tuple[Item, ...], running: Running) -> None:
    """Latents and text outputs that the cache lacks, before any process group exists, spread over the GPUs."""
    cache = Cache(run.cache)
    for note in cache.notes:
        running.say(f"cache: {note}")
    cache.tidy()
    images = cache.missing(wanted_latents(items))
    texts = cache.missing(wanted_texts(run.job, items, run.weights))
    if not images and not texts:
        running.say("cache: everything is there")
        return
    running.preparing(f"encoding {len(images)} pictures and {len(texts)} captions")
    parts = min(run.plan.processes, max(len(images), len(texts)))
    log = Tail(run.folder.log, from_end=True)

    def look() -> None:
        for line in log.lines():
            if line.startswith("encoded "):
                print(line, flush=True)
                running.status.tell("preparing", line)

    commands = [encoder_command(run.folder.run_file, part, parts) for part in range(parts)]
    statuses = run_children(commands, run, running.stop, look)
    if running.stop.requested:
        raise Stopped
    if any(statuses):
        raise _encoding_failed(statuses, run)


def _encoding_failed(statuses: list[int], run: RunFile) -> Exception:
    worst = next(status for status in statuses if status)
    text = f"encoding failed ({describe_exit(worst)}). The end of the log:\n{last_lines(run.folder.log)}"
    if worst == JOB_WRONG:
        return JobError([Problem(text)])
    return PodError(text) if worst == POD_WRONG else RuntimeError(text)


def train(run: RunFile, running: Running) -> Outcome:
    """Launches the trainer and follows it to its outcome."""
    start, steps = _last_step_of(run), run.plan.steps
    progress = TrainingProgress(run.folder.metrics, run.folder.log, start, steps)
    running.status.tell("training", "training", step=start, steps=steps)

    def look() -> None:
        if progress.look():
            phase: Phase = "stopping" if running.stop.requested else "training"
            running.status.tell(phase, phase, step=progress.step, steps=steps)

    (status,) = run_children([trainer_command(run.plan, run.folder.run_file)], run, running.stop, look)
    progress.close()
    outcome = Outcome.read(run.folder.outcome)
    if outcome is None:
        outcome = Outcome(CRASH, f"the trainer crashed ({describe_exit(status)})", progress.step)
    if outcome.code == CRASH:
        print(f"The end of {run.folder.log}:\n{last_lines(run.folder.log)}", flush=True)
    return outcome


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def _last_step_of(run: RunFile) -> int:
    if run.resume is None:
        return 0
    from bootstrap.state import read_state

    return read_state(run.resume).step


def _last_step(folder: RunFolder) -> int:
    outcome = Outcome.read(folder.outcome)
    return outcome.step if outcome else 0
