"""Random numbers that are looked up, not drawn in turn.

Each number is a function of (seed, what it is for, step, place in the global step): Philox, a counter-based generator
(Salmon et al. 2011), on the CPU. So noise and noise levels are the same on any card and any number of GPUs, a restart
needs no generator state, and drawing one thing never shifts another.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """What a number is for. The values are part of every run's result: never renumber, only add."""

    NOISE = 1
    NOISE_LEVEL = 2
    LATENT = 3
    CAPTION_DROPOUT = 4
    ADAPTER = 5


def draw(seed: int, use: Use, step: int, place: int) -> np.random.Generator:
    """The numbers for one image: ``step`` counts optimizer updates from 0, ``place`` images within the global step."""
    return np.random.Generator(np.random.Philox(key=[seed, int(use)], counter=[0, 0, place, step]))


def hash_keys(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two signed 32-bit keys for hashing the indices of one tensor at one step (see rounding.py)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def name_key(name: str) -> int:
    """A tensor's name as a counter word (63 bits)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
