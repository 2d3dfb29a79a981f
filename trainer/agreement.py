"""Whether all processes still have the same weights, and do the same step: checked without waiting for it.

What every process holds whole (a LoRA, the frozen base under it) must be the same to the bit: a sum of its bits, as
integers, is taken where it lies. Of a sharded model each process has its own rows and nothing to compare; there it is
what the others *receive* of them that must be the same, so a tensor is gathered and summed on each. With the weights go
the step, its pictures and its learning rate. A difference is the work of a card, of its memory, or of the way between
two of them: training on would spoil the result without a word.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.trained import Trained, held_rows, plain_name
from trainer.world import World

FIRST = 3  # steps of a launch, each of which is checked whole
EVERY = 100  # steps between two checks later: 24 GB of frozen weights are read in 10 to 40 ms
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DOING = ("the step", "the pictures of the step", "the learning rate")  # compared beside tensors
MOST_NAMED = 3  # tensors in a message


class DisagreementError(RuntimeError):
    """Processes that should have the same have not; the message says which, what, and after which step."""


@dataclass(frozen=True)
class _Asked:
    """Sums on their way to the host: [processes, names]."""

    step: int
    names: Sequence[str]
    sums: torch.Tensor
    arrived: torch.cuda.Event | None


class Agreement:
    """Asks after some steps, answers at a later one. Each method is entered by all processes; alone it does nothing."""

    def __init__(self, model: nn.Module, tensors: Sequence[Trained], start: int, world: World):
        self.world, self.start = world, start
        self.sharded = {tensor.name: tensor for tensor in tensors if tensor.sharded}
        self.whole = dict(_held_whole(model))
        self.asked: _Asked | None = None

    def due(self, step: int) -> bool:
        return self.world.size > 1 and (step - self.start <= FIRST or step % EVERY == 0)

    @torch.no_grad()
    def ask(self, step: int, pictures: Iterable[int], learning_rate: float) -> None:
        """After ``step`` updates, the last of which was of these pictures. Raises as ``answer`` does."""
        self.answer(wait=False)
        if not self.due(step):
            return
        self.answer()
        device, sharded = self.world.device, list(self.sharded)
        if step - self.start > FIRST:  # one of them, another each time: all would be a gathering of the whole model
            sharded = sharded[step // EVERY % max(1, len(sharded)) :][:1]
        sums = [checksum(tensor) for tensor in self.whole.values()]
        sums += [self._received(self.sharded[name]) for name in sharded]
        doing = torch.tensor([step, _digest(pictures), *struct.unpack("@q", struct.pack("@d", learning_rate))])
        own = torch.cat([doing.to(device, non_blocking=True), torch.stack(sums)])
        found = own.new_empty(self.world.size * own.numel())
        dist.all_gather_into_tensor(found, own)
        found, arrived = found.view(self.world.size, -1), None
        if device.type == "cuda":
            found, arrived = found.to("cpu", non_blocking=True), torch.cuda.Event()
            arrived.record()
        self.asked = _Asked(step, (*DOING, *self.whole, *sharded), found, arrived)

    def answer(self, wait: bool = True) -> None:
        """Raises DisagreementError where the processes differed when they were asked last; later, where the sums have
        not arrived and it is not to ``wait`` for them."""
        asked = self.asked
        if asked is None or not (wait or asked.arrived is None or asked.arrived.query()):
            return
        if asked.arrived:
            asked.arrived.synchronize()
        self.asked = None
        if bool((asked.sums != asked.sums[0]).any()):
            raise DisagreementError(describe(asked.step, asked.names, asked.sums))

    def _received(self, tensor: Trained) -> torch.Tensor:
        """The checksum of a sharded tensor as this process receives it; chunks count by their place."""
        world, rows = self.world, tensor.weight
        most = held_rows(tensor.shape[0], 0, world.size)[1]
        own = rows.new_zeros((most, *tensor.shape[1:]))
        own[: rows.shape[0]] = rows
        every = own.new_empty((world.size * most, *tensor.shape[1:]))
        dist.all_gather_into_tensor(every, own)
        sums = every.view(_INTEGERS[every.element_size()]).view(world.size, -1).sum(dim=1, dtype=torch.int64)
        return (sums * torch.arange(1, world.size + 1, device=sums.device)).sum()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits taken as integers: an int64 scalar on its device, the same in whatever order it is
    summed."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def describe(step: int, names: Sequence[str], sums: torch.Tensor) -> str:
    """Who differs, in what. Of two it cannot be told who is wrong; of more, those are named that differ from most."""
    columns: dict[tuple[int, ...], list[str]] = {}
    for name, column in zip(names, sums.T.tolist(), strict=True):
        common, count = Counter(column).most_common(1)[0]
        odd = tuple(rank for rank, value in enumerate(column) if value != common)
        if odd:
            columns.setdefault(odd if 2 * count > len(column) else tuple(range(len(column))), []).append(name)
    told, all_doing = [], set(DOING).issuperset(name for some in columns.values() for name in some)
    for ranks, differing in columns.items():
        who = " and ".join(f"process {rank}" for rank in ranks)
        more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
        against = "differs from the others" if len(ranks) == 1 else "differ"
        told.append(f"{who} {against} in {', '.join(differing[:MOST_NAMED])}{more}")
    blame = (
        "this program is at fault: tell its makers"
        if all_doing
        else "a GPU, its memory or the way between two is at fault: `fluxpod probe` tests them, another pod is the cure"
    )
    return f"after step {step} {'; '.join(told)}. That must be the same everywhere, to the bit; {blame}"


def _held_whole(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, DTensor) and tensor.numel():
            yield plain_name(name), tensor


def _digest(pictures: Iterable[int]) -> int:
    digest = hashlib.sha256(",".join(map(str, pictures)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
