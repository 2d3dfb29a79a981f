"""Several transfers at once, each in a process of its own that is watched: bytes move, or it is ended and begun anew.

``Transfers`` runs ``bootstrap.receive``, or ``bootstrap.send``. A file whose transfer fails waits and is tried again
from where it broke off, the others go on meanwhile; from the third try without a new byte it goes by plain HTTP, as Xet
may be what fails. What asking again cannot change, and what failed too often, is an AccessError; what the volume
refuses is a PodError.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from bootstrap import hub
from bootstrap.hub import RemoteFile
from bootstrap.outcome import AccessError, NotNowError, PodError
from bootstrap.receive import Order
from bootstrap.send import Parcel
from jobs.secret import is_secret

Say = Callable[[str], None]
Attend = Callable[[], None]

AT_ONCE = 4  # files on the wire at a time: one HTTP stream of the hub's CDN fills no data-centre link
LARGE = 8_000_000  # bytes of a file that is worth a process of its own: one takes a quarter of a second to start
TICK = 0.2  # seconds between two looks at everything, and before a stop is noticed at most
LONGEST_WAIT = 300.0  # seconds that a busy hub can make us wait before one more try
NEW = 1 << 20  # bytes further than ever that make a try count as none (a tenth of a smaller file)
START_LIMIT = 120.0  # seconds for a process to start, on a machine that is busy with other things
END_LIMIT = 1.0  # seconds for a killed process to go; one that is stuck in I/O goes when it can
RECEIVE, SEND = "bootstrap.receive", "bootstrap.send"  # what a process runs
ANSWERS = ("done", "listed", "looked", "opened")  # what its last word about a request that went well holds


@dataclass(frozen=True)
class Patience:
    """How long a fetch puts up with trouble, in seconds."""

    stall: float = 120.0  # without a sign of life before a transfer is ended
    flush: float = 1800.0  # the same while the volume takes what has arrived: 250 MB at a time, on a volume that hangs
    waits: tuple[float, ...] = (2.0, 10.0, 30.0, 120.0)  # before each new try of a file that got no further
    report: float = 10.0  # between two lines of progress


@dataclass(eq=False)
class _Task:
    """One request and what became of its tries."""

    request: dict[str, Any]
    name: str  # for people
    size: int = 0  # bytes, as far as known
    held: int = 0  # bytes that have arrived: on the volume, or away from it
    kept: int = 0  # of an upload, bytes that a new try need not send again
    furthest: int = 0
    tries: int = 0  # since it last got further
    damaged: int = 0
    ready: float = 0.0  # when it may be tried again, on the monotonic clock
    answer: dict[str, Any] = field(default_factory=dict)


class _Process:
    """One ``bootstrap.receive`` or ``bootstrap.send``, idle or at a task."""

    def __init__(self, program: str, token: str | None, events: queue.Queue[tuple[_Process, dict[str, Any] | None]]):
        environment = {name: value for name, value in os.environ.items() if not is_secret(name)}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.task: _Task | None = None
        self.moved = time.monotonic()  # its last sign of life
        self.started = self.flushing = False
        self.said: list[str] = []  # on its standard error
        self._readers = [
            threading.Thread(target=self._listen, args=(events,), daemon=True),
            threading.Thread(target=self._collect, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        # The token goes through the pipe: an environment can be read from outside, e.g. in a crash report.
        self._write({"token": token})

    def begin(self, task: _Task) -> None:
        self.task, self.moved, self.flushing = task, time.monotonic(), False
        self._write(task.request)

    def _write(self, value: dict[str, Any]) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it is gone: that its output ends tells so
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def _listen(self, events: queue.Queue[tuple[_Process, dict[str, Any] | None]]) -> None:
        assert self.process.stdout
        with self.process.stdout as lines, contextlib.suppress(ValueError):  # half a line of a killed process
            for line in lines:
                events.put((self, json.loads(line)))
        events.put((self, None))

    def _collect(self) -> None:
        assert self.process.stderr
        with self.process.stderr as lines:
            for line in lines:
                self.said = [*self.said[-20:], line]

    def last_words(self) -> str:
        """The end of what it printed; addresses in it may be signed."""
        said = " ".join(" ".join(self.said).split())
        return hub.without_signatures(said)[-500:] or "it said nothing"

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT)
        for reader in self._readers:
            reader.join(END_LIMIT)
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class Transfers:
    """A context manager; when it is left nothing runs any more. ``attend`` is called in every wait, and may raise.

    ``say`` is told what people should know: retries with their reasons, progress where there is no terminal, or where
    it is somebody else's (``bar`` false). ``program``: RECEIVE or SEND.
    """

    def __init__(
        self,
        token: str | None,
        say: Say,
        attend: Attend,
        patience: Patience | None = None,
        *,
        program: str = RECEIVE,
        bar: bool = True,
    ):
        self.token, self._tell, self.attend = token, say, attend
        self.program, self.bar = program, bar
        self.patience = patience or Patience()
        self._processes: list[_Process] = []
        self._events: queue.Queue[tuple[_Process, dict[str, Any] | None]] = queue.Queue()
        self._meter: Meter | None = None
        self._last_said = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.end()
        self._processes.clear()

    def list_files(self, repo: str, revision: str, kind: str = "model") -> tuple[str, tuple[RemoteFile, ...]]:
        """The commit and the files of a repository that this token may read. Raises AccessError, in words."""
        commit, files = self.ask({"list": {"repo": repo, "revision": revision, "kind": kind}})["listed"]
        return commit, tuple(RemoteFile(**file) for file in files)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request about one repository that carries no file. Raises AccessError, in words."""
        (what,) = request.values()
        task = _Task(request, str(what["repo"]))
        self._run([task], 1, lambda _: None)
        return task.answer

    def send(self, parcel: Parcel, title: str) -> dict[str, str]:
        """Brings a parcel to the hub; gives commit, sha256 and card's id as ``bootstrap.send.send`` does.

        Raises AccessError, PodError, and FileNotFoundError where its file is not here any more.
        """
        task = _Task({"send": asdict(parcel)}, f"{parcel.path} of {parcel.repo}", parcel.size)
        self._meter = Meter(title, [task], self._tell, self.patience.report, self.bar)
        try:
            self._run([task], 1, lambda _: None)
        finally:
            self._meter.close(told=False)  # what was there already took no time
            self._meter = None
        return dict(task.answer["done"])

    def carry(
        self,
        orders: Sequence[Order],
        publish: Callable[[Order, str], object],
        title: str,
        enough: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Brings every order's bytes to its ``part``, the largest first, and calls ``publish`` with each one's sha256.

        ``enough`` is told how many bytes a file has of which only its server knows, and may raise. Raises AccessError
        and PodError.
        """
        tasks = [
            _Task({"get": asdict(order)}, _name(order), order.size or 0, _size(order), _size(order))
            for order in sorted(orders, key=lambda order: -(order.size or 0))
        ]

        def finish(task: _Task) -> None:
            publish(Order(**task.request["get"]), task.answer["done"])

        large = sum(1 for task in tasks if task.size >= LARGE)
        self._meter = Meter(title, tasks, self._tell, self.patience.report, self.bar)
        self._enough = enough
        try:
            self._run(tasks, max(1, min(AT_ONCE, large)), finish)
        finally:
            self._meter.close()
            self._meter = None

    # ---- the loop

    def _run(self, tasks: Iterable[_Task], at_once: int, finish: Callable[[_Task], None]) -> None:
        waiting = list(tasks)
        while waiting or any(process.task for process in self._processes):
            self.attend()
            self._begin(waiting, at_once)
            for process, event in self._heard():
                task = process.task
                if event is None:
                    self._processes.remove(process)
                if task is None:
                    process.started = True
                    continue
                failure = self._take(process, task, event)
                if task.answer:
                    process.task = None
                    finish(task)
                elif failure:
                    process.task = None
                    self._fail(task, failure)
                    waiting.append(task)
            waiting += self._end_stalled()
            if self._meter:
                self._meter.show()

    def _begin(self, waiting: list[_Task], at_once: int) -> None:
        now = time.monotonic()
        for task in [task for task in waiting if task.ready <= now]:
            idle = next((process for process in self._processes if process.task is None), None)
            if idle is None:
                if len(self._processes) >= at_once:
                    return
                self._processes.append(idle := _Process(self.program, self.token, self._events))
            waiting.remove(task)
            idle.begin(task)

    def _heard(self) -> list[tuple[_Process, dict[str, Any] | None]]:
        """All events that have come, after waiting a moment for the first."""
        heard = []
        with contextlib.suppress(queue.Empty):
            heard.append(self._events.get(timeout=TICK))
            while True:
                heard.append(self._events.get_nowait())
        return [(process, event) for process, event in heard if process in self._processes]

    def _take(self, process: _Process, task: _Task, event: dict[str, Any] | None) -> dict[str, Any] | None:
        """Notes what an event says; gives it back where it is a failure."""
        process.moved, process.started = time.monotonic(), True
        if event is None:
            process.end()
            code = process.process.returncode
            message = f"The transfer of {task.name} ended with code {code}: {process.last_words()}"
            return {"failed": "passing", "message": hub.without_token(message, self.token)}
        process.flushing = "flushing" in event
        if event.get("total") and not task.size:
            self._enough(event["total"] - task.held)
            task.size = event["total"]
        task.held = event.get("bytes", task.held)
        if "send" in task.request:
            _remember(task, event)
        if any(answer in event for answer in ANSWERS):
            task.held, task.answer = task.size, event
        return event if "failed" in event else None

    def _end_stalled(self) -> list[_Task]:
        """Ends every process without a sign of life; its task is to be tried again."""
        stalled = []
        for process in list(self._processes):
            limit = self.patience.flush if process.flushing else self.patience.stall
            if not process.started:
                limit = max(limit, START_LIMIT)
            if process.task and time.monotonic() - process.moved > limit:
                self._processes.remove(process)
                process.end()
                task, process.task = process.task, None
                if process.flushing and "get" in task.request:
                    told = f"The volume has not taken {task.name} for {limit:.0f} s."
                    self._fail(task, {"failed": "volume", "message": told})
                else:
                    told = f"The transfer of {task.name} stalled: no byte for {limit:.0f} s."
                    self._fail(task, {"failed": "passing", "message": told})
                stalled.append(task)
        return stalled

    # ---- failures

    def _fail(self, task: _Task, failure: dict[str, Any]) -> None:
        """Says what happened and when the task is tried again; raises where that is in vain."""
        kind, message = failure["failed"], str(failure["message"])
        if kind == "access":
            raise AccessError(message)
        if kind == "fault":
            raise RuntimeError(message)
        if kind == "full":
            raise PodError(f"the volume is full ({message}) and {self._still_needed()}. {MAKE_ROOM}")
        if kind == "gone":
            raise FileNotFoundError(message)
        if kind == "damaged":
            self._fetch_anew(task, bool(failure["from_start"]))
            return
        if failure.get("anew"):
            task.request["send"]["begun"], task.kept, task.furthest = None, 0, 0
        elif kind == "passing" and self._got_further(task):
            self.say(f"{message} Going on from there.")
            return
        task.tries += 1
        if kind == "volume":
            message = _after_volume_failed(task, message)
        if task.tries > len(self.patience.waits):
            raise PodError(message) if kind == "volume" else NotNowError(message)
        for what in ("get", "send"):
            if what in task.request and task.tries >= 2:
                task.request[what]["plain"] = True
        wait = max(self.patience.waits[task.tries - 1], min(float(failure.get("after", 0)), LONGEST_WAIT))
        task.ready = time.monotonic() + wait
        self.say(f"{message} Trying again in {wait:.0f} s.")

    def _got_further(self, task: _Task) -> bool:
        """Whether the try that failed brought enough to count as none."""
        if "get" in task.request:
            task.held = _size(Order(**task.request["get"]))
        elif "send" in task.request:
            task.held = task.kept
        if task.held < task.furthest + min(NEW, task.size / 10 + 1):
            return False
        task.furthest, task.tries = task.held, 0
        return True

    def _fetch_anew(self, task: _Task, from_start: bool) -> None:
        task.held = task.furthest = 0
        if not from_start:
            self.say(f"what an earlier transfer left of {task.name} is damaged: it is fetched from its beginning")
            return
        task.damaged += 1
        if task.damaged > 1:
            raise AccessError(
                f"{task.name} arrived twice with other bytes than the hub's own checksum says. Nothing was kept of it. "
                "A proxy or a mirror (HF_ENDPOINT) may be at fault; try again later."
            )
        task.request["get"]["plain"] = True
        self.say(f"{task.name} arrived damaged: it is fetched once more")

    def _still_needed(self) -> str:
        left = sum(task.size - task.held for task in self._meter.tasks) if self._meter else 0
        return f"{left / 1e9:.1f} GB more have to go there"

    def say(self, line: str) -> None:
        if line == self._last_said:  # several files meet the same trouble
            return
        self._last_said = line
        if self._meter:
            self._meter.write(line)
        else:
            self._tell(line)


MAKE_ROOM = "Make the volume larger, or delete models, data or runs that are not needed (fluxpod clean)."


def _remember(task: _Task, event: dict[str, Any]) -> None:
    """Notes what a new try of an upload need not do again: in memory alone, since the addresses of parts are signed."""
    what = task.request["send"]
    what["sha256"] = event.get("sha256") or what["sha256"]
    if "begun" in event:
        what["begun"], task.kept = event["begun"], event.get("kept", 0)
    if "part" in event:
        number, tag = event["part"]
        what["begun"]["parts"][str(number)] = tag
        task.kept = event["kept"]


def _after_volume_failed(task: _Task, message: str) -> str:
    """What to say; takes away a partial file, whose content cannot be told from what it should be."""
    if "get" not in task.request:
        return message
    with contextlib.suppress(OSError):  # the volume may refuse this, too
        Path(task.request["get"]["part"]).unlink()
    return f"{task.name} cannot be written to the volume: {message}."


def _name(order: Order) -> str:
    return f"{order.path} of {order.repo}" if order.repo else hub.shown_address(order.url)


def _size(order: Order) -> int:
    with contextlib.suppress(OSError):
        return Path(order.part).stat().st_size
    return 0


class Meter:
    """How far the transfers are, how fast, and how long still: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, tasks: Sequence[_Task], say: Say, every: float, bar: bool):
        self.title, self.tasks, self.say, self.every = title, tasks, say, every
        self.begun = self.told = time.monotonic()
        self.start = self._held()
        self.bar = (
            tqdm(total=self._total() or None, initial=self.start, desc=title, unit="B", unit_scale=True)
            if bar and sys.stderr.isatty()
            else None
        )

    def _held(self) -> int:
        return sum(task.held for task in self.tasks)

    def _total(self) -> int:
        return sum(task.size for task in self.tasks)

    def show(self) -> None:
        held, total, now = self._held(), self._total(), time.monotonic()
        if self.bar is not None:
            self.bar.total = total or None
            self.bar.n = held
            self.bar.refresh()
        elif now - self.told >= self.every and held < total:
            self.told = now
            self.say(f"{self.title}: {progress_line(held, total, (held - self.start) / (now - self.begun))}")

    def write(self, line: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        self.say(line)

    def close(self, told: bool = True) -> None:
        if self.bar is not None:
            self.bar.close()
            return
        if not told:
            return
        brought, took = self._held() - self.start, time.monotonic() - self.begun
        if brought > LARGE and self._held() == self._total():
            self.say(f"{self.title}: {brought / 1e9:.1f} GB in {took:.0f} s, {brought / took / 1e6:.0f} MB/s, verified")


def progress_line(held: int, total: int, rate: float) -> str:
    """``12.3 of 33.7 GB, 210 MB/s, 1:42 left``; ``rate`` in bytes a second."""
    left = ""
    if rate > 0:
        minutes, seconds = divmod(round((total - held) / rate), 60)
        left = f", {minutes // 60}:{minutes % 60:02d}:{seconds:02d} left" if minutes >= 60 else ""
        left = left or f", {minutes}:{seconds:02d} left"
    return f"{held / 1e9:.1f} of {total / 1e9:.1f} GB, {max(0.0, rate) / 1e6:.0f} MB/s{left}"
