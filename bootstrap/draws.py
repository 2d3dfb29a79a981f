"""Random numbers that are looked up, not drawn in turn.

Each number is a function of (seed, what it is for, step, place in the global step): Philox, a counter-based generator
(Salmon et al. 2011), on the CPU. So noise, captions and crops are the same on any card and any number of GPUs, a
restart needs no generator state, drawing one thing never shifts another, and what a run will see is known before it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """What a number is for. The values are part of every run's result: never renumber, only add."""

    NOISE = 1
    NOISE_LEVEL = 2
    LATENT = 3
    CAPTION_DROPOUT = 4
    ADAPTER = 5
    CAPTION = 6
    CROP = 7
    VALIDATION_LEVEL = 8
    ADAPTER_DROPOUT = 9


def draw(seed: int, use: Use, step: int, place: int) -> np.random.Generator:
    """The numbers for one image: ``step`` counts optimizer updates from 0, ``place`` images within the global step."""
    return np.random.Generator(np.random.Philox(key=[seed, int(use)], counter=[0, 0, place, step]))


def draw_of(digest: str, use: Use, level: int = 0) -> np.random.Generator:
    """The numbers for a picture of validation, by its sha256, and one of its noise levels: the same at every step, and
    in every run."""
    return np.random.Generator(np.random.Philox(key=int(digest[:32], 16), counter=[0, 0, level, int(use)]))
