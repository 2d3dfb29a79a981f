"""Matrix products in fp8 (e4m3, 3 bits of mantissa): up to twice the arithmetic of bf16 on Ada, Hopper and Blackwell.

Weights, inputs and gradients stay bf16; for each product its two factors are scaled, anew each time, so that their
largest value is e4m3's, and rounded. Either every row of a factor has a scale of its own, along which nothing is summed
up (``fp8-rowwise``), or a factor has one (``fp8-tensorwise``, by faster kernels). The scheme is that of torchao's
``Float8Linear``; written with torch's own product, since torchao takes seconds to import, which peft would then do in
every run.

Only layers that see every token take part, in the blocks: the modulation sees one vector an image.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Scaling = Literal["fp8-rowwise", "fp8-tensorwise"]

SCALINGS: tuple[Scaling, ...] = ("fp8-rowwise", "fp8-tensorwise")
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # of a factor that is zero
MULTIPLE = 16  # bytes of a row, and rows along which is summed up, that the cards' fp8 products ask for
_LAYER = re.compile(r"(single_)?transformer_blocks\.\d+\.(attn\..+|ff\..+|ff_context\..+|proj_mlp|proj_out)")


def multiply_in_fp8(model: nn.Module, scaling: Scaling) -> list[str]:
    """Makes the blocks' layers multiply that way; gives their names. Before weights, adapters and compiling."""
    chosen = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and _LAYER.fullmatch(name)]
    for name in chosen:
        model.set_submodule(name, Fp8Linear(model.get_submodule(name), scaling))
    return chosen


class Fp8Linear(nn.Linear):
    """A layer with the same weight and bias as ``like``. A kind of nn.Linear, to which peft gives adapters."""

    def __init__(self, like: nn.Module, scaling: Scaling):
        nn.Module.__init__(self)  # nn.Linear's own would make another weight
        assert isinstance(like, nn.Linear)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight, like.bias
        self.by_row = scaling == "fp8-rowwise"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        product = _Product.apply(rows, self.weight, self.by_row)
        product = product if self.bias is None else product + self.bias
        return product.view(*x.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    """x [tokens, in] times weight [out, in], transposed: [tokens, out] in bf16; so are the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, by_row: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        return product(x, weight, by_row, quick=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = product(gradient, weight.t(), ctx.by_row) if ctx.needs_input_grad[0] else None
        of_weight = product(gradient.t(), x.t(), ctx.by_row) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def product(a: torch.Tensor, b: torch.Tensor, by_row: bool, quick: bool = False) -> torch.Tensor:
    """a [m, k] times b [n, k], transposed: [m, n] in bf16.

    ``quick``: summed up with fewer digits where that is faster, as is common for the forward pass alone. In bf16 where
    k or n are no multiples of 16, as with pictures whose sides are none of 64.
    """
    if a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE:
        return F.linear(a, b)
    return _multiplied(a, b, by_row, quick)


@torch.library.custom_op("fluxpod::fp8_product", mutates_args=())
def _multiplied(a: torch.Tensor, b: torch.Tensor, by_row: bool, quick: bool) -> torch.Tensor:
    """An operation of its own: compiled into its block, tensorwise, it was not done in three minutes on a GPU (torch
    2.11). On a CPU (2.13) the compiler was found in the backward pass, at expressions written out within each other."""
    a_codes, a_scale = _coded(a, by_row)
    b_codes, b_scale = _coded(b, by_row)
    if by_row:
        b_scale = b_scale.t()
    return torch._scaled_mm(
        a_codes, b_codes.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=quick
    )


@_multiplied.register_fake
def _(a: torch.Tensor, b: torch.Tensor, by_row: bool, quick: bool) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


def codes(factor: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A factor [rows, k] in e4m3, row after row, and its float32 scales: [rows, 1], or a scalar."""
    values = factor.float()
    largest = values.abs().amax(dim=1, keepdim=True) if by_row else values.abs().amax()
    scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
    return (values / scale).clamp(-LARGEST, LARGEST).to(E4M3).contiguous(), scale


_compiled_codes = torch.compile(codes, dynamic=True)  # two passes over a factor, not seven


def _coded(factor: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _compiled_codes(factor, by_row) if factor.is_cuda else codes(factor, by_row)
