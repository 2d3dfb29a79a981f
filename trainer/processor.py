"""Work on the processor in place of a GPU: its threads, and quick products of bfloat16 where it has none of its own.

Without instructions for bfloat16 (AVX-512 or AMX; AMD has them from Zen 4, Intel's desktops mostly lack them) torch
multiplies in a scalar loop on one core. On an AMD Zen 3 a product of 768 x 512 x 512 ran at 1.3 GFLOP/s, in float32 at
55 on one core and at 110 on two; flux-tiny trained at 1.3 images/s, in this way at 14.8, and one prompt through
T5-XXL, 4.8 TFLOP, would have taken an hour (computed).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import conv2d

Kernel = Callable[..., Any]  # its first argument is what torch dispatches by


def use_processor(threads: int | None = None) -> torch.device:
    """The CPU as this process's device, with so many threads (torch's own choice where none are given)."""
    if threads is not None:
        torch.set_num_threads(max(1, threads))
    if not multiplies_bf16():
        multiply_in_float32()
    return torch.device("cpu")


def multiplies_bf16() -> bool:
    """Whether torch has a quick way here: oneDNN's, with the instructions it wants."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiply_in_float32() -> torch.library.Library:
    """From now on this process forms products of bfloat16 on the CPU in float32 and rounds them once, as the
    instructions do. What is returned holds them there; it lives as long as the process."""
    products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that one is registered anew
        for name, by_way_of_float32 in PRODUCTS.items():
            plain = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            products.impl(name, by_way_of_float32(plain), "CPU", with_keyset=True)
    return products


def _matrices(plain: Kernel) -> Kernel:
    def product(keys: Any, *operands: torch.Tensor, **factors: float) -> torch.Tensor:
        if any(operand.dtype is not torch.bfloat16 for operand in operands):
            return plain(keys, *operands, **factors)  # of mixed types too: it says what is wrong with them
        return plain(keys, *map(torch.Tensor.float, operands), **factors).bfloat16()

    return product


def _convolution(plain: Kernel) -> Kernel:
    """torch comes here where oneDNN does not know the type; of float32 it has quicker ones than torch itself."""

    def product(
        keys: Any,
        pictures: torch.Tensor,
        weight: torch.Tensor,
        size: Sequence[int],
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
    ) -> torch.Tensor:
        if pictures.dtype is not torch.bfloat16:
            return plain(keys, pictures, weight, size, bias, stride, padding)
        return conv2d(_wide(pictures), _wide(weight), _wide(bias), stride, padding).bfloat16()

    return product


def _attention(plain: Kernel) -> Kernel:
    """Its gradients; forward is quick as it is."""

    def gradients(keys: Any, *operands: Any, attn_mask: torch.Tensor | None = None, **how: Any) -> Any:
        if operands[0].dtype is not torch.bfloat16:
            return plain(keys, *operands, attn_mask=attn_mask, **how)
        wide, mask = map(_wide, operands), _wide(attn_mask)
        return tuple(gradient.bfloat16() for gradient in plain(keys, *wide, attn_mask=mask, **how))

    return gradients


def _wide(operand: Any) -> Any:
    is_narrow = isinstance(operand, torch.Tensor) and operand.dtype is torch.bfloat16
    return operand.float() if is_narrow else operand


PRODUCTS: dict[str, Callable[[Kernel], Kernel]] = {
    "mm": _matrices,
    "addmm": _matrices,
    "bmm": _matrices,
    "baddbmm": _matrices,
    "_slow_conv2d_forward": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
}
