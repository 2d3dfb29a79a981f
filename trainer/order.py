"""Which process takes which of a step's pictures. Pure.

The sharing out depends on the step and the number of processes alone; which pictures make a step (bootstrap/order.py)
depends on neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bootstrap.order import Step


@dataclass(frozen=True)
class Pass:
    """What one process takes in one forward and backward: pictures of one bucket."""

    bucket: tuple[int, int]
    places: tuple[int, ...]  # in the global step: noise and noise level hang on them
    items: tuple[int, ...]  # indices, one for each place


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
