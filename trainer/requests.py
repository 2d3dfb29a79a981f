"""What people ask of a run under way: files in its folder, and the time that a save by the clock is due."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bootstrap.run_file import RunFile
from trainer.world import World

GLANCE = 1.0  # seconds between two looks for the files: a network volume takes milliseconds for each


@dataclass(frozen=True)
class Asked:
    """What all processes have agreed on between two steps."""

    stop: bool
    save: bool
    pause: bool
    writing: bool  # some process is still writing a state


class Requests:
    """Rank 0 looks; every process hears. Its questions are entered by all."""

    def __init__(self, run: RunFile, world: World):
        self.folder, self.world, self.interval = run.folder, world, run.job.save.interval
        self.steps_per_epoch = run.plan.steps_per_epoch
        self.saved = time.monotonic()
        self.looked = -math.inf
        self.save_now = self.pause = False

    def ask(self, step: int, writing: bool) -> Asked:
        """``writing``: whether this process still writes a state."""
        self._look()
        due = self._due(step) or (self.world.leads and (self.save_now or self._time_is_up()))
        return Asked(*self.world.any(self.world.stop_requested, due, self.pause, writing))

    def saved_one(self) -> None:
        """A state was begun: the clock starts anew, and a wish for one is met."""
        self.saved = time.monotonic()
        if self.save_now:
            with suppress(OSError):  # a volume that fails must not end a training; it saves again instead
                self.folder.save_now.unlink(missing_ok=True)
            self.save_now = False

    def rest(self) -> bool:
        """Waits while the file asks for it; whether a stop ended the wait."""
        while True:
            self._look()
            self.world.place.move()
            stop, pause = self.world.any(self.world.stop_requested, self.pause)
            if stop or not pause:
                return stop
            time.sleep(GLANCE / 4)

    def _due(self, step: int) -> bool:
        kind, number = self.interval
        if kind == "minutes":
            return False
        return step % (number * (self.steps_per_epoch if kind == "epochs" else 1)) == 0

    def _time_is_up(self) -> bool:
        kind, number = self.interval
        return kind == "minutes" and time.monotonic() - self.saved >= 60 * number

    def _look(self) -> None:
        now = time.monotonic()
        if self.world.leads and now - self.looked >= GLANCE:
            self.looked = now
            self.save_now, self.pause = _there(self.folder.save_now), _there(self.folder.pause)


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a volume that hangs or fails must not end a training
        return False
