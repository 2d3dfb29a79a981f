"""Frozen linear layers whose weights lie in memory as 8-bit or 4-bit codes: the base under an adapter on small cards.

A product takes the weight back to bf16, multiplies, and forgets it: once forward, once more backward, where only the
input gets a gradient. So any card multiplies at its bf16 speed, and in memory there is one bf16 matrix at a time.

Forward and backward are operations of our own, each a closed box to torch.compile. Left to itself, the compiler would
make one node of the two dequantisations and, since a matrix product reads it in the backward pass, keep that bf16
weight from forward to backward (torch 2.11 and 2.13: ``ban_recompute_materialized_backward``); within a block
computed again that is 0.7 GB.

Codes are relative to the scale as it is stored, in bf16, so that its rounding costs nothing; they are found in float32,
whose division is exact to the last bit everywhere: a base is quantised alike on any machine, and each time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.functional import get_4bit_type
from torch import nn

from bootstrap.precision import NF4_BLOCK, Precision, scales_per_row

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "nf4": torch.uint8}  # the type tells the format
LARGEST_INT8 = 127
LARGEST_FP8 = 448  # of e4m3fn


def quantise(weight: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows of a weight: [rows, columns] gives [rows, columns] (nf4, two in a byte: half of that)
    and, in bf16, [rows, scales of a row]. A weight that is no number stays none."""
    parts = weight.float().unflatten(1, (scales_per_row(weight.shape[1], precision), -1))
    most = {"int8": LARGEST_INT8, "fp8": LARGEST_FP8, "nf4": 1}[precision]
    scales = (parts.abs().amax(dim=2) / most).bfloat16()
    parts = parts / torch.where(scales == 0, 1, scales).float()[..., None]
    if precision == "nf4":
        values = get_4bit_type("nf4", device=weight.device)
        codes = torch.bucketize(parts, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8).flatten(1)
        return (codes[:, ::2] << 4) | codes[:, 1::2], scales
    if precision == "int8":
        parts = parts.round()
    return parts.clamp(-most, most).flatten(1).to(CODES[precision]), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight in bf16, [rows, columns]: each code times its scale, rounded once."""
    if codes.dtype == torch.int8:
        return codes * scales
    if codes.dtype == torch.float8_e4m3fn:
        return codes.bfloat16().mul_(scales)
    shape = (codes.shape[0], 2 * codes.shape[1])
    unpack = torch.ops.bitsandbytes.dequantize_4bit.default
    return unpack(codes.view(-1, 1), scales.float(), NF4_BLOCK, "nf4", shape, torch.bfloat16)


@torch.library.custom_op("fluxpod::quantised_linear", mutates_args=())
def quantised_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [..., columns] times the weight, plus the bias: [..., rows]."""
    rows = F.linear(x.reshape(-1, x.shape[-1]), dequantise(codes, scales), bias)
    return rows.view(*x.shape[:-1], codes.shape[0])


@quantised_linear.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@torch.library.custom_op("fluxpod::quantised_linear_backward", mutates_args=())
def quantised_linear_backward(gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The input's gradient from the output's."""
    weight = dequantise(codes, scales)
    return (gradient.reshape(-1, weight.shape[0]) @ weight).view(*gradient.shape[:-1], weight.shape[1])


@quantised_linear_backward.register_fake
def _(gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    columns = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    return gradient.new_empty((*gradient.shape[:-1], columns))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    _, codes, scales, _ = inputs
    ctx.save_for_backward(codes, scales)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return quantised_linear_backward(gradient, *ctx.saved_tensors), None, None, None


quantised_linear.register_autograd(_differentiate, setup_context=_keep)


class QuantisedLinear(nn.Linear):
    """A linear layer in a frozen base: takes its rows as they are read, keeps their codes.

    A kind of nn.Linear because that is what peft gives adapters to. It has no weight of its own; ``weight`` makes one.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, like: nn.Linear, precision: Precision):
        nn.Module.__init__(self)  # nn.Linear's own would make the bf16 weight
        self.in_features, self.out_features, self.precision = like.in_features, like.out_features, precision
        device = like.weight.device
        columns = self.in_features // (2 if precision == "nf4" else 1)
        scales = scales_per_row(self.in_features, precision)
        codes = torch.empty((self.out_features, columns), dtype=CODES[precision], device=device)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", torch.empty((self.out_features, scales), dtype=torch.bfloat16, device=device))
        self.bias = like.bias

    @torch.no_grad()
    def take(self, weight: torch.Tensor, first_row: int = 0) -> None:
        """Quantises some rows of the weight, on this layer's device."""
        rows = slice(first_row, first_row + weight.shape[0])
        self.codes[rows], self.scales[rows] = quantise(weight.to(self.codes.device), self.precision)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """In bf16, new each time."""
        return dequantise(self.codes, self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quantised_linear(x, self.codes, self.scales, self.bias)


def without_bias(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """x [..., columns] times a base layer's weight, whatever format that lies in: [..., rows]."""
    if isinstance(layer, QuantisedLinear):
        return quantised_linear(x, layer.codes, layer.scales, None)
    return F.linear(x, layer.weight)
