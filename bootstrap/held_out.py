"""Which pictures are kept from training to try the model on. Pure.

Whether a picture is held out is decided by its own bytes, so it stays so whatever is added, removed or renamed, on any
machine: a picture that was trained on is never held out later. The same picture in two folders, or at two sizes, is
held out in all of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol, TypeVar


class HeldOut(Protocol):
    """What an item must tell (bootstrap.dataset.Item does)."""

    @property
    def path(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def bucket(self) -> tuple[int, int]: ...


P = TypeVar("P", bound=HeldOut)


def chance(digest: str) -> float:
    """Of a picture, from its sha256: the same for ever, and spread evenly over 0 to 1."""
    salted = hashlib.sha256(f"held out {digest}".encode()).digest()
    return int.from_bytes(salted[:8]) / 2**64


def held_out(digests: Iterable[str], fraction: float) -> frozenset[str]:
    """Of pictures, by their sha256, those to hold out: about ``fraction`` of them, and one at least.

    The one is that of the least chance: with more pictures it can only give way to a new one.
    """
    every = set(digests)
    found = frozenset(digest for digest in every if chance(digest) < fraction)
    return found or frozenset(sorted(every, key=lambda digest: (chance(digest), digest))[:1])


def tried(items: Iterable[P], most: int) -> tuple[P, ...]:
    """Of what is held out, at most ``most`` images: one of each bucket first, then of each as large a share as it has.
    Sorted by bucket, and in it by chance."""
    buckets: dict[tuple[int, int], dict[str, P]] = defaultdict(dict)
    for item in sorted(items, key=lambda item: (chance(item.digest), item.digest, item.path)):
        buckets[item.bucket].setdefault(item.digest, item)
    placed = [
        (place / len(found), bucket, place, item)
        for bucket, found in buckets.items()
        for place, item in enumerate(found.values())
    ]
    chosen = sorted(placed, key=lambda each: each[:3])[:most]
    return tuple(item for *_, item in sorted(chosen, key=lambda each: each[1:3]))
