"""What the image runs: takes the jobs of the volume in name order, side by side where their GPUs allow, and never ends.

The loop looks, decides, starts and collects; each job runs in a process of its own (``fluxpod run``) with the GPUs it
was given. What it must not forget over a restart (done, crashes, leases) is on the volume; what a restart should try
again (a job held for this pod's sake) is only here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bootstrap import clocks
from bootstrap.lease import LeaseWatch
from bootstrap.masks import ALPHA
from bootstrap.outcome import ACCESS_REFUSED, DONE, JOB_WRONG, POD_WRONG, STOPPED, Outcome
from bootstrap.pod import Pod, read_pod
from bootstrap.quiet import QuietWatch
from bootstrap.remote import is_remote
from bootstrap.state import list_states
from bootstrap.uploads import owes_upload
from bootstrap.volume import Volume, write_json
from bootstrap.volume_probe import probe_volume
from entrypoint.attempts import Attempts
from entrypoint.dropped_job import Delivery
from entrypoint.end_of_work import EndOfWork
from entrypoint.ended import already_done
from entrypoint.environment import POD_NOTES, RUN, read_seconds
from entrypoint.job_files import JobFile, JobFolder
from entrypoint.launch import PARENT, SHARE, Stop, stale_seconds
from entrypoint.notify import notify_of, unset
from entrypoint.status import Status, StatusFile
from entrypoint.telling import Telling
from entrypoint.when_done import clear_banner, read_max_hours
from jobs.schema import Job

LOOK_EVERY = 2.0  # seconds between two looks at the volume
VOLUME_EVERY = 10.0  # seconds between two tries to write to a volume that cannot be written
DATA_EVERY = 30.0  # seconds between two looks at data that cannot be used now anyway
ACCESS_AGAIN = 900.0  # seconds after which a refused download is tried again: hubs have bad quarters of an hour
HELD = (JOB_WRONG, POD_WRONG, ACCESS_REFUSED)
# upload: trained, and the result is yet to be brought to the hub, which takes no GPU. over: nothing happens until
# somebody changes something.
Readiness = Literal["ready", "upload", "later", "over"]


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
    missing: bool = False  # its file was not there at the last look
    removed: bool = False  # its file went away: it was asked to stop


@dataclass
class Ended:
    """How a job ended, and what must change for it to be taken again."""

    code: int
    text: str
    data: str  # fingerprint of its datasets and weights
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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # while nothing runs there is nothing to stop in order: end at once
    loop = PodLoop(volume, read_pod(volume.root), environment)
    notes = loop.greet()
    if RUN.is_dir():  # a container's own, where its page looks
        with suppress(OSError):
            write_json(RUN / POD_NOTES, notes)
    create_patiently(volume)
    loop.stop.on_signals()
    loop.delivery.start()
    try:
        while not loop.stop.requested and not loop.end_of_work.out_of_time():
            try:
                loop.turn()
                if loop.idle:
                    loop.end_of_work.look(loop.files)
            except OSError as error:
                loop.telling.once("", f"the volume does not answer as it should, looking again soon: {error}")
            loop.sleep(LOOK_EVERY)
    except Exception:
        loop.end()  # or its jobs would train on beside those that the next loop starts on the same GPUs
        raise
    loop.end()
    if not loop.stop.requested:
        loop.end_of_work.stay_stopped()
    return DONE


def create_patiently(volume: Volume) -> None:
    """Makes the volume's folders as soon as it lets itself be written: ending would only be to be started again."""
    told = ""
    while True:
        try:
            volume.create()
            return
        except OSError as error:
            line = f"{volume.root} cannot be used, so nothing runs: {error}. Trying again every {VOLUME_EVERY:g} s."
        if line != told:
            told = line
            print(line, flush=True)
        time.sleep(VOLUME_EVERY)


@dataclass
class PodLoop:
    volume: Volume
    pod: Pod
    environment: Mapping[str, str]
    stop: Stop = field(default_factory=Stop)
    children: dict[str, Child] = field(default_factory=dict)  # by job name
    ended: dict[str, Ended] = field(default_factory=dict)
    files: list[JobFile] = field(default_factory=list)  # at the last look, one for each name
    idle: bool = False  # nothing runs, and nothing will by itself

    def __post_init__(self) -> None:
        self.job_folder = JobFolder(self.volume.jobs)
        self.leases = LeaseWatch(self.environment.get("RUNPOD_POD_ID", ""), stale_seconds(self.environment))
        self.quiet = QuietWatch(read_seconds(self.environment, "FLUXPOD_QUIET_SECONDS", 10.0))
        self.telling = Telling(self.volume)
        self.delivery = Delivery(self.volume, self.environment)
        self.end_of_work = EndOfWork(self.volume, self.environment, self.sleep)

    def greet(self) -> list[str]:
        """Says what kind of pod this is; gives what its page should say, too."""
        gpus = ", ".join(gpu.name for gpu in self.pod.gpus)
        notes = [f"pod: {note}" for note in self.pod.notes]
        promised = self.environment.get("RUNPOD_GPU_COUNT", "")
        if promised.isdigit() and int(promised) != len(self.pod.gpus):
            notes.insert(0, f"pod: RUNPOD_GPU_COUNT says {promised} GPUs, nvidia-smi shows {len(self.pod.gpus)}")
        if not gpus:
            notes.insert(0, "GPUs: none: jobs are prepared as far as they can be, and wait for a start with GPUs")
        facts = probe_volume(self.volume.root, environment=self.environment)
        self.end_of_work.persistent = facts.persistent
        notes += [f"volume: {note}" for note in facts.notes]
        with suppress(OSError):
            clear_banner(self.volume, self.environment)
        if trouble := read_max_hours(self.environment)[1]:
            notes.append(trouble)
        for line in [f"GPUs: {gpus}", *notes] if gpus else notes:
            print(line, flush=True)
        print(f"watching {self.volume.jobs}", flush=True)
        return notes

    # ---- one look

    def turn(self) -> None:
        """Collects what ended, looks at the job files, starts what can start."""
        self._collect()
        self.files = self._one_for_each_name(self.job_folder.look())
        self._stop_removed()
        self._hold_unreadable()
        training = [child for name, child in self.children.items() if not self._only_uploads(name)]
        taken = {gpu for child in training for gpu in child.gpus}
        free = [gpu.index for gpu in self.pod.gpus if gpu.index not in taken]
        can_start = bool(free) if self.pod.gpus else not training
        readiness = {file.name: self._readiness(file, can_start) for file in self.files}
        waiting = [Waiting(f, f.loaded.job.gpus) for f in self.files if f.loaded and readiness[f.name] == "ready"]
        for job, gpus in choose(waiting, free, len(self.pod.gpus), len(training)):
            self._start(job.file, gpus)
        for file in self.files:
            if readiness[file.name] == "upload":
                self._start(file, ())
        for job in waiting:
            if job.file.name not in self.children:
                self.telling.tell(
                    job.file.name, "pending", "waiting for GPUs" if self.pod.gpus else "waiting for its turn"
                )
        arriving = self.job_folder.arriving or (self.delivery.is_alive() and not self.delivery.tried.is_set())
        self.idle = not self.children and not arriving and all(kind == "over" for kind in readiness.values())
        if not self.idle:
            self.end_of_work.work_goes_on()

    def _one_for_each_name(self, files: Sequence[JobFile]) -> list[JobFile]:
        first: dict[str, JobFile] = {}
        for file in files:
            if other := first.get(file.name):
                line = f"{file.path.name}: the name {file.name} is taken by {other.path.name}"
                self.telling.once(file.path.name, line)
            else:
                first[file.name] = file
        return list(first.values())

    def _hold_unreadable(self) -> None:
        running = {child.file.path for child in self.children.values()}  # an edit holds from the next start on
        unreadable = {file.name: file for file in self.files if not file.loaded and file.path not in running}
        for name, file in unreadable.items():
            if not self.leases.clear(self.volume.run(name).lease):  # its status is the owner's to write
                self.telling.once(
                    name, f"{file.path.name} cannot be read; the {name} that another process or pod runs goes on"
                )
            elif self.telling.tell(name, "held", file.problems, JOB_WRONG):
                self.end_of_work.notify(notify_of(file.text), name, "held", file.problems)
        if not self.job_folder.arriving:
            self.telling.forget_unreadable(except_for=unreadable)

    def _readiness(self, file: JobFile, can_start: bool) -> Readiness:
        """Whether nothing but free GPUs is missing; where something is, it is told."""
        if file.loaded is None:
            return "over"
        if file.name in self.children:
            return "later"
        folder = self.volume.run(file.name)
        trained = already_done(file.loaded, folder)
        if trained and not owes_upload(folder, file.loaded.job):
            self.telling.once(file.name, f"{file.name} is done")
            return "over"
        paths = self._data_of(file.loaded.job)
        ended = self.ended.get(file.name)
        if ended and not self._again(ended, file, paths):
            return "over" if ended.again_at is None or ended.code in HELD else "later"
        attempts = Attempts.read(folder.root, file.text)
        if attempts.exhausted:
            self.telling.crashed_too_often(file.name)
            return "over"
        if not self.leases.clear(folder.lease):  # its status is the owner's to write
            self.telling.once(file.name, f"{file.name}: waiting, another pod runs it or has just died")
            return "later"
        if trained:
            return "upload"
        if reason := self.quiet.waiting_for(paths, 0.0 if can_start else DATA_EVERY):
            self.telling.tell(file.name, "pending", f"waiting: {reason}")
            return "later"
        return "ready"

    def _only_uploads(self, name: str) -> bool:
        """Whether a child's training is over, so that its GPUs are free for the next job."""
        status = Status.read(self.volume.run(name).status)
        return status is not None and status.phase == "uploading"

    def _data_of(self, job: Job) -> list[Path]:
        """What the job names on the volume, there or not: its pictures and masks, and the weights it starts from."""
        named: list[str | None] = [entry.path for entry in job.datasets]
        named += [entry.mask for entry in job.datasets if entry.mask != ALPHA]
        named += [job.validation.path] if job.validation else []
        named += [job.base, job.vae, job.lora.start if job.lora else None]  # where an id on the hub leads is nothing
        if job.text_encoders:
            named += [job.text_encoders.clip, job.text_encoders.t5]
        return [self.volume.resolve(path) for path in named if path and not is_remote(path)]

    def _again(self, ended: Ended, file: JobFile, paths: Sequence[Path]) -> bool:
        if ended.text != file.text:
            return True
        if ended.again_at is not None and time.monotonic() >= ended.again_at:
            return True
        return ended.code == JOB_WRONG and self.quiet.differs(paths, ended.data, DATA_EVERY)

    # ---- children

    def _start(self, file: JobFile, gpus: tuple[int, ...]) -> None:
        environment = dict(self.environment) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", PARENT: str(os.getpid())}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            environment[SHARE] = f"{len(gpus)}/{len(self.pod.gpus)}"
        on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
        print(f"--- {file.path.name}: starting {file.name}{on}", flush=True)
        if self._only_uploads(file.name):  # says an earlier start of it, which was killed
            StatusFile(self.volume.run(file.name).status).tell("pending", "starting")
        command = [sys.executable, "-m", "entrypoint.cli", "run", str(file.path), "--volume", str(self.volume.root)]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        self.children[file.name] = Child(file, gpus, process)
        self.telling.forget(file.name)
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
        job, notify = file.loaded.job, self.end_of_work.notify
        outcome = self._outcome(name, code)
        ended = Ended(code, file.text, self.quiet.fingerprint(self._data_of(job)))
        if child.removed and code != DONE:
            ended.again_at = time.monotonic()  # with the file back it goes on
            message = "the job file was removed; what was saved stays"
            StatusFile(folder.status).tell("held", message, code=code)
        elif code == STOPPED:
            ended.again_at = time.monotonic()
        elif code == DONE:
            self.end_of_work.last = (job, outcome)
            notify(job.notify, name, "done", outcome.reason)
        elif code in HELD:
            ended.again_at = time.monotonic() + ACCESS_AGAIN if code == ACCESS_REFUSED else None
            notify(job.notify, name, "held", outcome.reason)
            if already_done(file.loaded, folder):  # but for its upload: what it says of the pod's end holds
                self.end_of_work.last = (job, Outcome(DONE, outcome.reason, outcome.step))
        else:
            states, _ = list_states(folder.states)
            attempts = Attempts.read(folder.root, file.text).crashed(states[-1].step if states else 0)
            attempts.write(folder.root)
            ended.again_at = time.monotonic() + attempts.wait
            if attempts.exhausted:
                self.end_of_work.last = (job, outcome)
                notify(job.notify, name, "failed", outcome.reason)
            else:
                again = f"{outcome.reason or f'crashed ({code})'}; trying again in {attempts.wait:.0f} s"
                self.telling.tell(name, "pending", again, code)
        self.ended[name] = ended

    def _outcome(self, name: str, code: int) -> Outcome:
        """What the run left as its end; its status where that is all it left."""
        folder = self.volume.run(name)
        outcome, told = Outcome.read(folder.outcome), Status.read(folder.status)
        if outcome and outcome.code == code:
            return outcome
        return Outcome(code, told.message if told else "", told.step if told else 0)

    def _stop_removed(self) -> None:
        """A run whose job file is gone is stopped as by a signal: its state stays; with the file back it goes on.

        Gone is what was not there at two looks: many an editor deletes a file and writes it anew.
        """
        there = {file.name for file in self.files}
        for name, child in self.children.items():
            missed, child.missing = child.missing, name not in there and child.file.path not in self.job_folder.seen
            if self.job_folder.arriving:  # it may be its file under another name
                continue
            if missed and child.missing and not child.removed:
                print(f"{name}: its job file was removed; stopping it", flush=True)
                child.removed = True
                child.process.terminate()

    def end(self) -> None:
        """Asks every job to stop, gives them the time there is, and leaves none behind."""
        for child in self.children.values():
            child.process.terminate()
        try:
            self._wait_for_children(clocks.POD_LOOP)
        except SystemExit:  # a second signal: they leave at once, too, and give back their leases
            for child in self.children.values():
                child.process.terminate()
            self._wait_for_children(clocks.LEAVE)
            raise

    def _wait_for_children(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        for name, child in self.children.items():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
                told = "did not stop in time and was killed; its newest state stands"
                self.telling.tell(name, "pending", told, STOPPED)

    def sleep(self, seconds: float) -> bool:
        """Waits; true as soon as somebody asked to stop."""
        until = time.monotonic() + seconds
        while not self.stop.requested and time.monotonic() < until:
            time.sleep(0.1)
        return self.stop.requested
