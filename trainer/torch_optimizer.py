"""Any ``torch.optim`` class: known ones and those a job names by import path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.optimizer import Optimizer, OptimizerStateError, Piece, SavedOptimizer
from trainer.trained import Trained, held_rows
from trainer.world import World

Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class TorchOptimizer(Optimizer):
    """Torch optimizers over float32 stand-ins, which are filled with weight and gradient for the while of a step.

    ``together``: one optimizer over all tensors of one pace, stepped after backward, for those that must see the whole
    model (Prodigy's one rate) and where weights are float32 anyway (LoRA). Otherwise every tensor has an optimizer of
    its own.

    Sharded, an ``elementwise`` optimizer works on rows as on wholes. For any other (Adafactor's row and column sums, a
    user's own) each tensor has one owning process, to which weight and gradient are gathered, which alone keeps the
    states and sends the stepped rows back: memory stays shared out, and the arithmetic is that of one process.
    """

    def __init__(
        self, tensors: Iterable[Trained], seed: int, make: Maker, world: World, *, together: bool, elementwise: bool
    ):
        super().__init__(tensors, seed)
        self.world = world
        sharded = any(tensor.sharded for tensor in self.tensors)
        assert not (together and sharded)
        self.owners = {t.name: i % world.size for i, t in enumerate(self.tensors) if t.sharded and not elementwise}
        mine = [t for t in self.tensors if self.owners.get(t.name, world.rank) == world.rank]
        self.stand_ins = {t.name: nn.Parameter(torch.empty(0, device=t.weight.device)) for t in mine}
        groups = _by_pace(mine) if together else [[tensor] for tensor in mine]
        self.parts = [(make([self.stand_ins[t.name] for t in group]), group) for group in groups]
        self.together = together
        self._by_name = {t.name: optimizer for optimizer, group in self.parts for t in group}

    @torch.no_grad()
    def update(self, tensor: Trained) -> None:
        assert not self.together
        gradient = tensor.take_gradient()
        if gradient is None:
            return
        weight, gradient = tensor.weight.float(), gradient.float()
        if tensor.name not in self.owners:
            if gradient.numel():
                go = self.admit(gradient)
                self._step(self._by_name[tensor.name], {tensor.name: (weight, gradient)}, go, tensor.pace)
            self.put_back(tensor, weight)
            return
        whole, whole_gradient = self._gather(tensor, weight), self._gather(tensor, gradient)
        if whole is not None and whole_gradient is not None:
            go = self.admit(whole_gradient)
            self._step(self._by_name[tensor.name], {tensor.name: (whole, whole_gradient)}, go, tensor.pace)
        self.put_back(tensor, self._scatter(tensor, whole, weight))

    @torch.no_grad()
    def finish_step(self) -> None:
        if not self.together:
            super().finish_step()
            return
        filled = {}
        for tensor in self.tensors:
            gradient = tensor.take_gradient()
            if gradient is not None:
                filled[tensor.name] = (tensor.weight.float(), gradient.float())
        # All or none: what sees the whole model is spoiled by any part.
        go = self.admit_all([gradient for _, gradient in filled.values()])
        for optimizer, tensors in self.parts:
            group = {tensor.name: filled[tensor.name] for tensor in tensors if tensor.name in filled}
            self._step(optimizer, group, go, tensors[0].pace)
        for tensor in self.tensors:
            if tensor.name in filled:
                self.put_back(tensor, filled[tensor.name][0])

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        filled: dict[str, tuple[torch.Tensor, torch.Tensor]],
        go: torch.Tensor,
        pace: float,
    ) -> None:
        """Steps where ``go`` is 1. Torch's fused kernels look at it on the device; for any other the host waits."""
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = 1 - go  # type: ignore[attr-defined]  # torch.amp.GradScaler's way to tell them
        elif not go:
            return
        for name, (weight, gradient) in filled.items():
            self.stand_ins[name].data, self.stand_ins[name].grad = weight, gradient
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * pace
        optimizer.step()
        for name in filled:
            stand_in = self.stand_ins[name]
            stand_in.data, stand_in.grad = torch.empty(0, device=stand_in.device), None

    def _gather(self, tensor: Trained, rows: torch.Tensor) -> torch.Tensor | None:
        """The whole tensor on its owner, None elsewhere; every process takes part. Chunks are padded to equal ones."""
        chunks = self._chunks(tensor)
        padded = rows.new_zeros((chunks[0][1], *tensor.shape[1:]))
        padded[: rows.shape[0]] = rows
        owner = self.owners[tensor.name]
        parts = [torch.empty_like(padded) for _ in chunks] if self.world.rank == owner else None
        dist.gather(padded, parts, dst=owner)
        if parts is None:
            return None
        return torch.cat([part[:count] for part, (_, count) in zip(parts, chunks, strict=True)])

    def _scatter(self, tensor: Trained, whole: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        chunks = self._chunks(tensor)
        mine = rows.new_empty((chunks[0][1], *tensor.shape[1:]))
        parts = None
        if whole is not None:
            parts = [torch.zeros_like(mine) for _ in chunks]
            for part, (first, count) in zip(parts, chunks, strict=True):
                part[:count] = whole[first : first + count]
        dist.scatter(mine, parts, src=self.owners[tensor.name])
        return mine[: rows.shape[0]].contiguous()

    def _chunks(self, tensor: Trained) -> list[tuple[int, int]]:
        return [held_rows(tensor.shape[0], rank, self.world.size) for rank in range(self.world.size)]

    def pieces(self) -> list[Piece]:
        found = []
        for tensor, key, value in self._kept():
            if isinstance(value, torch.Tensor):
                rows = self._is_rows(tensor, tuple(value.shape), tuple(tensor.weight.shape))
                shape, first = (tensor.shape, tensor.first_row) if rows else (tuple(value.shape), 0)
                found.append(Piece(f"{tensor.name}.{key}", value, shape, first))
        return found

    def _kept(self) -> list[tuple[Trained, str, Any]]:
        return [
            (tensor, key, value)
            for optimizer, group in self.parts
            for tensor in group
            for key, value in optimizer.state.get(self.stand_ins[tensor.name], {}).items()
        ]

    def _is_rows(self, tensor: Trained, shape: tuple[int, ...], like: tuple[int, ...]) -> bool:
        return tensor.sharded and tensor.name not in self.owners and shape == like

    def scalars(self) -> dict[str, Any]:
        """What the optimizer has written into its groups (Prodigy's rate) and beside its tensors (counts of steps)."""
        mine = {
            "groups": {
                tensors[0].name: _changed(optimizer.param_groups[0], optimizer.defaults)
                for optimizer, tensors in self.parts
            },
            "values": {f"{t.name}.{key}": v for t, key, v in self._kept() if not isinstance(v, torch.Tensor)},
        }
        everyone = self.world.gather(mine) if self.owners else [mine]
        return {kind: {k: v for one in everyone for k, v in one[kind].items()} for kind in mine}

    def load(self, saved: SavedOptimizer) -> None:
        groups, values = saved.scalars.get("groups", {}), saved.scalars.get("values", {})
        mine = [tensor for _, tensors in self.parts for tensor in tensors]
        states = {tensor.name: self._saved_state(tensor, saved, values) for tensor in mine}
        if (saved.shapes or values) and states and not any(states.values()):
            raise OptimizerStateError(f"the state has nothing for {next(iter(states))}")
        for optimizer, tensors in self.parts:
            state = {place: states[tensor.name] for place, tensor in enumerate(tensors)}
            (group,) = optimizer.state_dict()["param_groups"]
            group |= groups.get(tensors[0].name, {})
            optimizer.load_state_dict({"state": state, "param_groups": [group]})

    def _saved_state(self, tensor: Trained, saved: SavedOptimizer, values: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, shape in saved.shapes.items():
            owner, _, key = name.rpartition(".")
            if owner == tensor.name:
                rows = self._is_rows(tensor, shape, tensor.shape)
                first = tensor.first_row if rows else 0
                state[key] = saved.read(name, first, first + tensor.weight.shape[0] if rows else None)
        state |= {name.rpartition(".")[2]: v for name, v in values.items() if name.rpartition(".")[0] == tensor.name}
        return state


def _by_pace(tensors: Iterable[Trained]) -> list[list[Trained]]:
    groups: dict[float, list[Trained]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.pace].append(tensor)
    return list(groups.values())


def _changed(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What of a parameter group is no setting of the job's: those have their new values when a run goes on."""
    plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k not in ("params", "lr")}
    return {k: v for k, v in plain.items() if k not in defaults or v != defaults[k]}
