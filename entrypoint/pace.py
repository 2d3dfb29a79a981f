"""Which GPU of several is slow: each minute a line in ``pace.jsonl``, and a word in status and log where one lags.

What is compared is each process's own measure of itself where it waits for nobody (trainer/pace.py). How busy
nvidia-smi calls a card stands beside it and is no judge: waiting for another one counts as busy.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bootstrap.nvidia_smi import Load, read_health, read_loads
from bootstrap.whereabouts import Seen, Whereabouts
from entrypoint.watch import name_of

WINDOW = 60.0  # seconds
SLOWER = 0.2  # more time for the same work than the others take, in the median: then a process lags
IN_A_ROW = 2  # windows, before it is said: a hiccup is none

Say = Callable[[str], None]


@dataclass
class PaceWatch:
    """Looks at one launch. ``gpus``: nvidia-smi's index of each process's card, () on a CPU."""

    whereabouts: Whereabouts
    gpus: Sequence[int]
    file: Path
    say: Say
    clock: Callable[[], float] = time.monotonic
    loads: Callable[[], Mapping[int, Load]] = read_loads
    notice: str = field(default="", init=False)  # for the status; "" while nobody lags

    def __post_init__(self) -> None:
        self.before, self.since = self.whereabouts.read(), self.clock()
        self.lagging: dict[int, int] = {}  # by process: windows in a row
        self.measuring: threading.Thread | None = None

    def look(self) -> None:
        """Once a window is over, measures it; nvidia-smi, which may hang, is asked on a thread."""
        if self.clock() - self.since < WINDOW or (self.measuring and self.measuring.is_alive()):
            return
        now, seconds = self.whereabouts.read(), self.clock() - self.since
        before, self.before, self.since = self.before, now, self.clock()
        self.measuring = threading.Thread(target=self.measure, args=(before, now, seconds), daemon=True)
        self.measuring.start()

    def measure(self, before: Sequence[Seen], now: Sequence[Seen], seconds: float) -> None:
        steps = now[0].step - before[0].step
        if steps <= 0:
            return
        slower, loads = lags(before, now), self.loads() if self.gpus else {}
        self._notice(slower)
        processes = []
        for old, new in zip(before, now, strict=True):
            gpu = self.gpus[new.number] if self.gpus else None
            lag, load = slower.get(new.number), loads.get(gpu) if gpu is not None else None
            processes.append(
                {"process": new.number, "gpu": gpu, "slower": None if lag is None else round(lag, 3)}
                | {"data_wait_s": round((new.waited - old.waited) / steps, 4)}
                | (asdict(load) if load else {})
            )
        line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "step": now[0].step}
        line |= {"s_per_step": round(seconds / steps, 4), "processes": processes}
        with suppress(OSError), self.file.open("a", encoding="utf-8") as file:  # a full volume ends no training
            file.write(json.dumps(line) + "\n")

    def _notice(self, slower: Mapping[int, float]) -> None:
        """Says who lags, when it begins and when it ends."""
        self.lagging = {number: self.lagging.get(number, 0) + 1 for number, lag in slower.items() if lag > SLOWER}
        told = [self._told(number, slower[number]) for number, times in self.lagging.items() if times >= IN_A_ROW]
        if told and not self.notice:
            self.say(
                f"warning: {'; '.join(told)}. All wait for the slowest: `fluxpod probe` on this pod, or another pod"
            )
        elif self.notice and not told:
            self.say("no process lags behind the others any more")
        self.notice = f" ({'; '.join(told)})" if told else ""

    def _told(self, number: int, lag: float) -> str:
        slowed = read_health(self.gpus[number]).slowed if self.gpus else ()
        why = f": {', '.join(slowed)}" if slowed else ""
        return f"{name_of(number, self.gpus)} is {lag:.0%} slower than the others{why}"


def lags(before: Sequence[Seen], now: Sequence[Seen]) -> dict[int, float]:
    """By process, how much more time it took for the same work than the others in the median: 0.2 is a fifth more.
    Nothing where there is nobody to compare with, or one of them has measured nothing."""
    paces = {}
    for old, new in zip(before, now, strict=True):
        work, seconds = new.work - old.work, new.seconds - old.seconds
        if work <= 0 or seconds <= 0:
            return {}
        paces[new.number] = seconds / work
    if len(paces) < 2:
        return {}
    return {
        number: pace / statistics.median(other for them, other in paces.items() if them != number) - 1
        for number, pace in paces.items()
    }
