"""In which order pictures are seen. Pure.

The order is drawn from (seed, epoch) alone, so the same pictures meet in the same step on any number of GPUs, and every
picture is seen exactly its repeats per epoch. How a step is shared out is another matter (trainer/order.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from jobs.schema import Job

Step = tuple[int, ...]  # indices of items, one for each place in the global step

_ORDER = 0x6F72646572 << 16  # keeps this use of Philox apart from the others' keys (draws.py)


class Ordered(Protocol):
    """What an item must tell (bootstrap.dataset.Item does)."""

    @property
    def bucket(self) -> tuple[int, int]: ...

    @property
    def repeats(self) -> int: ...


def epoch_order(items: Sequence[Ordered], seed: int, epoch: int, images_per_step: int, mix: bool) -> list[Step]:
    """The steps of one epoch, which together hold every item exactly ``repeats`` times.

    As many steps as can be are of one bucket, and no picture is dropped because its bucket is small. With ``mix`` what
    is left over in the buckets is joined to steps of several, and at most the epoch's last step is smaller. Without,
    each bucket's rest is a smaller step of its own, so that every step can be one pass: a full model on one card has no
    room to keep gradients between passes. The trainer weighs a smaller step by its images.
    """
    # Raw numbers, not Generator.permutation: numpy keeps the former from version to version, not the latter.
    source = np.random.Philox(key=[seed, _ORDER + epoch])

    def shuffled(count: int) -> list[int]:
        order: list[int] = np.argsort(source.random_raw(count), kind="stable").tolist()
        return order

    by_bucket: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        by_bucket[item.bucket] += [index] * item.repeats
    buckets = sorted(by_bucket)
    steps: list[Step] = []
    left_over: list[list[int]] = []
    for bucket in buckets:
        members = by_bucket[bucket]
        members = [members[place] for place in shuffled(len(members))]
        whole = len(members) // images_per_step * images_per_step
        steps += [tuple(members[i : i + images_per_step]) for i in range(0, whole, images_per_step)]
        left_over.append(members[whole:])
    if not mix:
        steps += [tuple(rest) for rest in left_over if rest]
        return [steps[place] for place in shuffled(len(steps))]
    # Bucket by bucket, in an order of its own each epoch: a mixed step then holds few buckets and takes few passes.
    rest = [index for place in shuffled(len(left_over)) for index in left_over[place]]
    whole = len(rest) // images_per_step * images_per_step
    steps += [tuple(rest[i : i + images_per_step]) for i in range(0, whole, images_per_step)]
    steps = [steps[place] for place in shuffled(len(steps))]
    if rest[whole:]:
        steps.append(tuple(rest[whole:]))
    return steps


class StepOrder:
    """The items of every step of a run, looked up by the step's number."""

    def __init__(self, items: Sequence[Ordered], job: Job, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._epoch = lru_cache(maxsize=2)(
            lambda epoch: epoch_order(items, job.seed, epoch, job.images_per_step, job.mixes_buckets)
        )

    def step(self, index: int) -> Step:
        """The items of global step ``index``, counted from 0 over all epochs."""
        epoch, place = divmod(index, self.steps_per_epoch)
        return self._epoch(epoch)[place]
