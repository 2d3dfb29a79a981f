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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bootstrap import clocks
from bootstrap.outcome import ACCESS_REFUSED, CRASH, DONE, JOB_WRONG, POD_WRONG, STOPPED, Outcome
from bootstrap.pod import Pod, read_pod
from bootstrap.quiet import QuietWatch
from bootstrap.state import list_states
from bootstrap.volume import Volume
from bootstrap.volume_probe import probe_volume
from entrypoint.attempts import Attempts
from entrypoint.dropped_job import DroppedJobError, drop_job
from entrypoint.ended import already_done
from entrypoint.launch import PARENT, Stop
from entrypoint.lease import LeaseWatch
from entrypoint.notify import Event, notify, notify_of, unset
from entrypoint.status import Phase, Status, StatusFile
from entrypoint.when_done import clear_banner, container_start, finish, max_hours_reached, read_max_hours, stop_pod
from jobs import yaml12
from jobs.load import LoadedJob, parse_job
from jobs.problem import JobError
from jobs.schema import Job, Notify

LOOK_EVERY = 2.0  # seconds between two looks at the volume
ACCESS_AGAIN = 900.0  # seconds after which a refused download is tried again: hubs have bad quarters of an hour
HELD = (JOB_WRONG, POD_WRONG, ACCESS_REFUSED)
Readiness = Literal["ready", "later", "over"]  # over: nothing happens until somebody changes something


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

    A later small job may overtake a large one that waits for cards: an idle card is billed all the same. Without GPUs
    one job runs at a time.
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
    loop = PodLoop(volume, read_pod(volume.root), environment, stop)
    loop.greet()
    try:
        while not stop.requested and not loop.out_of_time():
            try:
                loop.turn()
                loop.when_all_is_done()
            except OSError as error:
                loop._once("", f"the volume does not answer as it should, looking again soon: {error}")
            loop.sleep(LOOK_EVERY)
    except Exception:
        loop.end()  # or its jobs would train on beside those that the next loop starts on the same GPUs
        raise
    loop.end()
    if not stop.requested:
        loop.stay_stopped()
    return DONE


@dataclass
class PodLoop:
    volume: Volume
    pod: Pod
    environment: Mapping[str, str]
    stop: Stop = field(default_factory=Stop)
    children: dict[str, Child] = field(default_factory=dict)  # by job name
    ended: dict[str, Ended] = field(default_factory=dict)
    told: dict[str, tuple[str, str]] = field(default_factory=dict)  # the last phase and message of jobs that wait
    files: dict[Path, bytes] = field(default_factory=dict)  # job files at the last look
    last: tuple[Job, Outcome] | None = None  # the job that ended last, for its when_done
    idle: bool = False  # nothing runs, and nothing will by itself
    finished_at: float | None = 0.0  # when to ask the platform (again), on this process's clock; None: not any more

    def __post_init__(self) -> None:
        self.leases = LeaseWatch(self.environment.get("RUNPOD_POD_ID", ""), self._seconds("FLUXPOD_LEASE_SECONDS", 60))
        self.quiet = QuietWatch(self._seconds("FLUXPOD_QUIET_SECONDS", 10))
        self.started = container_start()
        self.messages = ThreadPoolExecutor(1, thread_name_prefix="notify")
        self.persistent = True

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
        facts = probe_volume(self.volume.root, environment=self.environment)
        self.persistent = facts.persistent
        for note in facts.notes:
            print(f"volume: {note}", flush=True)
        clear_banner(self.volume)
        if trouble := read_max_hours(self.environment)[1]:
            print(trouble, flush=True)
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
            if file.loaded or file.name in self.children:  # an edit holds from the next start on
                continue
            if self._tell(file.name, "held", file.problems, JOB_WRONG):
                self._notify(notify_of(file.text), file.name, "held", file.problems)
        readiness = {file.name: self._readiness(file) for file in files}
        waiting = [Waiting(f, f.loaded.job.gpus) for f in files if f.loaded and readiness[f.name] == "ready"]
        taken = {gpu for child in self.children.values() for gpu in child.gpus}
        free = [gpu.index for gpu in self.pod.gpus if gpu.index not in taken]
        chosen = choose(waiting, free, len(self.pod.gpus), len(self.children))
        for job, gpus in chosen:
            self._start(job.file, gpus)
        for job in waiting:
            if job.file.name not in self.children:
                self._tell(job.file.name, "pending", "waiting for GPUs" if self.pod.gpus else "waiting for its turn")
        arriving = len(self.files) > len(files) and any(path.stem not in self.told for path in self.files)
        self.idle = not self.children and not arriving and all(kind == "over" for kind in readiness.values())
        if not self.idle:
            self.finished_at = 0.0

    def _job_files(self) -> list[JobFile]:
        """The job files that look the same as at the last look (others may still be arriving), one for each name."""
        found: list[JobFile] = []
        before, self.files = self.files, {}
        for path in sorted(p for p in self.volume.jobs.iterdir() if p.suffix in (".yaml", ".yml") and p.name[0] != "."):
            try:
                data = path.read_bytes()
            except OSError:
                continue
            self.files[path] = data
            if before.get(path) == data:
                found.append(_read(path, data))
        return self._without_doubles(found)

    def _without_doubles(self, files: list[JobFile]) -> list[JobFile]:
        first: dict[str, JobFile] = {}
        for file in files:
            if other := first.get(file.name):
                self._once(file.path.name, f"{file.path.name}: the name {file.name} is taken by {other.path.name}")
            else:
                first[file.name] = file
        return list(first.values())

    def _readiness(self, file: JobFile) -> Readiness:
        """Whether nothing but free GPUs is missing; where something is, it is told."""
        if file.loaded is None:
            return "over"
        if file.name in self.children:
            return "later"
        folder = self.volume.run(file.name)
        if already_done(file.loaded, folder):
            self._once(file.name, f"{file.name} is done")
            return "over"
        paths = self._data_of(file.loaded.job)
        reason = self.quiet.waiting_for(paths)
        ended = self.ended.get(file.name)
        if ended and not self._again(ended, file, self.quiet.fingerprint(paths)):
            return "over" if ended.again_at is None or ended.code in HELD else "later"
        if Attempts.read(folder.root, file.text).exhausted:
            self._tell(file.name, "failed", "it crashed again and again: change the job file to try anew", CRASH)
            return "over"
        if not self.leases.clear(folder.lease):  # its status is the owner's to write
            self._once(file.name, f"{file.name}: waiting, another pod runs it or has just died")
            return "later"
        if reason:
            self._tell(file.name, "pending", f"waiting: {reason}")
            return "later"
        return "ready"

    def _data_of(self, job: Job) -> list[Path]:
        return [self.volume.resolve(entry.path) for entry in job.datasets if "://" not in entry.path]

    def _again(self, ended: Ended, file: JobFile, data: str) -> bool:
        if ended.text != file.text:
            return True
        if ended.again_at is not None and time.monotonic() >= ended.again_at:
            return True
        return ended.code == JOB_WRONG and ended.data != data

    # ---- children

    def _start(self, file: JobFile, gpus: tuple[int, ...]) -> None:
        environment = dict(self.environment) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", PARENT: str(os.getpid())}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
        print(f"--- {file.path.name}: starting {file.name}{on}", flush=True)
        command = [sys.executable, "-m", "entrypoint.cli", "run", str(file.path), "--volume", str(self.volume.root)]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        self.children[file.name] = Child(file, gpus, process)
        self.told.pop(file.name, None)
        if file.loaded:
            for line in unset(file.loaded.job.notify, self.environment):
                print(f"{file.name}: {line}", flush=True)

    def _collect(self) -> None:
        for name, child in list(self.children.items()):
            code = child.process.poll()
            if code is not None:
                del self.children[name]
                self._took_its_end(name, child, code)

    def _took_its_end(self, name: str, child: Child, code: int) -> None:
        folder, file = self.volume.run(name), child.file
        assert file.loaded
        job = file.loaded.job
        told = Status.read(folder.status)
        outcome = Outcome(code, told.message if told else "", told.step if told else 0)
        paths = self._data_of(job)
        ended = Ended(code, file.text, self.quiet.fingerprint(paths))
        if child.removed and code != DONE:
            ended.again_at = time.monotonic()  # with the file back it goes on
            message = "the job file was removed; what was saved stays"
            StatusFile(folder.status).tell("held", message, step=outcome.step, code=code)
        elif code == STOPPED:
            ended.again_at = time.monotonic()
        elif code == DONE:
            self.last = (job, outcome)
            self._notify(job.notify, name, "done", outcome.reason)
        elif code in HELD:
            self._notify(job.notify, name, "held", outcome.reason)
        else:
            states, _ = list_states(folder.states)
            attempts = Attempts.read(folder.root, file.text).crashed(states[-1].step if states else 0)
            attempts.write(folder.root)
            ended.again_at = time.monotonic() + attempts.wait
            if attempts.exhausted:
                self.last = (job, outcome)
                self._notify(job.notify, name, "failed", outcome.reason)
            else:
                again = f"{outcome.reason or f'crashed ({code})'}; trying again in {attempts.wait:.0f} s"
                self._tell(name, "pending", again, code)
        if code == ACCESS_REFUSED:
            ended.again_at = time.monotonic() + ACCESS_AGAIN
        self.ended[name] = ended

    def _stop_removed(self, files: Sequence[JobFile]) -> None:
        """A run whose job file is gone is stopped as by a signal: its state stays; with the file back it goes on."""
        there = {file.name for file in files} | {path.stem for path in self.files}
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

    # ---- the end of all work

    def when_all_is_done(self) -> None:
        """Once nothing runs or will: does what the job that ended last says of the pod. Done jobs of an earlier start,
        whose pod should have been stopped then, are made up for; a mark on the volume keeps it at one call for each."""
        if not self.idle or self.finished_at is None or time.monotonic() < self.finished_at:
            return
        self.messages.submit(lambda: None).result()  # the news go out before the pod goes down
        again = None
        for job, outcome in [self.last] if self.last else self._done_before():
            done = finish(self.volume, job, outcome, self.environment, persistent=self.persistent, pause=self.sleep)
            print(f"{job.name}: {done.message}", flush=True)
            again = done.again
            if done.action != "idle":
                break
        self.finished_at = None if again is None else time.monotonic() + again

    def _done_before(self) -> list[tuple[Job, Outcome]]:
        found = []
        for path, data in self.files.items():
            loaded = _read(path, data).loaded
            if loaded and loaded.job.when_done != "idle" and already_done(loaded, self.volume.run(loaded.job.name)):
                outcome = Outcome.read(self.volume.run(loaded.job.name).outcome)
                assert outcome
                found.append((loaded.job, outcome))
        return found

    def out_of_time(self) -> bool:
        return max_hours_reached(self.started, self.environment)

    def stay_stopped(self) -> None:
        """After FLUXPOD_MAX_HOURS: asks for the pod's stop until it takes. Ends only on a signal: were it to end by
        itself, supervisor would start the loop again."""
        print("FLUXPOD_MAX_HOURS have passed: nothing is started any more", flush=True)
        job = self.last[0] if self.last else None
        again: float | None = 0.0
        while not self.sleep(60.0 if again is None else again):
            if again is not None:
                again = stop_pod(self.volume, job, self.environment, pause=self.sleep).again

    def sleep(self, seconds: float) -> bool:
        """Waits; true as soon as somebody asked to stop."""
        until = time.monotonic() + seconds
        while not self.stop.requested and time.monotonic() < until:
            time.sleep(0.1)
        return self.stop.requested

    # ---- telling

    def _notify(self, to: Notify, name: str, event: Event, message: str) -> None:
        self.messages.submit(notify, to, name, event, message, self.environment)

    def _tell(self, name: str, phase: Phase, message: str, code: int | None = None) -> bool:
        """A waiting job's status, written when it changes (a restart writes nothing anew); whether it did."""
        if self.told.get(name) == (phase, message):
            return False
        self.told[name] = (phase, message)
        path = self.volume.run(name).status
        last = Status.read(path)
        if last is None or (last.phase, last.message) != (phase, message):
            print(f"{name}: {phase}: {message}", flush=True)
            step, steps = (last.step, last.steps) if last else (0, 0)
            StatusFile(path).tell(phase, message, step=step, steps=steps, code=code)
            return True
        return False

    def _once(self, name: str, line: str) -> None:
        if self.told.get(name) != ("", line):
            self.told[name] = ("", line)
            print(line, flush=True)


def _read(path: Path, data: bytes) -> JobFile:
    text = ""
    try:
        text = yaml12.decode(data, path.name)
        return JobFile(path, text, parse_job(text, path.name))
    except JobError as error:
        return JobFile(path, text, None, str(error))
