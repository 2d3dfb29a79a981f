"""A run's figures and samples on Weights & Biases, with WANDB_API_KEY: ``python -m entrypoint.mirror RUN.JSON``.

A process of its own beside the trainer, which knows nothing of it and has no key: it reads what stands in the run's
folder and passes it on. So nothing that W&B does, refuses or waits for reaches a training. How far it has come stands
in ``wandb.json``: a run that goes on is the same run there, and what could not be passed on is, at the next start.
W&B takes no step twice. Where steps that it has are done again, as a kill makes it, they come out the same; where the
job was edited meanwhile they do not, and the line that branches off is another run there, with all that led to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from bootstrap.figures import curves_of
from bootstrap.outcome import DONE, STOPPED, Outcome
from bootstrap.remote import shown_path
from bootstrap.run_file import RunFile
from bootstrap.state import read_state
from bootstrap.validation import Round, band_name
from bootstrap.volume import RunFolder, read_json, write_json
from entrypoint.launch import child_environment
from entrypoint.progress import Tail
from jobs.schema import Job

KEY = "WANDB_API_KEY"
LOOK_EVERY = 2.0  # seconds
AGAIN = 300.0  # seconds after which W&B is tried again where it could not be reached, or has refused
INIT_LIMIT = 60.0  # seconds that W&B may take to answer
LAST_WORDS = 30.0  # seconds that it may take at the end; what is not there by then stays in the run's folder
HURRY = 2.0  # the same when a stop was asked for: its seconds are for the state
_SAMPLE = re.compile(r"step-(\d+)-(.+)\.png")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Position:
    """``wandb.json``: which run there, and what of this one it has."""

    id: str
    resume_from: int | None = None  # of the job
    branch: int | None = None  # the step at which this line left one that went further; None for the first line
    job: str = ""  # digest of what decides how the steps come out
    step: int = 0
    validation: int = -1  # step of the last round
    samples: tuple[str, ...] = ()

    @classmethod
    def read(cls, run: RunFile, start: int) -> Position:
        """Where a start that goes on from step ``start`` is to go on there."""
        value: Any = read_json(run.folder.wandb_position)
        job = job_digest(run.job)
        with suppress(TypeError, KeyError):
            known = cls(**value | {"samples": tuple(value["samples"])})
            if known.resume_from == run.job.resume_from and (known.step <= start or known.job == job):
                return replace(known, job=job)
            return cls(uuid4().hex[:12], run.job.resume_from, start, job)
        return cls(uuid4().hex[:12], run.job.resume_from, run.job.resume_from, job)


def job_digest(job: Job) -> str:
    """The same for jobs whose steps come out the same."""
    told = job.model_dump_json(exclude={"notify", "output", "when_done", "save", "sample", "resume_from"})
    return hashlib.sha256(told.encode()).hexdigest()[:12]


@dataclass
class Mirror:
    """Passes on what is new. ``log`` takes a line's figures by name, and ``picture`` makes one of a file."""

    folder: RunFolder
    position: Position
    log: Callable[[Mapping[str, Any]], None]
    picture: Callable[[Path], Any]
    stale: int = 0  # the inode of metrics from before this start, of which the trainer first cuts off what is done anew
    metrics: Tail = field(init=False)
    rounds: Tail = field(init=False)

    def __post_init__(self) -> None:
        self.metrics, self.rounds = Tail(self.folder.metrics), Tail(self.folder.validation)

    def pass_on(self) -> None:
        """What was added since the last time; how far it is, is written down then."""
        if self.stale and inode_of(self.folder.metrics) in (self.stale, 0):
            return
        self.stale, before = 0, self.position
        for line in self._lines(self.metrics):
            if line["step"] > self.position.step:
                self.log({"step": line["step"]} | dict(curves_of(line)))
                self.position = replace(self.position, step=line["step"])
        for line in self._lines(self.rounds):
            if line["step"] > self.position.validation:
                self._round(line)
        for path in sorted(self.folder.samples.glob("step-*.png")):
            found = _SAMPLE.fullmatch(path.name)
            if found and path.name not in self.position.samples:
                self.log({"step": int(found[1]), f"samples/{found[2]}": self.picture(path)})
                self.position = replace(self.position, samples=(*self.position.samples, path.name))
        if self.position != before:
            write_json(self.folder.wandb_position, asdict(self.position))

    def _round(self, line: dict[str, Any]) -> None:
        with suppress(TypeError, ValueError):
            found = Round.read(json.dumps(line))
            bands = {f"validation/loss/{band_name(band)}": each for band, each in enumerate(found.by_level)}
            told = {"validation/loss": found.loss} | bands
            self.log({"step": found.step} | {name: each for name, each in told.items() if each is not None})
            self.position = replace(self.position, validation=found.step)

    @staticmethod
    def _lines(tail: Tail) -> Iterator[dict[str, Any]]:
        for text in tail.lines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    yield line


def inode_of(path: Path) -> int:
    """0 where it is not there."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def settings_of(run: RunFile) -> dict[str, Any]:
    """The job and its plan, as W&B shows them; without addresses, which may be as good as passwords."""
    job = run.job.model_dump(mode="json", exclude={"notify"})
    job["datasets"] = [entry | {"path": shown_path(entry["path"])} for entry in job["datasets"]]
    plan = ("processes", "images_per_pass", "passes", "sharding", "checkpointed_blocks", "base_precision", "steps")
    return job | {"planned": {name: getattr(run.plan, name) for name in plan}}


# ---------------------------------------------------------------- the process


def mirror(run: RunFile, ended: Event, say: Say, stale: int = 0) -> None:
    """Passes a run on until ``ended``; what goes wrong is told, and tried again later."""
    try:
        import wandb
    except ImportError as error:
        say(f"wandb: not installed here ({error}); the run is not shown there")
        return
    while True:
        try:
            _mirror(wandb, run, ended, say, stale)
            return
        except Exception as error:  # whatever it is: a training goes on beside it
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            say(f"wandb: {reason}. Training goes on; this is tried again every {AGAIN / 60:.0f} minutes")
            with suppress(Exception):
                wandb.teardown()
        if ended.wait(AGAIN):
            return


def _mirror(wandb: Any, run: RunFile, ended: Event, say: Say, stale: int) -> None:
    folder = run.folder
    position = Position.read(run, read_state(run.resume).step if run.resume else 0)
    write_json(folder.wandb_position, asdict(position))
    folder.wandb.mkdir(exist_ok=True)
    name = run.job.name if position.branch is None else f"{run.job.name} from {position.branch}"
    quiet = {"console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_meta": True}
    there = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "fluxpod",
        id=position.id,
        name=name,
        resume="allow",
        dir=str(folder.wandb),
        config=settings_of(run),
        settings=wandb.Settings(init_timeout=INIT_LIMIT, **quiet),
    )
    say(f"wandb: {there.url or f'offline, in {folder.wandb}'}")
    there.define_metric("*", step_metric="step")
    passing = Mirror(folder, position, there.log, lambda path: wandb.Image(str(path)), stale)
    while not ended.wait(LOOK_EVERY):
        passing.pass_on()
    passing.pass_on()
    outcome = Outcome.read(folder.outcome)
    there.finish(exit_code=int(outcome is None or outcome.code not in (DONE, STOPPED)))


@contextmanager
def mirrored(run: RunFile, environ: Mapping[str, str], hurry: Callable[[], bool]) -> Iterator[None]:
    """Within, the run is passed on to W&B where there is a key; ``hurry``: whether a stop was asked for."""
    if not environ.get(KEY):
        yield
        return
    kept = child_environment(run, environ) | {KEY: environ[KEY], "WANDB_ERROR_REPORTING": "false"}
    try:
        with run.folder.log.open("ab") as log:
            stale = str(inode_of(run.folder.metrics))
            command = [sys.executable, "-m", "entrypoint.mirror", str(run.folder.run_file), stale]
            pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            child = subprocess.Popen(command, env=kept, start_new_session=True, **pipes)  # type: ignore[call-overload]
    except OSError as error:
        print(f"wandb: the run is not shown there: {error}", flush=True)
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            assert child.stdin
            child.stdin.close()  # it has the last look then
        try:
            child.wait(HURRY if hurry() else LAST_WORDS)
        except subprocess.TimeoutExpired:
            print("wandb: what it has not taken yet is passed on at the next start of the run", flush=True)
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def main(run_file: Path, stale: int) -> int:
    key = os.environ.get(KEY, "")
    os.nice(10)  # the CPUs are the trainer's
    ended = Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()  # until the parent closes it, or dies
        ended.set()
        time.sleep(LAST_WORDS)
        os._exit(0)  # W&B still waits for its network; nobody else does

    def say(line: str) -> None:  # with a clock, like the trainer's own lines, which are shown to people
        print(time.strftime("%H:%M:%S ") + (line.replace(key, "***") if key else line), flush=True)

    Thread(target=wait_for_the_end, daemon=True).start()
    mirror(RunFile.read(run_file), ended, say, stale)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
