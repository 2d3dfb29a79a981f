"""Optimizer states that lie in host memory and visit the GPU block by block, while it computes.

A few slots of GPU memory, each as large as the largest block's states, go round: while the states of one block are
stepped in its slot, those of the blocks before are on their way back and those of the next on their way in, both ways
at once on streams of their own. The order is that of the backward pass, known from the step before; a block that comes
out of turn waits for its own copy, nothing more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.pinned import aligned_bytes, pinned_slab, unpin

States = dict[str, torch.Tensor]
SLOTS = 3  # one stepped, one leaving, one arriving


@dataclass
class _Block:
    """The states of some tensors, side by side in the slab."""

    slab: torch.Tensor  # its bytes on the host, pinned
    views: dict[str, States]  # of those bytes
    layout: dict[str, dict[str, tuple[int, torch.dtype, torch.Size]]]
    slot: int = -1  # where it is on the GPU; -1: not there
    left: set[str] = field(default_factory=set)  # tensors not yet stepped since it came
    arrived: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class StreamedStates:
    """``groups``: for each block, in the order of the backward pass, the states (meta tensors serve) of its tensors.

    Raises MemoryError where the host has not as much to pin.
    """

    def __init__(self, groups: Sequence[dict[str, States]], device: torch.device):
        sizes = [sum(aligned_bytes(s) for states in group.values() for s in states.values()) for group in groups]
        slab = pinned_slab(sum(sizes))
        weakref.finalize(self, unpin, slab)
        self.blocks: list[_Block] = []
        self.block_of: dict[str, int] = {}
        offset = 0
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            self.blocks.append(_laid_out(slab[offset : offset + size], group))
            self.block_of |= dict.fromkeys(group, number)
            offset += size
        self.device = device
        self.slots = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(min(SLOTS, len(groups)))]
        self.tenants: list[int | None] = [None] * len(self.slots)
        self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._views: dict[tuple[int, str], States] = {}

    def on_gpu(self, name: str) -> States:
        """The states of a tensor, to be read and written on the current stream; ``done`` follows."""
        block = self.blocks[self.block_of[name]]
        if block.slot < 0:
            self._bring(self.block_of[name])
        torch.cuda.current_stream(self.device).wait_event(block.arrived)
        key = (block.slot, name)
        if key not in self._views:
            self._views[key] = _views(self.slots[block.slot], block.layout[name])
        return self._views[key]

    def done(self, name: str) -> None:
        """The states of a tensor are stepped. With its last a block goes back, and the next one due takes its slot."""
        number = self.block_of[name]
        block = self.blocks[number]
        block.left.discard(name)
        if not block.left:
            slot = block.slot
            self._send_back(number)
            upcoming = (number + len(self.slots)) % len(self.blocks)
            if self.blocks[upcoming].slot < 0:
                self._bring(upcoming, slot)

    def _bring(self, number: int, slot: int | None = None) -> None:
        """Starts a block's way in, into a free slot or the one whose tenant is furthest from its turn."""
        if slot is None:
            free = [place for place, tenant in enumerate(self.tenants) if tenant is None]
            slot = free[0] if free else max(range(len(self.slots)), key=lambda place: self._turns(number, place))
        tenant = self.tenants[slot]
        if tenant is not None:
            self._send_back(tenant)
        block = self.blocks[number]
        self.inward.wait_stream(self.outward)  # what was in the slot is on the host, and so is this block's last state
        with torch.cuda.stream(self.inward):
            self.slots[slot][: block.slab.numel()].copy_(block.slab, non_blocking=True)
            block.arrived.record(self.inward)
        block.slot, block.left = slot, set(block.layout)
        self.tenants[slot] = number

    def _turns(self, number: int, slot: int) -> int:
        tenant = self.tenants[slot]
        assert tenant is not None
        return (tenant - number) % len(self.blocks)

    def _send_back(self, number: int) -> None:
        block = self.blocks[number]
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        self.outward.wait_event(block.arrived)
        with torch.cuda.stream(self.outward):
            block.slab.copy_(self.slots[block.slot][: block.slab.numel()], non_blocking=True)
        self.tenants[block.slot] = None
        block.slot = -1

    def on_host(self) -> dict[str, States]:
        """Views of all states where they lie. Waits until what was stepped is there; until the next step they may be
        read and written."""
        for number, block in enumerate(self.blocks):
            if block.slot >= 0 and len(block.left) < len(block.layout):
                self._send_back(number)
            elif block.slot >= 0:  # brought ahead and as it was
                self.tenants[block.slot], block.slot = None, -1
        self.inward.synchronize()
        self.outward.synchronize()
        return {name: views for block in self.blocks for name, views in block.views.items()}


def _laid_out(slab: torch.Tensor, group: dict[str, States]) -> _Block:
    layout: dict[str, dict[str, tuple[int, torch.dtype, torch.Size]]] = {}
    offset = 0
    for name, states in group.items():
        layout[name] = {}
        for key, state in states.items():
            layout[name][key] = (offset, state.dtype, state.shape)
            offset += aligned_bytes(state)
    return _Block(slab, {name: _views(slab, places) for name, places in layout.items()}, layout)


def _views(memory: torch.Tensor, places: dict[str, tuple[int, torch.dtype, torch.Size]]) -> States:
    return {
        key: memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for key, (offset, dtype, shape) in places.items()
    }
