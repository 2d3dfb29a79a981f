"""An average of the weights over the steps (EMA): kept beside them, shown in their place for samples and saves.

Showing it takes no second copy of the model. Where both have one number format, they change places. A bf16 weight takes
the upper half of its float32 average (rounded to the nearest), and what the average was keeps, in its 32 bits, the
weight and the lower half: nothing is lost, and going back gives the same bits.

A state is saved while the average is shown: its weights, and so the output, are the average, and
``optimizer.safetensors`` keeps under "ema/" what it takes to go back to the live weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from jobs.schema import Ema as Settings
from trainer.optimizer import Piece
from trainer.rounding import round_stochastically
from trainer.streamed import StreamedStates, StreamedWeights
from trainer.trained import Trained, by_block

PREFIX = "ema/"  # of names in optimizer.safetensors
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Ema:
    """The average of this process's rows of every trained tensor.

    A tensor's average follows it right after its update, so that one that is updated within the backward pass, and
    whose weights lie on the host at the end of the step, is followed while it is on the GPU.
    """

    def __init__(
        self,
        settings: Settings,
        seed: int,
        model: FluxTransformer2DModel,
        tensors: Sequence[Trained],
        begun: int,
        *,
        host: bool,
    ):
        """Begins as the weights are after ``begun`` steps. With ``host`` the averages of blocks lie in the memory of
        the host and visit the GPU. Raises MemoryError where the host has not as much to pin."""
        self.settings, self.seed, self.begun = settings, seed, begun
        self.streamed_weights = StreamedWeights.of(model)
        self.shown_now = False
        dtype = TYPES[settings.dtype]
        blocks = by_block(tensors) if host else []
        inside = {tensor.name for block in blocks for tensor in block}
        self.tensors = [*(t for block in blocks for t in block), *(t for t in tensors if t.name not in inside)]
        like = [
            {t.name: {"average": torch.empty_like(t.weight, dtype=dtype, device="meta")} for t in b} for b in blocks
        ]
        self.streamed = StreamedStates(like, tensors[0].weight.device) if like else None
        self.averages = {t.name: t.weight.to(dtype, copy=True) for t in tensors if t.name not in inside}
        for tensor, average in self._at_rest():
            average.copy_(tensor.weight)
        self.step = begun
        self.keep = 1.0  # how much of an average stays in this step
        self.left: set[str] = set()  # of the tensors: not yet followed in this step

    def record(self) -> dict[str, Any]:
        """What goes on in a state beside the tensors."""
        return {"decay": self.settings.decay, "every": self.settings.every, "begun": self.begun}

    # ------------------------------------------------------------ following

    def begin_step(self, step: int) -> None:
        """Called before the step's last backward, with the number of updates done before it."""
        self.step = step
        self.left = {tensor.name for tensor in self.tensors} if (step + 1) % self.settings.every == 0 else set()
        self.keep = kept_share(self.settings, step + 1 - self.begun)

    @torch.no_grad()
    def follow(self, tensor: Trained) -> None:
        """Moves a tensor's average towards it, once in a step that is due."""
        if tensor.name not in self.left:
            return
        self.left.discard(tensor.name)
        average = self._average(tensor)
        if tensor.weight.numel():
            # Product by product, then the sum: fused, the ends of rows would be rounded otherwise than the rest.
            moved = (average.float() if average.dtype != torch.float32 else average).mul_(self.keep)
            moved.add_(tensor.weight.float().mul(1 - self.keep))
            if average.dtype == torch.bfloat16:
                place, name = tensor.first_index, PREFIX + tensor.name
                average.copy_(round_stochastically(moved, name, seed=self.seed, step=self.step, first=place))
        self._done(tensor)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Follows the tensors that were updated after the backward pass."""
        if not self.left:
            return
        if self.left == self.averages.keys() and all(t.weight.dtype == torch.float32 for t in self.tensors):
            # An adapter's hundreds of small tensors, with few launches.
            averages = [self.averages[tensor.name] for tensor in self.tensors]
            torch._foreach_mul_(averages, self.keep)
            torch._foreach_add_(averages, torch._foreach_mul([t.weight for t in self.tensors], 1 - self.keep))
            self.left.clear()
            return
        for tensor in self.tensors:
            self.follow(tensor)

    def _average(self, tensor: Trained) -> torch.Tensor:
        if self.streamed and tensor.name in self.streamed.block_of:
            return self.streamed.on_gpu(tensor.name)["average"]
        return self.averages[tensor.name]

    def _done(self, tensor: Trained) -> None:
        if self.streamed and tensor.name in self.streamed.block_of:
            self.streamed.done(tensor.name)

    def _at_rest(self) -> Iterator[tuple[Trained, torch.Tensor]]:
        """The averages on the host, where they lie, with their tensors."""
        on_host = self.streamed.on_host() if self.streamed else {}
        return ((tensor, on_host[tensor.name]["average"]) for tensor in self.tensors if tensor.name in on_host)

    # ------------------------------------------------------------ showing

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The weights are the average, between two steps."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """In order of the ring: the last blocks first. Weights that lie on the host change places with their averages
        there."""
        if self.streamed_weights:
            self.streamed_weights.settle()
        device = self.tensors[-1].weight.device  # outside of blocks nothing is streamed
        change = go_back if self.shown_now else show
        here = [t for t in self.tensors if t.weight.device == device]
        for tensor in here:
            change(tensor.weight, self._average(tensor))
            self._done(tensor)
        if len(here) < len(self.tensors):
            for tensor, average in self._at_rest():
                if tensor.weight.device != device:
                    change(tensor.weight, average)
        self.shown_now = not self.shown_now

    def pieces(self) -> list[Piece]:
        """What it takes to go back, while the average is shown: this process's rows, sharing their memory."""
        assert self.shown_now
        averages = self.averages | {tensor.name: average for tensor, average in self._at_rest()}
        return [Piece(PREFIX + t.name, packed(t.weight, averages[t.name]), t.shape, t.first_row) for t in self.tensors]


def kept_share(settings: Settings, steps: int) -> float:
    """How much of the average stays, ``steps`` steps after it began: decay for each step since the last time, and less
    in the beginning, so that the first weights are forgotten: (1 + n) / (10 + n), as diffusers has it."""
    return float(min(settings.decay, (1 + steps) / (10 + steps)) ** settings.every)


def load_ema(read: Callable[[str, int, int], torch.Tensor], tensors: Sequence[Trained], ema: Ema | None) -> None:
    """Turns weights that a state has as the average into the live ones, and gives ``ema``, if the job has one, the
    average. ``read`` gives rows of what the state keeps by name; one tensor at a time."""
    on_host = {tensor.name: average for tensor, average in ema._at_rest()} if ema else {}
    for tensor in tensors:
        rows = read(PREFIX + tensor.name, tensor.first_row, tensor.first_row + tensor.weight.shape[0])
        average = rows.to(tensor.weight.device)
        average = average.view(torch.float32) if average.dtype == torch.int32 else average
        with torch.no_grad():
            go_back(tensor.weight, average)
            if ema:
                kept = on_host[tensor.name] if tensor.name in on_host else ema.averages[tensor.name]
                kept.copy_(average)


# ---------------------------------------------------------------- the exchange, tensor by tensor


def packed(weight: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """An average that is shown as it is saved: 32 bits that are no number where they hold two things."""
    return average if average.dtype == weight.dtype else average.view(torch.int32)


def show(weight: torch.Tensor, average: torch.Tensor) -> None:
    """Puts the average into the weight; the other keeps what it takes to go back."""
    if average.dtype == weight.dtype:
        _swap(weight, average)
        return
    bits, live = average.view(torch.int32), weight.view(torch.int16)
    upper = (bits + 0x8000) >> 16  # rounds to the nearest bf16
    lower = bits - (upper << 16)  # from -0x8000 to 0x7FFF
    bits.copy_((live.int() << 16) | (lower & 0xFFFF))
    live.copy_(upper)


def go_back(weight: torch.Tensor, average: torch.Tensor) -> None:
    """Undoes ``show``, to the bit."""
    if average.dtype == weight.dtype:
        _swap(weight, average)
        return
    bits, shown = average.view(torch.int32), weight.view(torch.int16)
    live = bits >> 16
    bits.copy_((shown.int() << 16) + ((bits << 16) >> 16))
    shown.copy_(live)


def live_of(packed: torch.Tensor) -> torch.Tensor:
    """The live weights in what a state keeps under "ema/"."""
    return (packed >> 16).to(torch.int16).view(torch.bfloat16) if packed.dtype == torch.int32 else packed


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
