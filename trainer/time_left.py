"""How long the rest of a run will take: its steps by what those so far took, and its samples, rounds of validation and
saves by the last ones, or, before the first, by a guess.

Compiling is left out of what was measured: it comes once for each size. A step is taken to cost something for itself
and something for each of its pixels, since one of 1024 px takes two to five times as long as one of 512 (the update and
the captions cost the same), and the first twentieth of a run has seen more of one than of the other.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Literal

from bootstrap.estimate import VOLUME_SPEED
from bootstrap.run_file import RunFile

Pause = Literal["samples", "validation", "save", "last save"]

STEPS = 300  # the newest, which are asked
LEAST = 3  # steps before which nothing is said
UNUSUAL = 3.0  # times the usual: a hiccup, or what comes once only, such as choosing kernels


class TimeLeft:
    """Is told what each step and each pause took. ``pixels``: of all images of each step of the run."""

    def __init__(self, run: RunFile, pixels: Iterable[int], tried: int, save: float):
        """``tried``: images that one process takes in a round of validation. ``save``: a guess of the seconds that
        training stands still for one."""
        self.run, self.tried = run, tried
        self.done = [0, *accumulate(pixels)]  # pixels before each step
        self.steps: deque[tuple[float, float]] = deque(maxlen=STEPS)  # seconds and pixels
        self.paused: dict[Pause, float] = {"save": save, "last save": max(save, run.plan.state_bytes / VOLUME_SPEED)}

    def step(self, seconds: float, pixels: float) -> None:
        self.steps.append((seconds, pixels))

    def pause(self, kind: Pause, seconds: float) -> None:
        self.paused[kind] = seconds

    def after(self, step: int) -> float | None:
        """Seconds to the end of the run, ``step`` updates being done, and not yet what is due after them; None while
        too little is known."""
        pace = self._pace()
        if pace is None:
            return None
        a_step, a_pixel = pace
        training = a_step * (self.run.plan.steps - step) + a_pixel * (self.done[-1] - self.done[step])
        counts, usual = self._pauses(step, training), a_pixel + a_step * self.run.plan.steps / self.done[-1]
        return training + sum(count * self._cost(kind, usual) for kind, count in counts.items()) - self._beside(usual)

    def _beside(self, usual: float) -> float:
        """Seconds of the run's end that are counted twice: its last samples are drawn while its last state is written,
        but for as long as training stands still for that."""
        if not self.run.job.sample.prompts:
            return 0.0
        written = max(0.0, self.paused["last save"] - self.paused["save"])
        return min(written, self._cost("samples", usual))

    def _pace(self) -> tuple[float, float] | None:
        """Seconds a step, and seconds a pixel beside it: the straight line of least squares, neither below zero."""
        if len(self.steps) < LEAST:
            return None
        a_pixel = statistics.median(seconds / pixels for seconds, pixels in self.steps)
        a_step = statistics.median(seconds for seconds, _ in self.steps)
        counted = [each for each in self.steps if each[0] <= UNUSUAL * max(a_step, a_pixel * each[1])]
        seconds, pixels = (statistics.fmean(each) for each in zip(*counted, strict=True))
        spread = sum((each - pixels) ** 2 for _, each in counted)
        together = sum((took - seconds) * (each - pixels) for took, each in counted)
        a_pixel = min(max(0.0, together / spread), seconds / pixels) if spread else seconds / pixels
        return seconds - a_pixel * pixels, a_pixel

    def _pauses(self, step: int, training: float) -> dict[Pause, int]:
        """Of each kind, how many are still to come."""
        job, plan = self.run.job, self.run.plan
        last = plan.steps
        counts: dict[Pause, int] = {"last save": 1}
        kind, number = job.save.interval
        every = number * (plan.steps_per_epoch if kind == "epochs" else 1)
        by_steps = kind != "minutes"
        counts["save"] = multiples(every, step - 1, last) if by_steps else int(training / (60 * number))
        if job.sample.prompts:
            counts["samples"] = multiples(job.sample.every, step - 1, last) + 1
        if validation := job.validation:
            counts["validation"] = multiples(validation.every, step - 1, last) + 1
            if validation.keeps_best:  # before every save, too
                both = multiples(math.lcm(validation.every, every), step - 1, last) if by_steps else 0
                counts["validation"] += counts["save"] - both
        return counts

    def _cost(self, kind: Pause, pace: float) -> float:
        """Seconds of one, the last one's where there was any; else guessed by its forward passes, each a share of a
        step's forward and backward pass."""
        if kind in self.paused:
            return self.paused[kind]
        job, plan = self.run.job, self.run.plan
        again = plan.checkpointed_blocks / self.run.weights.shape.blocks
        forward = pace * plan.processes / (1 + (1.2 if job.lora else 2) + again)  # seconds a pixel
        if kind == "validation":
            return forward * self.tried * self.done[-1] / (plan.steps * job.images_per_step)
        drawings = job.sample.drawings
        total = sum(drawing.width * drawing.height * drawing.steps for drawing in drawings)
        return forward * total / len(drawings) * math.ceil(len(drawings) / plan.processes)


def multiples(of: int, first: int, last: int) -> int:
    """How many lie between ``first`` and ``last``, neither counted."""
    return max(0, (last - 1) // of - first // of)


def compiling_seconds() -> float:
    """What this process has spent on compiling so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # slow to load, and loaded where anything was compiled
    spent: Callable[[], dict[str, float]] | None = getattr(dynamo, "calculate_time_spent", None)
    return spent().get("total_wall_time", 0.0) if spent else 0.0
