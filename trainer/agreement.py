"""Whether all processes still have the same weights, and do the same step: checked without waiting for it.

What every process holds whole (a LoRA, the frozen base under it) must be the same to the bit: a sum of its bits, as
integers, is taken where it lies. Of a sharded model each process has rows that nobody else has; there it is what each
*receives*, gathered the way that training gathers it, whose sum must be that of all the rows where they lie. With the
weights go the step, its pictures and its learning rate. A difference is the work of a card, of its memory, or of the
way between two of them: training on would spoil the result without a word.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.dropout import KEYS
from trainer.trained import Trained, plain_name
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
    gathered: int  # of the names, the last, are of gathered tensors; after them come the sums of their rows
    sums: torch.Tensor
    arrived: torch.cuda.Event | None


class Agreement:
    """Asks after some steps, answers at a later one. Each method is entered by all processes; alone it does nothing."""

    def __init__(self, model: nn.Module, tensors: Sequence[Trained], start: int, world: World):
        self.world, self.start = world, start
        self.model, self.tensors = model, {tensor.name: tensor for tensor in tensors}
        self.groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
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
        device, groups = self.world.device, self.groups
        if step - self.start > FIRST:  # one of them, another each time: all would be a gathering of the whole model
            groups = groups[step // EVERY % max(1, len(groups)) :][:1]
        received = {name: total for group in groups for name, total in self._received(group).items()}
        sums = [checksum(tensor) for tensor in self.whole.values()]
        sums += [*received.values(), *(checksum(self.tensors[name].weight) for name in received)]
        doing = torch.tensor([step, _digest(pictures), *struct.unpack("@q", struct.pack("@d", learning_rate))])
        own = torch.cat([doing.to(device, non_blocking=True), torch.stack(sums)])
        found, arrived = own.new_empty((self.world.size, own.numel())), None
        dist.all_gather(list(found), own)
        if device.type == "cuda":
            found, arrived = found.to("cpu", non_blocking=True), torch.cuda.Event()
            arrived.record()
        self.asked = _Asked(step, (*DOING, *self.whole, *received), len(received), found, arrived)

    def answer(self, wait: bool = True) -> None:
        """Raises DisagreementError where the processes differed when they were asked last; later, where the sums have
        not arrived and it is not to ``wait`` for them."""
        asked = self.asked
        if asked is None or not (wait or asked.arrived is None or asked.arrived.query()):
            return
        if asked.arrived:
            asked.arrived.synchronize()
        self.asked = None
        told, rows = asked.sums[:, : len(asked.names)], asked.sums[:, len(asked.names) :].sum(dim=0)
        right = dict(zip(asked.names[len(asked.names) - asked.gathered :], rows.tolist(), strict=True))
        if wrong := describe(asked.step, asked.names, told, right):
            raise DisagreementError(wrong)

    def _received(self, group: FSDPModule) -> dict[str, torch.Tensor]:
        """The checksums of what this process gets of the tensors that FSDP2 gathers together."""
        group.unshard()
        try:
            return {name: checksum(t) for name, t in _held_whole(self.model) if name not in self.whole}
        finally:
            group.reshard()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits taken as integers: an int64 scalar on its device, the same in whatever order it is
    summed."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def describe(step: int, names: Sequence[str], sums: torch.Tensor, right: Mapping[str, int]) -> str:
    """Who differs, in what; "" where nobody does. ``sums``: [processes, names]; ``right``: what some must be. Of two
    that may both be wrong it cannot be told who is; of more, those are named that differ from most."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, column in zip(names, sums.T.tolist(), strict=True):
        common, count = Counter(column).most_common(1)[0]
        known = name in right or 2 * count > len(column)
        odd = tuple(rank for rank, value in enumerate(column) if value != right.get(name, common))
        if odd:
            found.setdefault(odd if known else tuple(range(len(column))), []).append(name)
    told = []
    for ranks, differing in found.items():
        who = " and ".join(f"process {rank}" for rank in ranks)
        more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
        verb = "differs from the others" if len(ranks) == 1 else "differ"
        told.append(f"{who} {verb} in {', '.join(differing[:MOST_NAMED])}{more}")
    if not told:
        return ""
    blame = "a GPU, its memory or the way between two is at fault: `fluxpod probe` tests them, another pod is the cure"
    if set(DOING).issuperset(name for some in found.values() for name in some):
        blame = "this program is at fault: tell its makers"
    return f"after step {step} {'; '.join(told)}. That must be the same everywhere, to the bit; {blame}"


def _held_whole(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """What every process has the same of; not the keys of dropout, which are those of its own images."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, DTensor) and tensor.numel() and name != KEYS:
            yield plain_name(name), tensor


def _digest(pictures: Iterable[int]) -> int:
    digest = hashlib.sha256(",".join(map(str, pictures)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
