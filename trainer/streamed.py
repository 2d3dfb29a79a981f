"""What lies on the host and visits the GPU block by block: optimizer states, and weights where even they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from trainer.ring import Layout, Ring

States = dict[str, torch.Tensor]


class StreamedStates:
    """``groups``: for each block, in the order of the backward pass, the states (meta tensors serve) of its tensors.

    Raises MemoryError where the host has not as much to pin.
    """

    def __init__(self, groups: Sequence[dict[str, States]], device: torch.device):
        flat = [{f"{name}/{key}": s for name, states in group.items() for key, s in states.items()} for group in groups]
        self.layouts = [Layout.of(tensors) for tensors in flat]
        self.names = [frozenset(group) for group in groups]
        self.block_of = {name: number for number, group in enumerate(groups) for name in group}
        self.ring = Ring([layout.size for layout in self.layouts], range(len(groups)), device)
        self.left: dict[int, set[str]] = {}  # of blocks at work: the tensors not yet stepped
        self._views: dict[tuple[int, int], dict[str, States]] = {}

    def on_gpu(self, name: str) -> States:
        """The states of a tensor, to be read and written on the current stream; ``done`` follows."""
        number = self.block_of[name]
        memory = self.ring.need(number)
        self.left.setdefault(number, set(self.names[number]))
        key = (number, memory.data_ptr())
        if key not in self._views:
            self._views[key] = _by_tensor(self.layouts[number].views(memory))
        return self._views[key][name]

    def done(self, name: str) -> None:
        """The states of a tensor are stepped. With its last a block goes back, and the next one due takes its slot."""
        number = self.block_of[name]
        self.left[number].discard(name)
        if not self.left[number]:
            del self.left[number]
            self.ring.release(number, changed=True)

    def on_host(self) -> dict[str, States]:
        """All states where they lie, with what was stepped; until the next step they may be read and written."""
        self.ring.settle()
        self.left.clear()
        return {
            name: states
            for layout, block in zip(self.layouts, self.ring.blocks, strict=True)
            for name, states in _by_tensor(layout.views(block.host)).items()
        }


def _by_tensor(views: dict[str, torch.Tensor]) -> dict[str, States]:
    found: dict[str, States] = {}
    for place, view in views.items():
        name, _, key = place.rpartition("/")
        found.setdefault(name, {})[key] = view
    return found


class StreamedWeights:
    """Weights of some blocks of a model, on the host but for the while of their forward and their backward pass.

    A parameter of such a block is a tensor on the host, except between. Each of these blocks must be checkpointed, so
    that nothing keeps its weights from one pass to the other, and updated within the backward pass, tensor by tensor.
    """

    def __init__(self, model: FluxTransformer2DModel, numbers: Sequence[int], device: torch.device):
        """``numbers``: of blocks, in the model's order; they have no memory yet, and get it here.

        Raises MemoryError where the host has not as much to pin.
        """
        lists = (model.transformer_blocks, model.single_transformer_blocks)
        places = [(blocks, index) for blocks in lists for index in range(len(blocks))]
        chosen = [places[number] for number in numbers]
        for blocks, index in chosen:
            blocks[index].to_empty(device="cpu")
        self.parameters = [dict(blocks[index].named_parameters()) for blocks, index in chosen]
        self.layouts = [Layout.of({n: p.data for n, p in named.items()}) for named in self.parameters]
        count = len(chosen)
        self.ring = Ring([layout.size for layout in self.layouts], [*range(count), *reversed(range(count))], device)
        self.left: dict[int, set[int]] = {}  # of blocks in their backward pass: the parameters not yet updated
        self.block_of = {id(p): number for number, named in enumerate(self.parameters) for p in named.values()}
        for number, (blocks, index) in enumerate(chosen):
            self._point(number, self.ring.blocks[number].host)
            blocks[index] = StreamedBlock(blocks[index], self, number)

    @staticmethod
    def of(model: nn.Module) -> StreamedWeights | None:
        """Those of a model, if it has any."""
        return next((module.weights for module in model.modules() if isinstance(module, StreamedBlock)), None)

    def _point(self, number: int, memory: torch.Tensor) -> None:
        for name, view in self.layouts[number].views(memory).items():
            self.parameters[number][name].data = view

    def enter(self, number: int) -> None:
        self._point(number, self.ring.need(number))

    def leave(self, number: int) -> None:
        """After a forward pass that no backward pass follows at once."""
        self._point(number, self.ring.blocks[number].host)
        self.ring.release(number, changed=False)

    def updated(self, parameter: nn.Parameter) -> None:
        """A parameter's step is taken. With its last a block's weights go back to the host."""
        number = self.block_of.get(id(parameter))
        if number is None:
            return
        left = self.left.setdefault(number, {id(p) for p in self.parameters[number].values()})
        left.discard(id(parameter))
        if not left:
            del self.left[number]
            self._point(number, self.ring.blocks[number].host)
            self.ring.release(number, changed=True)

    def settle(self) -> None:
        """Waits until the host's tensors, which the parameters are between two steps, hold what was updated."""
        self.ring.settle()


class StreamedBlock(nn.Module):
    """A block whose weights are on the GPU while it runs.

    ``again``: in the backward pass, which goes on with these weights.
    """

    def __init__(self, block: nn.Module, weights: StreamedWeights, number: int):
        super().__init__()
        self.streamed = block
        self.number = number
        self.weights = weights

    def forward(self, *inputs: Any, again: bool = False, **named: Any) -> Any:
        self.weights.enter(self.number)
        output = self.streamed(*inputs, **named)
        if not again:
            self.weights.leave(self.number)
        return output
