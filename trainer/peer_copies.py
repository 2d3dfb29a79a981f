"""Weights gathered and gradients summed over the GPUs of one host by their copy engines.

NCCL's kernels hold multiprocessors while they wait and copy, and a matrix product that finds some of them taken runs in
two waves: on two H200 a full step took 0.56 s where its arithmetic takes 0.45 (bench/NOTES.md). Copy engines move the
same bytes beside it. FSDP2 takes both operations as its own communication; the bytes, their order and the sums are
those it would have from NCCL, but that a gradient travels in bf16 and is summed in float32, rounded once.

Processes tell each other what is ready through counters in memory that all of them see. The GPU's front end writes them
and waits for them in the order of its streams (cuStreamWriteValue32, cuStreamWaitValue32): the host waits for nothing.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from trainer.world import World

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes


class Sign(IntEnum):
    """What a counter counts: operations of which ..."""

    READY = 0  # the sender's part can be taken
    TAKEN = 1  # the sender has taken its part
    ARRIVED = 2  # the sender's gradients lie in the receiver's memory
    SUMMED = 3  # the sender has used what the receiver sent


@dataclass(frozen=True)
class Shared:
    """Memory of this GPU that the others see, and theirs."""

    mine: torch.Tensor  # bytes
    of: tuple[torch.Tensor, ...]  # by rank

    @classmethod
    def make(cls, size: int, world: World) -> Shared:
        """``size``: bytes, the same on every process. Every process must call it."""
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        mine = symmetric.empty(size, dtype=torch.uint8, device=world.device)
        handle = symmetric.rendezvous(mine, group.group_name)
        others = tuple(handle.get_buffer(rank, (size,), torch.uint8) for rank in range(world.size))
        return cls(mine, others)


class Signs:
    """Counters by which processes wait for each other, one for each sign and sender, in the receiver's memory."""

    def __init__(self, world: World):
        from cuda.bindings import driver

        self.driver, self.size, self.rank = driver, world.size, world.rank
        self.shared = Shared.make(max(ALIGNMENT, 4 * len(Sign) * world.size), world)
        self.shared.mine.zero_()

    def tell(self, rank: int, sign: Sign, number: int) -> None:
        """Writes into ``rank``'s memory, after all that the current stream has done."""
        place = self.shared.of[rank].data_ptr() + 4 * (sign * self.size + self.rank)
        flags = self.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value
        self._checked(self.driver.cuStreamWriteValue32(self._stream(), place, number, flags))

    def wait(self, rank: int, sign: Sign, number: int) -> None:
        """Holds the current stream until ``rank`` has told ``number`` or more."""
        place = self.shared.mine.data_ptr() + 4 * (sign * self.size + rank)
        flags = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
        self._checked(self.driver.cuStreamWaitValue32(self._stream(), place, number, flags))

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def _checked(self, answer: tuple[Any, ...]) -> None:
        if answer[0] != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the GPU does not take a stream's signal: {answer[0]}")


class Gather:
    """FSDP2's all-gather: each process takes the others' parts out of their buffers.

    The two buffers take turns: FSDP2 copies out of one while the next operation fills the other.
    """

    def __init__(self, size: int, signs: Signs, world: World):
        self.buffers = [Shared.make(size, world) for _ in range(2)]
        self.signs, self.rank, self.others = signs, world.rank, _others(world)
        self.allocated = self.number = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated += 1
        count = math.prod(size)
        return self.buffers[self.allocated % 2].mine[: count * dtype.itemsize].view(dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.number += 1
        buffer = next(each for each in self.buffers if each.mine.data_ptr() == output_tensor.data_ptr())
        part = input_tensor.numel() * input_tensor.itemsize
        for rank in self.others:
            self.signs.tell(rank, Sign.READY, self.number)
        for rank in self.others:
            self.signs.wait(rank, Sign.READY, self.number)
            place = slice(rank * part, (rank + 1) * part)
            buffer.mine[place].copy_(buffer.of[rank][place])
            self.signs.tell(rank, Sign.TAKEN, self.number)
        for rank in self.others:  # what they take from here stays until they have it
            self.signs.wait(rank, Sign.TAKEN, self.number)


class Sum:
    """FSDP2's reduce-scatter: each process puts the others' rows into their memory, and adds up what came."""

    def __init__(self, size: int, signs: Signs, world: World):
        self.buffer = Shared.make(size, world)
        self.signs, self.rank, self.others = signs, world.rank, _others(world)
        self.number = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.number += 1
        rows = input_tensor.chunk(len(self.others) + 1)
        part = output_tensor.numel() * output_tensor.itemsize
        for rank in self.others:
            self.signs.wait(rank, Sign.SUMMED, self.number - 1)
            there = self.buffer.of[rank][self.rank * part : (self.rank + 1) * part]
            there.copy_(rows[rank].view(torch.uint8))
            self.signs.tell(rank, Sign.ARRIVED, self.number)
        came = []
        for rank in self.others:
            self.signs.wait(rank, Sign.ARRIVED, self.number)
            came.append(self.buffer.mine[rank * part : (rank + 1) * part].view(output_tensor.dtype))
        if len(came) == 1:  # in float32, and rounded once, as below
            torch.add(rows[self.rank], came[0], out=output_tensor)
        else:
            torch.sum(torch.stack([rows[self.rank], *came]), dim=0, out=output_tensor)
        for rank in self.others:
            self.signs.tell(rank, Sign.SUMMED, self.number)


def _others(world: World) -> list[int]:
    """The other ranks, each process beginning with another one, so that not all ask the same."""
    return [(world.rank + ahead) % world.size for ahead in range(1, world.size)]


def use_copy_engines(modules: Iterable[FSDPModule], largest: int, world: World) -> bool:
    """Lets FSDP2's modules communicate so, where all processes can; whether they do.

    ``largest``: bytes of the largest module's parameters, with rows padded to equal parts. Every process must call it.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # what is not needed is not asked of the host
    problem = _unreachable(world)
    told = world.gather(problem)
    if any(told):
        log.info("the GPUs talk through NCCL: %s", next(why for why in told if why))
        return False
    signs = Signs(world)
    size = math.ceil(largest / ALIGNMENT) * ALIGNMENT
    gather, total = Gather(size, signs, world), Sum(size, signs, world)
    torch.cuda.synchronize(world.device)
    world.meet()  # counters are zero everywhere
    for module in modules:
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # by its protocol, not its class
        module.set_custom_reduce_scatter(total)  # type: ignore[arg-type]
    log.info("the GPUs' copy engines carry weights and gradients")
    return True


def _unreachable(world: World) -> str:
    """Why this process's GPU cannot use the others' memory, "" where it can."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return "the package cuda-bindings is not here"
    here = world.device.index
    for there in range(torch.cuda.device_count()):
        if there != here and not torch.cuda.can_device_access_peer(here, there):
            return f"GPU {here} does not see the memory of GPU {there}"
    if torch.cuda.device_count() < world.size:
        return "not all GPUs are of one host"
    return ""
