"""Stochastic rounding of float32 to bfloat16.

A bf16 weight of 1.0 cannot move by 1e-3: round-to-nearest puts it back for ever. Rounding up with a probability equal
to the remainder makes small updates arrive on average. The random bits are a hash of (seed, step, tensor, logical
index), so a shard, on any number of GPUs, rounds exactly as the whole tensor would. One hash of 32 bits serves two
neighbours.
"""

from __future__ import annotations

import torch

from trainer.randomness import hash_keys

CACHED = 1 << 16  # weights at a time on a CPU: what its cache holds; all at once takes twice as long


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


# The multipliers and shifts of lowbias32, the 32-bit mixer with the least bias found by Wellons' search
# (https://nullprogram.com/blog/2018/07/31/), here in signed arithmetic, which wraps the same way.
_MULTIPLY_1, _MULTIPLY_2 = _signed(0x7FEB352D), _signed(0x846CA68B)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MULTIPLY_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MULTIPLY_2
    return x ^ ((x >> 16) & 0xFFFF)


def _round(source: torch.Tensor, first: int, key_1: int, key_2: int) -> torch.Tensor:
    behind = first & 1  # how many bits of the first hash belong to the neighbour before
    count = source.numel()
    pair = torch.arange(first >> 1, (first + count + 1) >> 1, dtype=torch.int32, device=source.device)
    halves = _mix(_mix(pair ^ key_1) + key_2).view(torch.int16)  # the lower one first, as every host we run on has them
    bits = (halves[behind : behind + count].to(torch.int32) & 0xFFFF).view(source.shape)
    rounded = ((source.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    # CUDA's own NaN is 0x7fffffff, which any carry turns into minus zero: a broken weight would pass for a whole one.
    return torch.where(source.isnan(), source, rounded).to(torch.bfloat16)


def round_stochastically(source: torch.Tensor, name: str, *, seed: int, step: int, first: int) -> torch.Tensor:
    """``source`` (float32, contiguous, any shape) in bfloat16; ``first`` is the logical index of its first element.

    A value lands on one of its two bf16 neighbours, on the further with the lesser probability, in steps of 2**-16.
    """
    keys = hash_keys(seed, step, name)
    if source.device.type == "cuda":
        from trainer.rounding_kernel import round_on_gpu  # Triton comes with torch's CUDA builds alone

        return round_on_gpu(source, first, *keys)
    flat = source.reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    for start in range(0, flat.numel(), CACHED):
        part = slice(start, start + CACHED)
        rounded[part] = _round(flat[part], first + start, *keys)
    return rounded.view(source.shape)
