"""Settings that will hurt, as far as only the pictures or the base's tensors tell; those that the job alone tells are
in ``jobs.rules``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from bootstrap.estimate import linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import adapters_of, target_layers
from bootstrap.volume import Volume
from jobs.problem import Problem
from jobs.rules import SCHNELL_ASSISTANT, strength_doubt
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
    """What only the base's tensors tell."""
    return [*_doubts_of_guidance(job, shape), *_doubts_of_strength(job, shape)]


def _doubts_of_strength(job: Job, shape: FluxShape) -> list[Problem]:
    """Entries of ``lora.layers`` whose layers end up very strong or weak: by a rank and an alpha from two of them, say.

    Told at the last entry that says something of such a layer.
    """
    lora = job.lora
    if lora is None:
        return []
    entries = [(n, entry) for n, entry in enumerate(lora.layers) if entry.rank is not None or entry.alpha is not None]
    found: dict[str, Problem] = {}
    for name, layer in adapters_of(linear_layers(shape), lora).items():
        number, entry = next(((n, e) for n, e in reversed(entries) if target_layers((name,), e.match)), (0, None))
        if entry and (told := strength_doubt(layer.scale, layer.rank, lora.rslora)):
            key = f"lora.layers[{number}].{'rank' if entry.alpha is None else 'alpha'}"
            found.setdefault(key, Problem(*told, key))
    return list(found.values())


def doubts_of_start(job: Job, volume: Volume) -> list[Problem]:
    """A LoRA to start from of which a part is left out. Raises TensorFileError."""
    from bootstrap.lora_file import left_out  # torch comes with it

    if job.lora is None or job.lora.start is None:
        return []
    told = left_out(volume.resolve(job.lora.start))
    remedy = "See in the samples of step 0 what the rest of it draws: text encoders are not trained here"
    return [Problem(told, remedy, "lora.start")] if told else []


def _doubts_of_guidance(job: Job, shape: FluxShape) -> list[Problem]:
    """A base that has no guidance, as schnell, and is not called so: whether it is distilled, no tensor tells."""
    if shape.guidance or job.assistant_lora or "schnell" in job.base.lower():
        return []
    told = (
        "has no guidance, as FLUX.1-schnell. If it is distilled like that one, it unlearns within some hundred steps "
        "to draw in four"
    )
    return [Problem(told, f"Then add assistant_lora: {SCHNELL_ASSISTANT}", "base")]
