"""What the image runs: takes the jobs of the volume in name order, side by side where their GPUs allow, and never ends.

The loop looks, decides, starts and collects; each job runs in a process of its own (``fluxpod run``) with the GPUs it
was given. What it must not forget over a restart (done, crashes, leases) is on the volume; what a restart should try
again (a job held for this pod's sake) is only here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap import clocks
from bootstrap.outcome import ACCESS_REFUSED, DONE, JOB_WRONG, POD_WRONG, STOPPED
from bootstrap.pod import Pod, read_pod
from bootstrap.quiet import QuietWatch
from bootstrap.state import list_states
from bootstrap.volume import Volume
from entrypoint.attempts import Attempts
from entrypoint.dropped_job import DroppedJobError, drop_job
from entrypoint.ended import already_done
from entrypoint.launch import Stop
from entrypoint.lease import LeaseWatch
from entrypoint.status import Status, StatusFile
from jobs.load import LoadedJob, parse_job
from jobs.problem import JobError

LOOK_EVERY = 2.0  # seconds between two looks at the volume
ACCESS_AGAIN = 900.0  # seconds after which a refused download is tried again: hubs have bad quarters of an hour
HELD = (JOB_WRONG, POD_WRONG, ACCESS_REFUSED)


@dataclass(frozen=True)
class JobFile:
    """One job file as it is now."""

    path: Path
    text: str
    loaded: LoadedJob | None  # None where it cannot be read
    problems: str = ""

    @property
    def name(self) -> str:
        return self.loaded.job.name if self.loaded else self.path.stem


@dataclass(frozen=True)
class Waiting:
    """A job that may start now."""

    file: JobFile
    gpus: int | None  # None: all there are


@dataclass
class Child:
    """A job that runs."""

    file: JobFile
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    removed: bool = False  # its file went away: it was asked to stop


@dataclass
class Ended:
    """How a job ended, and what must change for it to be taken again."""

    code: int
    text: str
    data: str  # fingerprint of its datasets
    again_at: float | None = None  # on this process's clock; None: not by itself


def choose(
    waiting: Sequence[Waiting], free: Sequence[int], total: int, running: int
) -> list[tuple[Waiting, tuple[int, ...]]]:
    """Which jobs start now, with which GPUs: in order, each that fits what is left.

    A later small job may overtake a large one that waits for cards: an idle card is billed all the same. Without GPUs one
    job runs at a time.
    """
    if total == 0:
        return [(waiting[0], ())] if waiting and not running else []
    left, chosen = list(free), []
    for job in waiting:
        wanted = min(job.gpus or total, total)
        if wanted <= len(left):
            chosen.append((job, tuple(left[:wanted])))
            left = left[wanted:]
    return chosen


def watch(volume: Volume, environment: Mapping[str, str] = os.environ) -> int:
    """Runs what is dropped into ``jobs/`` until a signal comes; then stops what runs, in order, and gives 0."""
    stop = Stop()
    stop.on_signals()
    volume.create()
    loop = PodLoop(volume, read_pod(volume.root), environment)
    loop.greet()
    while not stop.requested:
        loop.turn()
        _sleep(LOOK_EVERY, stop)
    loop.end()
    return DONE


def _sleep(seconds: float, stop: Stop) -> None:
    until = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.1)


@dataclass
class PodLoop:
    volume: Volume
    pod: Pod
    environment: Mapping[str, str]
    children: dict[str, Child] = field(default_factory=dict)  # by job name
    ended: dict[str, Ended] = field(default_factory=dict)
    told: dict[str, tuple[str, str]] = field(default_factory=dict)  # the last phase and message of jobs that wait
    texts: dict[Path, str] = field(default_factory=dict)  # job files at the last look

    def __post_init__(self) -> None:
        self.leases = LeaseWatch(self.environment.get("RUNPOD_POD_ID", ""), self._seconds("FLUXPOD_LEASE_SECONDS", 60))
        self.quiet = QuietWatch(self._seconds("FLUXPOD_QUIET_SECONDS", 10))

    def _seconds(self, name: str, default: float) -> float:
        try:
            return float(self.environment.get(name, default))
        except ValueError:
            print(f"{name}={self.environment[name]} is not a number of seconds; {default:g} is used", flush=True)
            return default

    def greet(self) -> None:
        """Says what kind of pod this is, and takes the job that came with it."""
        gpus = ", ".join(gpu.name for gpu in self.pod.gpus) or "none: jobs are prepared as far as they can be, and wait"
        print(f"GPUs: {gpus}", flush=True)
        for note in self.pod.notes:
            print(f"pod: {note}", flush=True)
        promised = self.environment.get("RUNPOD_GPU_COUNT", "")
        if promised.isdigit() and int(promised) != len(self.pod.gpus):
            print(f"pod: RUNPOD_GPU_COUNT says {promised} GPUs, nvidia-smi shows {len(self.pod.gpus)}", flush=True)
        try:
            if line := drop_job(self.volume, self.environment):
                print(line, flush=True)
        except DroppedJobError as error:
            print(error, flush=True)
        print(f"watching {self.volume.jobs}", flush=True)

    # ---- one look

    def turn(self) -> None:
        """Collects what ended, looks at the job files, starts what can start."""
        self._collect()
        files = self._job_files()
        self._stop_removed(files)
        for file in files:
            if file.loaded is None:
                self._tell(file.name, "held", file.problems)
        waiting = [Waiting(file, file.loaded.job.gpus) for file in files if file.loaded and self._may_start(file)]
        taken = {gpu for child in self.children.values() for gpu in child.gpus}
        free = [gpu.index for gpu in self.pod.gpus if gpu.index not in taken]
        chosen = choose(waiting, free, len(self.pod.gpus), len(self.children))
        for job, gpus in chosen:
            self._start(job.file, gpus)
        for job in waiting:
            if job.file.name not in self.children:
                self._tell(job.file.name, "pending", "waiting for GPUs" if self.pod.gpus else "waiting for its turn")

    def _job_files(self) -> list[JobFile]:
        """The job files that look the same as at the last look (others may still be arriving), one for each name."""
        found: list[JobFile] = []
        before, self.texts = self.texts, {}
        for path in sorted(p for p in self.volume.jobs.iterdir() if p.suffix in (".yaml", ".yml") and p.name[0] != "."):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                text = path.read_bytes().decode("latin-1")  # the loader says what is wrong with it
            except OSError:
                continue
            self.texts[path] = text
            if before.get(path) == text:
                found.append(_read(path, text))
        return self._without_doubles(found)

    def _without_doubles(self, files: list[JobFile]) -> list[JobFile]:
        first: dict[str, JobFile] = {}
        for file in files:
            if other := first.get(file.name):
                self._once(file.path.name, f"{file.path.name}: the name {file.name} is taken by {other.path.name}")
            else:
                first[file.name] = file
        return list(first.values())

    def _may_start(self, file: JobFile) -> bool:
        """Whether nothing but free GPUs is missing; where something is, it is told."""
        if file.name in self.children or file.loaded is None:
            return False
        folder = self.volume.run(file.name)
        if already_done(file.loaded, folder):
            self._once(file.name, f"{file.name} is done already")
            return False
        paths = [self.volume.resolve(entry.path) for entry in file.loaded.job.datasets if "://" not in entry.path]
        reason = self.quiet.waiting_for(paths)
        ended = self.ended.get(file.name)
        if ended and not self._again(ended, file, self.quiet.fingerprint(paths)):
            return False
        if Attempts.read(folder.root, file.text).exhausted:
            self._tell(file.name, "failed", "it crashed again and again: change the job file to try anew")
            return False
        if reason:
            self._tell(file.name, "pending", f"waiting: {reason}")
            return False
        if not self.leases.clear(folder.lease):
            self._once(
                file.name, f"{file.name}: waiting, another pod runs it or has just died"
            )  # its status is not ours
            return False
        return True

    def _again(self, ended: Ended, file: JobFile, data: str) -> bool:
        if ended.text != file.text:
            return True
        if ended.again_at is not None and time.monotonic() >= ended.again_at:
            return True
        return ended.code == JOB_WRONG and ended.data != data

    # ---- children

    def _start(self, file: JobFile, gpus: tuple[int, ...]) -> None:
        environment = dict(self.environment) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
        print(f"--- {file.path.name}: starting {file.name}{on}", flush=True)
        command = [sys.executable, "-m", "entrypoint.cli", "run", str(file.path), "--volume", str(self.volume.root)]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        self.children[file.name] = Child(file, gpus, process)
        self.told.pop(file.name, None)

    def _collect(self) -> None:
        for name, child in list(self.children.items()):
            code = child.process.poll()
            if code is not None:
                del self.children[name]
                self._took_its_end(name, child, code)

    def _took_its_end(self, name: str, child: Child, code: int) -> None:
        folder, file = self.volume.run(name), child.file
        assert file.loaded
        paths = [self.volume.resolve(entry.path) for entry in file.loaded.job.datasets if "://" not in entry.path]
        ended = Ended(code, file.text, self.quiet.fingerprint(paths))
        if child.removed:
            StatusFile(folder.status).tell("held", "the job file was removed; what was saved stays", code=code)
        elif code == ACCESS_REFUSED:
            ended.again_at = time.monotonic() + ACCESS_AGAIN
        elif code == STOPPED:
            ended.again_at = time.monotonic()
        elif code not in (DONE, *HELD):
            states, _ = list_states(folder.states)
            attempts = Attempts.read(folder.root, file.text).crashed(states[-1].step if states else 0)
            attempts.write(folder.root)
            ended.again_at = time.monotonic() + attempts.wait
            if not attempts.exhausted:
                print(f"{name}: crashed ({code}), trying again in {attempts.wait:.0f} s", flush=True)
        self.ended[name] = ended

    def _stop_removed(self, files: Sequence[JobFile]) -> None:
        """A run whose job file is gone is stopped like by a signal: its state stays, and putting the file back goes on."""
        there = {file.name for file in files} | {path.stem for path in self.texts}
        for name, child in self.children.items():
            gone = not child.file.path.exists() and name not in there
            if gone and not child.removed:
                print(f"{name}: its job file was removed; stopping it", flush=True)
                child.removed = True
                child.process.terminate()

    def end(self) -> None:
        """Asks every job to stop, gives them the time there is, and leaves none behind."""
        for child in self.children.values():
            child.process.terminate()
        deadline = time.monotonic() + clocks.POD_LOOP
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{child.file.name} did not stop in time and is killed; its newest state stands", flush=True)
                child.process.kill()
                child.process.wait()

    # ---- telling

    def _tell(self, name: str, phase: str, message: str) -> None:
        """A waiting job's status, written when it changes (a restart writes nothing anew)."""
        if self.told.get(name) == (phase, message):
            return
        self.told[name] = (phase, message)
        path = self.volume.run(name).status
        last = Status.read(path)
        if last is None or (last.phase, last.message) != (phase, message):
            print(f"{name}: {phase}: {message}", flush=True)
            StatusFile(path).tell(phase, message, step=last.step if last else 0, steps=last.steps if last else 0)  # type: ignore[arg-type]

    def _once(self, name: str, line: str) -> None:
        if self.told.get(name) != ("", line):
            self.told[name] = ("", line)
            print(line, flush=True)


def _read(path: Path, text: str) -> JobFile:
    try:
        return JobFile(path, text, parse_job(text, path.name))
    except JobError as error:
        return JobFile(path, text, None, str(error))
