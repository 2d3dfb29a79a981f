"""In which order pictures are seen, and which process takes which of a step's pictures. Pure.

The order is drawn from (seed, epoch) alone; the sharing out depends on the step and the number of processes alone. So
the same pictures meet in the same step on any number of GPUs, and every picture is seen exactly its repeats per epoch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

Step = tuple[int, ...]  # indices of items, one for each place in the global step

_ORDER = 0x6F72646572 << 16  # keeps this use of Philox apart from the others' keys (randomness.py)


class Ordered(Protocol):
    """What an item must tell (bootstrap.dataset.Item does)."""

    @property
    def bucket(self) -> tuple[int, int]: ...

    @property
    def repeats(self) -> int: ...


@dataclass(frozen=True)
class Pass:
    """What one process takes in one forward and backward: pictures of one bucket."""

    bucket: tuple[int, int]
    places: tuple[int, ...]  # in the global step: noise and noise level hang on them
    items: tuple[int, ...]  # indices, one for each place


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


def share_out(
    step: Step, buckets: Sequence[tuple[int, int]], processes: int, images_per_pass: int
) -> list[list[Pass | None]]:
    """For each pass, for each process, what it takes; None is a dummy, where a process has nothing left to do.

    ``buckets`` holds each item's bucket. There are as few passes as can be; within that, the largest share of each pass
    (what all wait for) is kept small, then the processes' totals are kept alike.
    """
    assert step
    by_bucket: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, item in enumerate(step):
        by_bucket[buckets[item]].append(place)
    parts = {bucket: -(-len(places) // images_per_pass) for bucket, places in sorted(by_bucket.items())}
    passes = -(-sum(parts.values()) // processes)

    def largest(bucket: tuple[int, int]) -> int:
        return -(-len(by_bucket[bucket]) // parts[bucket]) * bucket[0] * bucket[1]

    for _ in range(passes * processes - sum(parts.values())):
        divisible = [bucket for bucket in parts if parts[bucket] < len(by_bucket[bucket])]
        if not divisible:
            break
        parts[max(divisible, key=largest)] += 1
    shares = [
        Pass(bucket, tuple(places), tuple(step[place] for place in places))
        for bucket, count in parts.items()
        for places in _split(by_bucket[bucket], count)
    ]
    shares.sort(key=_pixels, reverse=True)  # stable: the order of buckets and places decides between equals
    load = [0] * processes
    result: list[list[Pass | None]] = []
    for first in range(0, len(shares), processes):
        taken: list[Pass | None] = [None] * processes
        free = sorted(range(processes), key=lambda process: (load[process], process))
        for share, process in zip(shares[first : first + processes], free, strict=False):
            taken[process] = share
            load[process] += _pixels(share)
        result.append(taken)
    return result


def _pixels(share: Pass) -> int:
    return len(share.places) * share.bucket[0] * share.bucket[1]


def _split(places: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Consecutive parts as equal as can be, the larger ones first."""
    size, larger = divmod(len(places), parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + size + (part < larger))
    return [places[start:end] for start, end in pairwise(ends)]
