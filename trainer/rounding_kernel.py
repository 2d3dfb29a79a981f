"""The GPU kernel of ``round_stochastically``: one pass over memory. Imported only where there is a GPU.

Inductor computes with 64-bit keys and cannot compile the bit casts of the plain version (torch 2.11), hence by hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hashed(pair, key_1, key_2):  # type: ignore[no-untyped-def]
    """32 random bits for a pair of neighbouring elements."""
    return mix(mix(pair.to(tl.uint32) ^ key_1.to(tl.uint32)) + key_2.to(tl.uint32))


@triton.jit
def random_bits(index, key_1, key_2):  # type: ignore[no-untyped-def]
    """16 random bits for each logical index."""
    bits = hashed(index >> 1, key_1, key_2)
    return tl.where((index & 1) > 0, bits >> 16, bits & 0xFFFF)


@triton.jit(do_not_specialize=["count", "first", "key_1", "key_2"])
def _round(source, target, count, first, key_1, key_2, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < count
    value = tl.load(source + offsets, mask=inside, other=0.0)
    bits = value.to(tl.uint32, bitcast=True)
    rounded = ((bits + random_bits(offsets + first, key_1, key_2)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    rounded = tl.where(value == value, rounded, value.to(tl.bfloat16))  # a carry would turn a NaN into minus zero
    tl.store(target + offsets, rounded, mask=inside)


def round_on_gpu(source: torch.Tensor, first: int, key_1: int, key_2: int) -> torch.Tensor:
    """``source`` (float32, contiguous) in bfloat16, bit for bit as the plain version on the CPU."""
    target = torch.empty_like(source, dtype=torch.bfloat16)
    count = source.numel()
    _round[(triton.cdiv(count, BLOCK),)](source, target, count, first, key_1, key_2, block=BLOCK)
    return target
