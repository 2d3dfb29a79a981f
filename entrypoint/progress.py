"""What a person sees of a run while it trains: a bar on a terminal, plain lines elsewhere and in the run's log."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bootstrap.validation import in_words, read_rounds
from entrypoint.status import Figures

MEAN_OF = 100  # steps: one step's loss is mostly the noise that was drawn
PLAIN_EVERY = 10.0  # seconds between two plain lines: a log that is read, not filled
# Lines of the log that are meant for people begin with the trainer's clock; the rest is libraries talking.
_FOR_PEOPLE = re.compile(r"^(\d\d:\d\d:\d\d )")


class Tail:
    """The whole lines that a growing file gained since the last look."""

    def __init__(self, path: Path, from_end: bool = False):
        self.path = path
        self.position, self.file = 0, -1
        if path.exists():
            found = path.stat()
            self.position, self.file = (found.st_size if from_end else 0), found.st_ino
        self.rest = b""

    def lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self.file or found.st_size < self.position:  # it was cut and rewritten
                    self.position, self.file, self.rest = 0, found.st_ino, b""
                file.seek(self.position)
                data = file.read()
        except OSError:  # not there yet, or a volume that hangs: looking on must not end a training
            return []
        self.position += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]


class TrainingProgress:
    """Follows ``metrics.jsonl`` and the log of one launch."""

    def __init__(self, metrics: Path, log: Path, start: int, steps: int):
        # From their ends: the trainer cuts off what the metrics hold beyond ``start``, which is not done yet.
        self.metrics, self.log = Tail(metrics, from_end=True), Tail(log, from_end=True)
        self.rounds = Tail(metrics.with_name("validation.jsonl"))
        self.validation = ""
        self.losses: deque[float] = deque(maxlen=MEAN_OF)
        self.start, self.step, self.steps = start, start, steps
        self.told = time.monotonic()
        self.last: dict[str, Any] = {}
        self.bar = tqdm(total=steps, initial=start, unit="step") if sys.stderr.isatty() else None

    def look(self) -> bool:
        """Shows what is new; whether a step was added."""
        for line in self.log.lines():
            if _FOR_PEOPLE.match(line):
                self._say(line)
        before = self.step
        for line in self.metrics.lines():
            try:
                self.last = json.loads(line)
            except ValueError:
                continue
            self.step = max(self.step, int(self.last["step"]))
            if isinstance(self.last.get("loss"), float):
                self.losses.append(self.last["loss"])
        if self.rounds.lines():
            with suppress(OSError):
                self.validation = in_words(read_rounds(self.rounds.path))
        if self.step > before:
            self._show(before)
        return self.step > before

    @property
    def figures(self) -> Figures:
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        return Figures(loss, self.last.get("images_per_s"), self.last.get("left_s"), self.validation)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _show(self, before: int) -> None:
        loss, speed = self.last.get("loss"), self.last.get("images_per_s", 0.0)
        loss = math.nan if loss is None else loss  # of a step that was skipped
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {speed:.1f} images/s", refresh=False)
            self.bar.update(self.step - before)
        now = time.monotonic()
        if now - self.told >= PLAIN_EVERY or self.step == self.steps:
            self.told = now
            seconds = self.last.get("left_s")
            left = "" if seconds is None else f"  {as_clock(seconds)} left"
            line = f"step {self.step}/{self.steps}  loss {loss:.4f}  {speed:.1f} images/s{left}"
            with suppress(OSError), self.log.path.open("a", encoding="utf-8") as log:  # a full volume ends no training
                log.write(line + "\n")
            if self.bar is None:
                print(line, flush=True)

    def _say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line)
        else:
            print(line, flush=True)


def as_clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
