"""Settings that will hurt, as far as only the pictures or the base's tensors tell; those that the job alone tells are
in ``jobs.rules``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from bootstrap.flux_shape import FluxShape
from jobs.problem import Problem
from jobs.rules import SCHNELL_ASSISTANT
from jobs.schema import Job

if TYPE_CHECKING:
    from bootstrap.dataset import Item  # what reads pictures loads slowly

TOLERANCE = 0.95  # of a resolution: a side that is a little short is cropped or enlarged without harm
MANY = 1 / 3  # of the pictures of a dataset


def doubts_of_pictures(job: Job, items: Iterable[Item]) -> list[Problem]:
    """A resolution that many pictures of a dataset do not have."""
    sides: dict[int, dict[str, float]] = {}
    for item in items:
        sides.setdefault(item.dataset, {})[item.digest] = math.sqrt(item.width * item.height)
    found = []
    for index, pictures in sides.items():
        entry = job.datasets[index]
        own = entry.resolutions
        largest = max(own or job.resolutions)
        small = [side for side in pictures.values() if side < TOLERANCE * largest]
        if len(small) <= MANY * len(pictures):
            continue
        fate = "are enlarged to it, which teaches blur" if job.upscale else "are trained at their own size, not at this"
        told = f"{len(small)} of the {len(pictures)} pictures of {entry.path} are smaller than {largest} px and {fate}"
        fitting = max(64, int(median(small)) // 64 * 64)
        remedy = f"Write {fitting}, or a list of sizes up to it, or use larger pictures"
        found.append(Problem(told, remedy, f"datasets[{index}].resolution" if own else "resolution"))
    return found


def doubts_of_base(job: Job, shape: FluxShape) -> list[Problem]:
    """A base that has no guidance, as schnell, and is not called so: whether it is distilled, no tensor tells."""
    if shape.guidance or job.assistant_lora or "schnell" in job.base.lower():
        return []
    told = (
        "has no guidance, as FLUX.1-schnell. If it is distilled like that one, it unlearns within some hundred steps "
        "to draw in four"
    )
    return [Problem(told, f"Then add assistant_lora: {SCHNELL_ASSISTANT}", "base")]
