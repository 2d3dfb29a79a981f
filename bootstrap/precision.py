"""The number formats in which a frozen base can lie in memory, which of its tensors do, and the bytes they take.

Only matrices inside the blocks are quantised: 11.83 of FLUX.1-dev's 11.90 billion parameters. What stays bf16 is the
first and last layers, through which every number of the input and output goes, with norms and biases: 0.12 GiB. The
modulation (3.2 billion parameters, 6 GiB in bf16) is quantised too, or no 12 GB card would hold the rest.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Literal

from bootstrap.flux_shape import FluxShape
from jobs.values import BASE_PRECISIONS

Precision = Literal["bf16", "int8", "fp8", "nf4"]
BF16 = 2  # bytes
NF4_BLOCK = 64  # weights of a row that share one scale; int8 and fp8 have one for a row
# ||quantised - weight|| / ||weight|| of normally distributed weights in rows of 3072 (tests/trainer/test_quantised.py).
ERRORS = {"bf16": 0.0, "int8": 0.009, "fp8": 0.026, "nf4": 0.092}
FAITHFULNESS = {name: rank for rank, name in enumerate(BASE_PRECISIONS)}
MOST_FAITHFUL: tuple[Precision, ...] = ("bf16", "int8", "nf4")  # for their size: fp8 takes as much memory as int8
_BLOCK = re.compile(r"(single_)?transformer_blocks\.\d+\..+\.weight")
_VALUES_PER_BYTE = {"int8": 1, "fp8": 1, "nf4": 2}


@lru_cache(maxsize=8)
def quantised_tensors(shape: FluxShape) -> dict[str, tuple[int, int]]:
    """The tensors that are quantised where a base is not bf16, by diffusers' names, with their (rows, columns)."""
    return {
        name: (size[0], size[1])
        for name, size in shape.tensors().items()
        if len(size) == 2 and _BLOCK.fullmatch(name) and size[1] % NF4_BLOCK == 0
    }


@lru_cache(maxsize=32)
def base_bytes(shape: FluxShape, precision: Precision) -> int:
    """Of a whole base in memory, codes and scales. FLUX.1-dev: bf16 22.2 GiB, int8 and fp8 11.2, nf4 6.0."""
    everything = BF16 * shape.parameters()
    if precision == "bf16":
        return everything
    sizes = quantised_tensors(shape).values()
    codes = sum(math.prod(size) for size in sizes) // _VALUES_PER_BYTE[precision]
    scales = BF16 * sum(rows * scales_per_row(columns, precision) for rows, columns in sizes)
    return everything - BF16 * sum(math.prod(size) for size in sizes) + codes + scales


def scales_per_row(columns: int, precision: Precision) -> int:
    return columns // NF4_BLOCK if precision == "nf4" else 1


@lru_cache(maxsize=32)
def unpacked_bytes(shape: FluxShape, precision: Precision) -> int:
    """Of the largest quantised matrix in bf16: what a product takes beside the base, one at a time."""
    if precision == "bf16":
        return 0
    return BF16 * max(math.prod(size) for size in quantised_tensors(shape).values())
