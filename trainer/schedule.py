"""Learning rates as a function of the step alone, so that neither the GPU count nor a restart can bend the curve."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

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


def imported(path: str) -> Any:
    """What an import path names. Raises ImportError or AttributeError."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def make_schedule(job: Job, steps: int) -> Schedule:
    """The factor at each of ``steps`` steps: a linear rise over ``warmup`` steps, then the named shape to the end.

    The first step of a warm-up of w trains at 1/w, the w-th at 1. A shape by import path is called as
    ``shape(progress, **schedule_args)`` with a progress from 0 at the end of warm-up to 1 at the last step.
    """
    shape = SHAPES.get(job.schedule) or imported(job.schedule)

    def factor(step: int) -> float:
        if step < job.warmup:
            return (step + 1) / job.warmup
        progress = (step - job.warmup) / max(1, steps - 1 - job.warmup)
        return float(shape(min(1.0, progress), **job.schedule_args))

    return factor
