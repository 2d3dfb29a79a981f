"""DoRA: an adapted weight's rows have a length of their own, and the adapter only turns them (arXiv 2402.09353).

The weight is m * (W + s B A) / |W + s B A|, the length taken of each row and m trained. The length gets no gradient
(section 4.3 of the paper). peft finds it by making the whole matrix W + s B A in every forward, three times the weight
in memory traffic and the weight's size in memory for each of some 500 layers; compiled or not. Here

    |W + s B A|^2 = |W|^2 + 2 s sum(B * W A^T) + s^2 sum(B * B A A^T)

where |W|^2 is found once, and W A^T is the layer's own product with the few rows of A, whatever format W lies in. So a
quantised base is not unpacked but for a product, and the compiler sees plain arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import nn

from trainer.quantised import without_bias


class Lengths(nn.Module):
    """``weight``, trained: the length of each row of the adapted weight, [outputs]; ``squares``: |W|^2 of the base."""

    squares: torch.Tensor

    def __init__(self, base: nn.Linear):
        super().__init__()
        squares = base.weight.detach().float().square().sum(dim=1)
        self.register_buffer("squares", squares, persistent=False)
        self.weight = nn.Parameter(squares.sqrt())


def share_lengths(model: nn.Module) -> None:
    """Gives all processes those of rank 0: each has summed its own, and cards of different models add in another order.
    Every process must call it."""
    for module in model.modules():
        if isinstance(module, Lengths):
            dist.broadcast(module.squares, src=0)
            dist.broadcast(module.weight.detach(), src=0)


class Dora(LoraVariant):
    """The product of an adapted layer; peft's layer calls it in place of its own."""

    @staticmethod
    def forward(
        module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        base, lengths = module.get_base_layer(), module.lora_magnitude_vector[active_adapter]
        down, up, scale = module.lora_A[active_adapter], module.lora_B[active_adapter], module.scaling[active_adapter]
        with torch.no_grad():
            now = row_lengths(lengths.squares, base, down.weight, up.weight, scale)
        stretch = (lengths.weight / now - 1).to(x.dtype)  # 0 at the start: then the base's numbers come out as they are
        added = up(down(x)) * scale
        return result + added + stretch * (result - base.bias + added)


def row_lengths(
    squares: torch.Tensor, base: nn.Linear, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """|W + scale * up @ down| of each row, float32 [outputs]; ``squares`` is |W|^2 of each row."""
    crossed = without_bias(base, down.to(torch.bfloat16)).float()  # [rank, outputs]
    gram = down @ down.T
    total = squares + 2 * scale * (up * crossed.T).sum(dim=1) + scale**2 * ((up @ gram) * up).sum(dim=1)
    return total.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def add_lengths(module: LoraLayer, adapter: str) -> None:
    """Makes a layer's adapter a DoRA. The base's weight must be there."""
    module.lora_magnitude_vector[adapter] = Lengths(module.get_base_layer())
    module.lora_variant[adapter] = Dora()
