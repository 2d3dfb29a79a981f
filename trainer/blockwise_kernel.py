"""The GPU kernel of ``Blockwise``: gradient, weight and states are read once, stepped, rounded, and written once.

Imported only where there is a GPU. What it replaces passed over memory three times: float32 copies of weight and
gradient, bitsandbytes' kernel, and the rounding back.

An 8-bit state is bitsandbytes' dynamic code (Dettmers et al. 2022, arXiv:2110.02861, section 2.2), one scale per block
of 256. Its tables need not be looked up. Let p be a code's place above zero, counted from 1. Decade i holds the places
from 2**i to 2**(i+1) - 1, the centres of as many equal parts of [0.1, 1) * 10**(i-6): binary exponent and mantissa of
the float p + 1/2 are the decade and the place in it. Codes without sign have twice as many parts, and p starts one
lower: both are told by ``extra``, 0 with a sign and 1 without. The last place of all is 1 itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trainer.rounding_kernel import hashed, random_bits

BLOCK = 256  # elements that share one scale
ROWS = 4  # blocks per program, one a warp: eight elements a thread


@triton.jit
def _exp2(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sqrt(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _quotient(x, y):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _decoded(place, extra: tl.constexpr):  # type: ignore[no-untyped-def]
    """The value of a place above zero: [0, 1]."""
    # A number below 2**23 put into the lowest bits of the float 2**23 is converted by a subtraction.
    number = (place | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 - 0.5 - extra)
    bits = number.to(tl.int32, bitcast=True)
    above = ((bits >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 133 + extra)  # decade - 6
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    value = tl.minimum((0.9 * mantissa - 0.8) * _exp2(above * 3.3219280948873623), 1.0)  # the last place is 1 itself
    return tl.where(place == 0, 0.0, value)


@triton.jit
def _encoded(value, extra: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of the nearest code, for a value of [0, 1].

    A decade's first centre lies further above its border than the last centre of the decade before lies below it: that
    one is nearest for the first fifth of the first part. (Between the last centre and 1, the nearer is not sought.)
    """
    # Added to 1.5 * 2**23, a number is rounded and stands in the sum's lowest bits; less one half before, it is floor.
    whole = tl.maximum(_log2(value) * 0.30102999566398120 + 6.49999, 0.0) + 12582912.0
    decade = whole - 12582912.0
    parts = ((whole.to(tl.int32, bitcast=True) + (127 + extra)) << 23).to(tl.float32, bitcast=True)
    # (value * 10**(6 - decade) - 0.1) * parts / 0.9 - 0.5, with the factors of value as one power of two
    stretch = _exp2(decade * (1 - 3.3219280948873623) + (6 * 3.3219280948873623 + extra + 0.15200309344504997))
    inside = value * stretch + (parts * (-1 / 9) - 0.5)
    place = tl.where(inside < -0.3, -1.0, inside) + (parts + (12582912.0 - extra))
    return place.to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _load_state(state, scales, offsets, blocks, inside, real, signed: tl.constexpr, eight_bit: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(state + offsets, mask=inside, other=0)
    if eight_bit:
        code = value.to(tl.int32)
        if signed:
            value = _decoded(tl.abs(code - 127), 0)
            value = tl.where(code < 127, -value, value)
        else:
            value = _decoded(code, 1)
        value *= tl.load(scales + blocks, mask=real, other=0.0)
    return value


@triton.jit
def _store_state(value, scale, state, offsets, kept, signed: tl.constexpr, eight_bit: tl.constexpr):  # type: ignore[no-untyped-def]
    if eight_bit:
        relative = tl.abs(value) * (1 / tl.maximum(scale, 1e-30))
        if signed:
            place = _encoded(relative, 0)
            code = 127 + tl.where(value < 0, -tl.minimum(place, 127), place)  # there is no code for -1
        else:
            code = _encoded(relative, 1)
        tl.store(state + offsets, code.to(tl.uint8), mask=kept)
    else:
        tl.store(state + offsets, value, mask=kept)


@triton.jit
def _largest(value):  # type: ignore[no-untyped-def]
    """The largest magnitude of each row; not finite where one is not (as integers, NaN is above infinity)."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _store_weight(  # type: ignore[no-untyped-def]
    value, weight, offsets, pairs, kept, first, key_1, key_2, stochastic: tl.constexpr, even: tl.constexpr
):
    if stochastic:  # as rounding_kernel does; a NaN never comes here
        if even:  # a hash serves two neighbours
            random = hashed(pairs + (first >> 1), key_1, key_2)
            random = tl.interleave(random & 0xFFFF, random >> 16)
        else:
            random = random_bits(offsets + first, key_1, key_2)
        bits = (value.to(tl.uint32, bitcast=True) + random) >> 16
        value = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(weight + offsets, value, mask=kept)


@triton.jit(do_not_specialize=["first", "key_1", "key_2"])
def _step(  # type: ignore[no-untyped-def]
    weight, gradient, one, two, scales_one, scales_two, go, skipped, count, first, key_1, key_2,
    learning_rate, beta1, beta2, eps, decay, step_size, root_correction,
    adam: tl.constexpr, eight_bit: tl.constexpr, stochastic: tl.constexpr, even: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    offsets = blocks * block + tl.arange(0, block)[None, :]
    inside, real = offsets < count, blocks * block < count
    g = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    m = _load_state(one, scales_one, offsets, blocks, inside, real, True, eight_bit)
    if adam:
        v = _load_state(two, scales_two, offsets, blocks, inside, real, False, eight_bit)
        m = m * beta1 + (1 - beta1) * g
        v = v * beta2 + (1 - beta2) * g * g
        w = w * (1 - decay) - _quotient(step_size * m, _sqrt(v) + root_correction * eps)
        second = _largest(v)
    else:
        move = m * beta1 + (1 - beta1) * g
        w = w * (1 - decay) - learning_rate * tl.where(move > 0, 1.0, tl.where(move < 0, -1.0, 0.0))
        m = m * beta2 + (1 - beta2) * g
        second = tl.zeros_like(blocks).to(tl.float32)
    scale = _largest(m)
    whole = (scale < float("inf")) & (second < float("inf"))
    tl.atomic_add(skipped + tl.zeros_like(blocks), 1, mask=whole == 0, sem="relaxed")
    whole = whole & real & (tl.load(go + tl.zeros_like(blocks)) > 0)
    kept = inside & whole
    if adam:
        _store_state(v, second, two, offsets, kept, False, eight_bit)
        if eight_bit:
            tl.store(scales_two + blocks, second, mask=whole)
    _store_state(m, scale, one, offsets, kept, True, eight_bit)
    if eight_bit:
        tl.store(scales_one + blocks, scale, mask=whole)
    pairs = blocks * (block // 2) + tl.arange(0, block // 2)[None, :]
    _store_weight(w, weight, offsets, pairs, kept, first, key_1, key_2, stochastic, even)


def step_on_gpu(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: dict[str, torch.Tensor],
    go: torch.Tensor,
    skipped: torch.Tensor,
    *,
    first: int,
    keys: tuple[int, int],
    adam: bool,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Steps ``weight`` (bf16, rounded stochastically, or float32) and its ``states`` in place.

    All contiguous, all of one shape; ``step`` counts from 1. A block of 256 with a gradient that is not finite stays as
    it is and is counted in ``skipped`` (int32 scalar); all stay where ``go`` (float32 scalar) is 0.
    """
    one, two = states["state1"], states.get("state2", states["state1"])
    eight_bit = one.dtype == torch.uint8
    scales = (states["state1.absmax"], states.get("state2.absmax", one)) if eight_bit else (one, one)
    count = weight.numel()
    correction = (1 - betas[1] ** step) ** 0.5
    _step[(triton.cdiv(count, ROWS * BLOCK),)](
        weight, gradient, one, two, *scales, go, skipped, count, first, *keys,
        learning_rate, *betas, eps, learning_rate * weight_decay,
        learning_rate * correction / (1 - betas[0] ** step), correction,
        adam=adam, eight_bit=eight_bit, stochastic=weight.dtype == torch.bfloat16, even=first % 2 == 0,
        rows=ROWS, block=BLOCK,
    )  # fmt: skip
