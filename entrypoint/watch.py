"""Sees that a launch cannot go on: a process is gone, has failed, gives no sign of life, or nothing gets further.

Processes that train together wait for each other, so one that is lost would hold all of them, and their GPUs, for as
long as their libraries have patience: 20 minutes, and some for ever. What ends them here is sooner, and knows whose
fault it is. Time is counted while this program runs: a machine that was suspended wakes up as patient as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap.whereabouts import End, Phase, Seen, Whereabouts

GRACE = 2.0  # seconds for the others' last words, once one is gone
SILENCE = 120.0  # without a sign of life, which comes every second: a compiler may hold Python up for a minute
UNENDING = 60.0  # seconds that the launcher may live on after the last of its processes
SLOWEST_PASSES = 10.0  # times the longest wait seen in training, if more than its limit: very large steps
GONE = "it was killed or broke down, usually since the host's memory ran out"
MOST_BETWEEN_LOOKS = 2.0  # seconds counted between two looks, however long it was


class Fallen(Exception):
    """Why a launch was ended; nothing where its processes have told it themselves."""


@dataclass
class _Watched:
    """How long a process has been as it was last seen."""

    seen: Seen
    idle: float = 0.0  # seconds without getting further
    silent: float = 0.0  # without a sign of life
    lost: float = 0.0  # since it was found gone, or to have failed
    gone: bool = False  # without a word

    def look(self, seen: Seen, passed: float) -> None:
        before = self.seen
        further = (seen.pid, seen.phase, seen.step, seen.moves) != (before.pid, before.phase, before.step, before.moves)
        self.idle = 0.0 if further else self.idle + passed
        self.silent = 0.0 if not seen.pid or seen.beats != before.beats else self.silent + passed
        self.seen = seen
        self.gone = seen.gone
        if self.gone or seen.end == End.FAILED:
            self.lost += passed

    @property
    def running(self) -> bool:
        return self.seen.end == End.NONE and not self.gone


@dataclass
class Watch:
    """Looks at one launch. ``gpus``: nvidia-smi's index of each process's card, () on a CPU; ``together``: they wait
    for each other."""

    whereabouts: Whereabouts
    gpus: Sequence[int]
    together: bool
    clock: Callable[[], float] = time.monotonic
    processes: list[_Watched] = field(init=False)
    longest: float = field(default=0.0, init=False)  # seconds of training in which no process got further
    over: float = field(default=0.0, init=False)  # seconds since the last of them ended

    def __post_init__(self) -> None:
        self.processes = [_Watched(seen) for seen in self.whereabouts.read()]
        self.last = self.clock()

    def look(self) -> None:
        """Raises Fallen where the launch cannot go on."""
        now = self.clock()
        passed, self.last = min(now - self.last, MOST_BETWEEN_LOOKS), now
        idle, trained = self._idle(), self._training()
        for watched, seen in zip(self.processes, self.whereabouts.read(), strict=True):
            watched.look(seen, passed)
        if self._idle() < idle and trained and self._training():  # not what compiling or a save took before
            self.longest = max(self.longest, idle)
        self.over = 0.0 if any(each.running for each in self.processes) else self.over + passed
        if self.over > UNENDING:
            raise Fallen
        if self.together:
            self._refuse_lost()
        self._refuse_silent()
        self._refuse_idle()

    def gone(self) -> str:
        """Who ended without a word, and what that usually means; "" where nobody did."""
        seen = self.whereabouts.read()
        return "; ".join(f"{self._name(each)} is gone without a word: {GONE}" for each in seen if each.gone)

    def _training(self) -> bool:
        return all(each.seen.phase == Phase.TRAINING for each in self.processes)

    def _idle(self) -> float:
        return min((each.idle for each in self.processes if each.running), default=0.0)

    def _refuse_lost(self) -> None:
        lost = [each for each in self.processes if each.lost]
        if not lost or max(each.lost for each in lost) < GRACE:
            return
        raise Fallen(self.gone())

    def _refuse_silent(self) -> None:
        silent = [each for each in self.processes if each.running and each.silent > SILENCE]
        if silent:
            names = "; ".join(self._name(each.seen) for each in silent)
            raise Fallen(f"no sign of life for {SILENCE:.0f} s from {names}{_stopped(silent[0].seen.pid)}")

    def _refuse_idle(self) -> None:
        running = [each for each in self.processes if each.running]
        for some in [running] if self.together else [[each] for each in running]:
            if some and min(each.idle for each in some) > (limit := max(map(self._limit, some))):
                raise Fallen(f"nothing got further for {limit:.0f} s: {self._behind(some)}")

    def _limit(self, watched: _Watched) -> float:
        phase = watched.seen.phase
        return max(phase.limit, SLOWEST_PASSES * self.longest) if phase == Phase.TRAINING else phase.limit

    def _behind(self, some: Sequence[_Watched]) -> str:
        """Those that the others wait for, as far as it can be told: they have done fewer steps, or never came."""
        least = min((bool(each.seen.pid), each.seen.step) for each in some)
        behind = [each for each in some if (bool(each.seen.pid), each.seen.step) == least]
        if len(behind) == len(some):
            return "; ".join(self._name(each.seen) for each in some)
        return f"the others wait for {'; '.join(self._name(each.seen) for each in behind)}"

    def _name(self, seen: Seen) -> str:
        return f"{name_of(seen.number, self.gpus)} ({seen.told()})"


def name_of(number: int, gpus: Sequence[int]) -> str:
    return f"process {number} on GPU {gpus[number]}" if number < len(gpus) else f"process {number}"


def _stopped(pid: int) -> str:
    """Whether a signal or a debugger holds it. Field 3 of /proc/PID/stat, proc(5)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return {"T": ", which a signal has stopped", "t": ", which a debugger has stopped"}.get(
        state, ", whose GPU or disk may hang" if state == "D" else ""
    )
