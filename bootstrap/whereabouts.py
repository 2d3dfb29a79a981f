"""Where each process of a launch is, and whether it gets further: a page of memory that it shares with who watches it.

A few hundred bytes, mapped by all. Saying something is a write to memory, so it may be done in every pass, and neither
a volume that hangs nor a full /dev/shm can stand in its way. The entrypoint makes the page and tells in the environment
where it is; a process that nobody watches writes into memory of its own.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from bootstrap.processes import start_time

PATH = "FLUXPOD_WHEREABOUTS"  # in a child's environment
BEAT = 1.0  # seconds between two signs of life

_MINUTE = 60.0


class Phase(Enum):
    """What a process is at, and how many seconds it may be there without getting further.

    The limits are for slow hosts and volumes: a volume of 30 MB/s takes 13 min for FLUX's transformer, a compile of all
    blocks about 5 min. They are counted from the last pass, drawn step, piece read or written, or encoded picture.
    """

    STARTING = "starting", 10 * _MINUTE
    MEETING = "meeting the others", 10 * _MINUTE
    CHECKING = "checking attention", 20 * _MINUTE
    LOADING = "loading weights", 30 * _MINUTE
    SETTING_UP = "setting up", 20 * _MINUTE
    COMPILING = "compiling for a new size of images", 20 * _MINUTE
    TRAINING = "training", 5 * _MINUTE
    SAVING = "saving", 15 * _MINUTE
    VALIDATING = "validating", 15 * _MINUTE
    SAMPLING = "drawing samples", 15 * _MINUTE
    PAUSED = "paused", 5 * _MINUTE
    FINISHING = "writing the output", 30 * _MINUTE
    LEAVING = "leaving", 2 * _MINUTE
    ENCODING = "encoding", 15 * _MINUTE

    def __init__(self, words: str, limit: float):
        self.words, self.limit = words, limit


class End(Enum):
    """What a process said last."""

    NONE = "running"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True)
class Seen:
    """What a process last said of itself. Times are its own sums, of which two are compared."""

    number: int
    pid: int = 0  # 0: it has said nothing yet
    started: int = 0  # as bootstrap/processes.py has it
    end: End = End.NONE
    phase: Phase = Phase.STARTING
    step: int = 0  # updates done
    moves: int = 0  # grows while it gets further
    beats: int = 0  # grows while it lives
    work: float = 0.0  # done where it waited for nobody; a unit of its own, the same on all processes
    seconds: float = 0.0  # which that took
    waited: float = 0.0  # seconds it waited for its data

    @property
    def gone(self) -> bool:
        """Whether it ended without having said so."""
        return self.pid != 0 and self.end == End.NONE and start_time(self.pid) != self.started

    def told(self) -> str:
        """In words: "training, after step 17"."""
        return f"{self.phase.words}, after step {self.step}" if self.step else self.phase.words


_INTEGERS = ("pid", "started", "end", "phase", "step", "moves", "beats")
_FLOATS = ("work", "seconds", "waited")
_OFFSETS = {name: 8 * place for place, name in enumerate((*_INTEGERS, *_FLOATS))}
_SIZE = 8 * len(_OFFSETS)  # of what one process says
_PHASES, _ENDS = tuple(Phase), tuple(End)


class Whereabouts:
    """The page, for who watches."""

    def __init__(self, descriptor: int, processes: int):
        """``descriptor``: of an empty file in memory."""
        self.processes = processes
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # for as long as this process has it open
        os.ftruncate(descriptor, processes * _SIZE)
        self.memory = mmap.mmap(descriptor, processes * _SIZE)

    @classmethod
    @contextmanager
    def made(cls, processes: int) -> Iterator[Whereabouts]:
        """A new page, which nobody finds afterwards."""
        descriptor = os.memfd_create("fluxpod-whereabouts")
        try:
            yield cls(descriptor, processes)
        finally:
            os.close(descriptor)

    def read(self) -> list[Seen]:
        """Each process's last word, by number."""
        return [self._read(number) for number in range(self.processes)]

    def _read(self, number: int) -> Seen:
        values = struct.unpack_from(f"@{len(_INTEGERS)}q{len(_FLOATS)}d", self.memory, number * _SIZE)
        said = dict(zip(_OFFSETS, values, strict=True))
        return Seen(number=number, **said | {"phase": _PHASES[said["phase"]], "end": _ENDS[said["end"]]})


class Place:
    """This process's part of the page."""

    def __init__(self, memory: mmap.mmap, number: int):
        self.memory, self.number = memory, number
        self.moves = self.beats = 0
        self.phase, self.step = Phase.STARTING, 0
        self.work = self.seconds = self.waited = 0.0

    @classmethod
    def unwatched(cls, number: int = 0) -> Place:
        return cls(mmap.mmap(-1, (number + 1) * _SIZE), number)

    @classmethod
    def take(cls, number: int, environment: Mapping[str, str] = os.environ) -> Place:
        """The place of process ``number`` of the launch, which shows from now on that it lives."""
        place = cls.unwatched(number)
        if path := environment.get(PATH):
            with suppress(OSError, ValueError), open(path, "r+b") as file:  # of a launch that is gone, or smaller
                place = cls(mmap.mmap(file.fileno(), (number + 1) * _SIZE), number)
        place._write("started", start_time(os.getpid()) or 0)
        place._write("pid", os.getpid())
        threading.Thread(target=place._live, name="sign of life", daemon=True).start()
        return place

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """``step``: updates done; left out, it stays."""
        self.phase, self.step = phase, self.step if step is None else step
        self._write("phase", _PHASES.index(phase))
        self._write("step", self.step)
        self.move()

    def move(self) -> None:
        """It has got further. May be called from several threads: a lost count is no matter."""
        self.moves += 1
        self._write("moves", self.moves)

    def did(self, work: float, seconds: float, waited: float) -> None:
        """Adds what was done where it waited for no other process, and how long it waited for its data."""
        self.work, self.seconds, self.waited = self.work + work, self.seconds + seconds, self.waited + waited
        for name in _FLOATS:
            struct.pack_into("@d", self.memory, self.number * _SIZE + _OFFSETS[name], getattr(self, name))

    def ends(self, end: End) -> None:
        self._write("end", _ENDS.index(end))

    def told(self) -> str:
        """In words: "process 1, training, after step 17"."""
        return f"process {self.number}, {Seen(self.number, phase=self.phase, step=self.step).told()}"

    def _live(self) -> None:
        while True:
            self.beats += 1
            self._write("beats", self.beats)
            time.sleep(BEAT)

    def _write(self, name: str, value: int) -> None:
        struct.pack_into("@q", self.memory, self.number * _SIZE + _OFFSETS[name], value)
