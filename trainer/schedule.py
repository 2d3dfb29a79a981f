"""Learning rates as a function of the step alone, so that neither the GPU count nor a restart can bend the curve."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from jobs.problem import JobError, Problem
from jobs.schema import Job

Schedule = Callable[[int], float]
"""From a step (0 is the first) to the factor on the learning rate."""


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float, *, end: float = 0.0) -> float:
    return 1 - (1 - end) * progress


def _cosine(progress: float, *, end: float = 0.0) -> float:
    return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


def _cosine_with_restarts(progress: float, *, cycles: int = 3, end: float = 0.0) -> float:
    return _cosine(progress * cycles % 1.0 if progress < 1 else 1.0, end=end)


def _polynomial(progress: float, *, power: float = 2.0, end: float = 0.0) -> float:
    return end + (1 - end) * (1 - progress) ** power


SHAPES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
}


def imported(path: str, key: str) -> Any:
    """What an import path names. Raises JobError, naming the job's ``key``, where it leads nowhere."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        remedy = "Check the spelling; your own modules go into python/ on the volume"
        raise JobError([Problem(f"{path} cannot be imported ({error})", remedy, key=key)]) from error


def make_schedule(job: Job, steps: int) -> Schedule:
    """The factor at each of ``steps`` steps: a linear rise over ``warmup`` steps, then the named shape.

    The first step of a warm-up of w trains at 1/w, the w-th at 1. A shape by import path is called as
    ``shape(progress, **schedule_args)``; progress is 0 at the end of warm-up and would be 1 one step after the last, so
    that no step trains at nothing. Raises JobError where it does not take the arguments.
    """
    shape = SHAPES.get(job.schedule) or imported(job.schedule, "schedule")

    def factor(step: int) -> float:
        if step < job.warmup:
            return (step + 1) / job.warmup
        progress = (step - job.warmup) / max(1, steps - job.warmup)
        return float(shape(min(1.0, progress), **job.schedule_args))

    try:
        for step in (min(job.warmup, steps - 1), steps - 1):  # where the shape begins and ends
            factor(step)
    except (TypeError, ValueError) as error:
        told = f"{job.schedule} does not work with these ({error})"
        raise JobError([Problem(told, "Check schedule_args", key="schedule_args")]) from error
    return factor
