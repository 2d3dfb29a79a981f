"""Blocks of bytes that lie in pinned host memory and visit the GPU in turn, while it computes.

A few slots of GPU memory, each as large as the largest block, go round. While one block is worked on in its slot, those
before it are on their way back and the next ones on their way in, both ways at once on streams of their own. In which
order blocks are asked for is known beforehand; one that is asked for out of turn waits for its own copy, nothing more.
On the CPU the same is done with plain copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trainer.pinned import aligned_bytes, pinned_slab, unpin

SLOTS = 3  # one worked on, one leaving, one arriving


@dataclass
class _Block:
    host: torch.Tensor  # its bytes, pinned
    slot: int | None = None  # where it is on the GPU
    in_use: bool = False  # from ``need`` to ``release``
    arrived: torch.cuda.Event | None = None
    saved: torch.cuda.Event | None = None  # its bytes are on the host again


@dataclass
class _Slot:
    memory: torch.Tensor
    tenant: int | None = None
    free: list[torch.cuda.Event] = field(default_factory=list)  # what must have happened before it is written


class Ring:
    """``sizes``: bytes of each block; ``order``: in which they are needed, over and over, some perhaps several times.

    Raises MemoryError where the host has not as much memory to pin.
    """

    def __init__(self, sizes: Sequence[int], order: Sequence[int], device: torch.device):
        self.device, self.order = device, tuple(order)
        self.on_gpu = device.type == "cuda"
        slab = pinned_slab(sum(sizes)) if self.on_gpu else torch.zeros(sum(sizes), dtype=torch.uint8)
        if self.on_gpu:
            weakref.finalize(self, unpin, slab)
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.blocks = [_Block(host) for host in slab.split(list(sizes))]
        count = min(SLOTS, len(sizes))
        self.slots = [_Slot(torch.empty(max(sizes), dtype=torch.uint8, device=device)) for _ in range(count)]
        if self.on_gpu:  # the memory may have been another tensor's, which queued work still reads
            for slot in self.slots:
                slot.free.append(self._now())
        self.at = len(self.order) - 1  # place in the order of the block asked for last

    def need(self, number: int) -> torch.Tensor:
        """The block's slot on the GPU, to be read and written on the current stream until ``release``."""
        block = self.blocks[number]
        if not block.in_use:
            self.at = next(self._places(number))
            if block.slot is None:
                self._bring(number, self._vacated())
            block.in_use = True
            if block.arrived:
                torch.cuda.current_stream(self.device).wait_event(block.arrived)
        assert block.slot is not None
        return self.slots[block.slot].memory

    def release(self, number: int, *, changed: bool) -> None:
        """The block is done with for now; what was changed goes to the host. Its slot is given to the next one due."""
        block = self.blocks[number]
        block.in_use = False
        if changed:
            self._send(number)
        elif self.on_gpu:
            self._slot_of(block).free.append(self._now())
        if number not in self._due():
            self._leave(number)
        for upcoming in self._due():
            vacant = next((place for place, slot in enumerate(self.slots) if slot.tenant is None), None)
            if vacant is None:
                break
            if self.blocks[upcoming].slot is None:
                self._bring(upcoming, vacant)

    def settle(self) -> None:
        """Waits until everything changed is on the host, where it may be read and written until the next ``need``."""
        for number, block in enumerate(self.blocks):
            if block.slot is not None:
                if block.in_use:
                    self._send(number)
                    block.in_use = False
                self._leave(number)
        if self.on_gpu:
            self.inward.synchronize()
            self.outward.synchronize()

    def _places(self, number: int) -> Iterator[int]:
        """Where the block stands in the order, from the next place on."""
        places = ((self.at + ahead) % len(self.order) for ahead in range(1, len(self.order) + 1))
        return (place for place in places if self.order[place] == number)

    def _due(self) -> list[int]:
        """The blocks needed next, as many as there are slots."""
        due: list[int] = []
        for ahead in range(1, len(self.order) + 1):
            number = self.order[(self.at + ahead) % len(self.order)]
            if number not in due:
                due.append(number)
            if len(due) == len(self.slots):
                break
        return due

    def _vacated(self) -> int:
        """A slot for a block that is asked for now: a free one, or that of the tenant needed last."""
        vacant = [place for place, slot in enumerate(self.slots) if slot.tenant is None]
        if vacant:
            return vacant[0]
        idle = [slot.tenant for slot in self.slots if slot.tenant is not None and not self.blocks[slot.tenant].in_use]
        if not idle:  # some block's turn never ended
            idle = [slot.tenant for slot in self.slots if slot.tenant is not None]
        last = max(idle, key=lambda number: (next(self._places(number)) - self.at) % len(self.order))
        place = self.blocks[last].slot
        assert place is not None
        if self.blocks[last].in_use:
            self._send(last)
            self.blocks[last].in_use = False
        self._leave(last)
        return place

    def _bring(self, number: int, place: int) -> None:
        block, slot = self.blocks[number], self.slots[place]
        block.slot, slot.tenant = place, number
        if not self.on_gpu:
            slot.memory[: block.host.numel()].copy_(block.host)
            return
        for event in [*slot.free, *([block.saved] if block.saved else [])]:
            self.inward.wait_event(event)
        slot.free.clear()
        with torch.cuda.stream(self.inward):
            slot.memory[: block.host.numel()].copy_(block.host, non_blocking=True)
        block.arrived = self.inward.record_event()

    def _send(self, number: int) -> None:
        block = self.blocks[number]
        slot = self._slot_of(block)
        if not self.on_gpu:
            block.host.copy_(slot.memory[: block.host.numel()])
            return
        self.outward.wait_event(self._now())
        with torch.cuda.stream(self.outward):
            block.host.copy_(slot.memory[: block.host.numel()], non_blocking=True)
        block.saved = self.outward.record_event()
        slot.free.append(block.saved)

    def _leave(self, number: int) -> None:
        block = self.blocks[number]
        slot = self._slot_of(block)
        if block.arrived:
            slot.free.append(block.arrived)  # one that was brought and never used may still be arriving
        block.slot, slot.tenant = None, None

    def _slot_of(self, block: _Block) -> _Slot:
        assert block.slot is not None
        return self.slots[block.slot]

    def _now(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()


@dataclass(frozen=True)
class Layout:
    """Where tensors lie, one after the other, each at a multiple of ALIGNMENT bytes."""

    places: dict[str, tuple[int, torch.dtype, torch.Size]]
    size: int

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> Layout:
        """For tensors of these shapes and dtypes; meta tensors serve."""
        places, offset = {}, 0
        for name, tensor in tensors.items():
            places[name] = (offset, tensor.dtype, tensor.shape)
            offset += aligned_bytes(tensor)
        return cls(places, offset)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (offset, dtype, shape) in self.places.items()
        }
