"""What every optimizer here can do: step one tensor at a time, and say what must be kept to go on.

An update takes a float32 copy of a weight, steps it and, where the weight is bf16, rounds it back stochastically. So at
most one tensor is ever held in float32, a gradient can be used and dropped as soon as backward has made it, and no
small update is lost to rounding. ``blockwise.py`` and ``torch_optimizer.py`` are the two kinds, ``make_optimizer.py``
chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bootstrap.tensor_files import Rows
from trainer.rounding import round_stochastically
from trainer.trained import Trained


@dataclass(frozen=True)
class Piece:
    """Some rows of a logical tensor, as this process holds them: what a state's files are made of."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]  # of the logical tensor; () for a scalar
    first_row: int = 0


@dataclass(frozen=True)
class SavedOptimizer:
    """What a state kept of an optimizer."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    read: Callable[[str, int, int | None], torch.Tensor]  # rows of a tensor, in CPU memory
    fill: Callable[[Iterable[Rows]], None]  # tensors on any device, at the speed of the link to it
    scalars: dict[str, Any]


class OptimizerStateError(ValueError):
    """A state's optimizer is not of the kind the job now asks for."""


class Optimizer(ABC):
    """Steps the trained tensors of this process."""

    # Whether an update may run on any CUDA stream: FSDP2 hands gradients over on that of its reduce-scatters, so that
    # the update of one block runs beside the backward pass of the next.
    any_stream = False

    def __init__(self, tensors: Iterable[Trained], seed: int):
        self.tensors = list(tensors)
        self.seed = seed
        self.step_index = 0  # of the optimizer update under way, from 0
        self.learning_rate = 0.0
        self.go = torch.ones(())
        self.skipped = torch.zeros((), dtype=torch.int32)

    def begin_step(self, step: int, learning_rate: float, go: torch.Tensor) -> None:
        """Called before the step's last backward.

        ``go``: a float32 scalar on the device, the same on every process: 1, or 0 where the step's loss is no number,
        which leaves weights and states as they are. ``skipped`` counts, on the device, this process's parts of
        tensors (blocks of 256 weights in the fused kernel, else whole ones) whose gradient is no number in this step:
        they are left as they are too.
        """
        self.step_index, self.learning_rate, self.go = step, learning_rate, go
        self.skipped = torch.zeros((), dtype=torch.int32, device=go.device)  # a new one: the last is read a step late

    def admit(self, gradient: torch.Tensor) -> torch.Tensor:
        """1 where an update may use this gradient, else 0, counting it: a float32 scalar; nothing waits for it."""
        finite = torch.isfinite(gradient.sum())  # one pass over it, and no mask of its size; NaN and infinity stay
        self.skipped += ~finite
        return self.go * finite

    def admit_all(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """1 where an update may use every one of them; with few launches, of which an adapter has hundreds of tensors'
        worth."""
        finite = torch.isfinite(torch.stack(torch._foreach_norm(gradients)))
        self.skipped += (~finite).sum(dtype=torch.int32)
        return self.go * finite.all()

    @abstractmethod
    def update(self, tensor: Trained) -> None:
        """Uses up the gradient of one tensor; may be called from its backward hook."""

    def finish_step(self) -> None:
        """Updates every tensor whose gradient is still there."""
        for tensor in self.tensors:
            if tensor.parameter.grad is not None:
                self.update(tensor)

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """The tensors that go on in a state: this process's rows of them, sharing their memory."""

    @abstractmethod
    def load(self, saved: SavedOptimizer) -> None:
        """Takes a state back. Raises OptimizerStateError where it is another optimizer's."""

    def scalars(self) -> dict[str, Any]:
        """What goes on in a state beside tensors, as JSON values."""
        return {}

    def put_back(self, tensor: Trained, stepped: torch.Tensor) -> None:
        """Writes a stepped float32 copy into its weight."""
        weight = tensor.weight
        if stepped.data_ptr() == weight.data_ptr() and stepped.dtype == weight.dtype:
            return
        if weight.dtype == torch.bfloat16:
            place = tensor.first_index
            stepped = round_stochastically(stepped, tensor.name, seed=self.seed, step=self.step_index, first=place)
        weight.copy_(stepped)
