"""The tensors that are trained, as the optimizer and the states see them: plain local tensors that know their place.

Under FSDP2 a parameter is a DTensor of which this process holds some rows; alone it holds all. Everything that must not
depend on the number of GPUs (8-bit or not, rounding, the bytes of a state) asks the *logical* tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_BLOCK = re.compile(r"(single_)?transformer_blocks\.\d+\.")


@dataclass(frozen=True, eq=False)
class Trained:
    name: str  # as diffusers or peft names it
    parameter: nn.Parameter
    shape: tuple[int, ...]  # of the logical tensor
    first_row: int  # of the rows held here
    sharded: bool
    pace: float = 1.0  # its learning rate, as a multiple of the step's

    @property
    def weight(self) -> torch.Tensor:
        """The rows held here, sharing the parameter's memory."""
        return local(self.parameter)

    @property
    def row_size(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def first_index(self) -> int:
        """The logical index of this process's first element."""
        return self.first_row * self.row_size

    def take_gradient(self) -> torch.Tensor | None:
        """The gradient of the rows held here, dense, and none afterwards."""
        gradient = self.parameter.grad
        self.parameter.grad = None
        return None if gradient is None else local(gradient).contiguous()


def local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def held_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows of rank ``rank``: FSDP2 cuts dimension 0 in chunks of ceil(rows / size)."""
    chunk = math.ceil(rows / size)
    first = min(rank * chunk, rows)
    return first, min(chunk, rows - first)


def trained_tensors(model: nn.Module, rank: int, size: int, paces: Mapping[str, float] | None = None) -> list[Trained]:
    """Every parameter that wants a gradient, in the model's order; ``paces`` are those of adapters, by their layer's
    name, where they differ from 1."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sharded = isinstance(parameter, DTensor)
            first, count = held_rows(parameter.shape[0], rank, size) if sharded else (0, parameter.shape[0])
            plain = plain_name(name)
            pace = (paces or {}).get(plain.partition(".lora_")[0], 1.0)
            tensor = Trained(plain, parameter, tuple(parameter.shape), first, sharded, pace)
            assert tensor.weight.shape[0] == count, (name, tensor.weight.shape, first, count)
            found.append(tensor)
    return found


def plain_name(name: str) -> str:
    """Without what torch.compile and trainer/streamed.py put into the names of modules."""
    return name.replace("_orig_mod.", "").replace(".streamed.", ".")


def by_block(tensors: Iterable[Trained]) -> list[list[Trained]]:
    """The tensors of each transformer block, in the order in which backward comes to the blocks: the last first. What
    lies outside of blocks is in none."""
    blocks: dict[str, list[Trained]] = {}
    for tensor in tensors:
        if match := _BLOCK.match(tensor.name):
            blocks.setdefault(match[0], []).append(tensor)
    return [*reversed(blocks.values())]
