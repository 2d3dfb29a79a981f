"""Work on the processor in place of a GPU: its threads, and quick products of bfloat16 where it has none of its own.

Without instructions for bfloat16 (AVX-512 or AMX; AMD has them from Zen 4, Intel's desktops mostly lack them) torch
multiplies in a scalar loop on one core. On an AMD Zen 3 a product of 768 x 512 x 512 ran at 1.3 GFLOP/s, in float32 at
55 on one core and at 110 on two; flux-tiny trained at 1.3 images/s, and one prompt through T5-XXL, 4.8 TFLOP, would
have taken an hour.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_slow_conv2d_forward")  # attention's forward is quick as it is


def use_processor(threads: int) -> torch.device:
    """The CPU as this process's device, with so many threads."""
    torch.set_num_threads(max(1, threads))
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        multiply_in_float32()
    return torch.device("cpu")


@cache
def multiply_in_float32() -> torch.library.Library:
    """From now on this process forms products of bfloat16 on the CPU in float32 and rounds them once, as the
    instructions do. What is returned holds them there; it lives as long as the process."""
    products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that one is registered anew
        for name in PRODUCTS:
            plain = torch.library.get_kernel(f"aten::{name}", "CPU")
            products.impl(name, _rounded_once(plain), "CPU", with_keyset=True)
    return products


def _rounded_once(plain: Any) -> Callable[..., torch.Tensor]:
    """``plain``, a kernel of torch's, by way of float32 where it is given bfloat16."""

    def product(keys: Any, *operands: Any, **factors: Any) -> torch.Tensor:
        if any(operand.dtype is not torch.bfloat16 for operand in operands if isinstance(operand, torch.Tensor)):
            return plain.call_boxed(keys, *operands, **factors)  # of mixed types too: it says what is wrong with them
        wide = (operand.float() if isinstance(operand, torch.Tensor) else operand for operand in operands)
        return plain.call_boxed(keys, *wide, **factors).bfloat16()

    return product
