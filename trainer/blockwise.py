"""Adam and Lion by bitsandbytes' kernels, with states in 8 or 32 bits, on the GPU or streamed from host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from bitsandbytes import functional as kernels

from jobs.problem import JobError, Problem
from jobs.schema import Job
from trainer.optimizer import Optimizer, OptimizerStateError, Piece, SavedOptimizer
from trainer.pinned import move_to_host
from trainer.trained import Trained

BLOCK = 256  # elements that share one scale in an 8-bit state
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lion": {"betas": (0.9, 0.99), "eps": 0.0},
}


class Blockwise(Optimizer):
    """Two states per weight (Adam) or one (Lion); always rows, as the weights are.

    A state is 8-bit where the *logical* tensor is a matrix whose rows are whole blocks of 256, so that no block
    straddles two processes, and float32 elsewhere. bitsandbytes' own rule looks at the local size and would change with
    the GPU count.
    """

    def __init__(
        self, tensors: Iterable[Trained], job: Job, *, kernel: Literal["adam", "lion"], bits: Literal[8, 32], host: bool
    ):
        super().__init__(tensors, job.seed)
        self.kernel = kernel
        arguments = DEFAULTS[kernel] | {"weight_decay": job.weight_decay} | job.optimizer_args
        self.betas = tuple(float(beta) for beta in arguments.pop("betas"))
        self.eps, self.weight_decay = float(arguments.pop("eps")), float(arguments.pop("weight_decay"))
        if arguments:
            told = f"{job.optimizer} does not take {', '.join(arguments)}"
            raise JobError([Problem(told, "It takes betas and eps", key="optimizer_args")])
        self.names = ("state1", "state2") if kernel == "adam" else ("state1",)
        device = self.tensors[0].weight.device
        self.streams = host and device.type == "cuda"
        home = torch.device("meta") if self.streams else device
        self.states = {tensor.name: self._new_states(tensor, bits, home) for tensor in self.tensors}
        if self.streams:
            self.states = move_to_host(self.states)
        self.maps = [kernels.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]

    def _new_states(self, tensor: Trained, bits: int, device: torch.device) -> dict[str, torch.Tensor]:
        shape = tensor.weight.shape
        if not (bits == 8 and len(tensor.shape) == 2 and tensor.shape[1] % BLOCK == 0):
            return {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in self.names}
        states = {name: torch.zeros(shape, dtype=torch.uint8, device=device) for name in self.names}
        for name in self.names:
            states[f"{name}.absmax"] = torch.zeros(shape[0], shape[1] // BLOCK, dtype=torch.float32, device=device)
        return states

    @torch.no_grad()
    def update(self, tensor: Trained) -> None:
        gradient = tensor.take_gradient()
        if gradient is None or gradient.numel() == 0 or not self.admit(gradient):
            return
        stepped = tensor.weight.float()  # a copy where bf16, the weight itself where float32
        kept = self.states[tensor.name]
        states = {n: s.to(gradient.device, non_blocking=True) for n, s in kept.items()} if self.streams else kept
        self._run_kernel(gradient, stepped, states)
        if self.streams:
            for name, state in states.items():
                kept[name].copy_(state, non_blocking=True)
        self.put_back(tensor, stepped)

    def _run_kernel(self, gradient: torch.Tensor, stepped: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        one, two = states["state1"], states.get("state2")
        beta1, beta2 = self.betas
        step = self.step_index + 1  # Adam's bias correction counts from 1
        if one.dtype == torch.uint8:
            scales = [states[f"{name}.absmax"].view(-1) for name in self.names]
            two_map, two_scales = (self.maps[1], scales[1]) if two is not None else (None, None)
            kernels.optimizer_update_8bit_blockwise(
                self.kernel, gradient, stepped, one, two, beta1, beta2, 0.0, 0.0, self.eps, step, self.learning_rate,
                self.maps[0], two_map, scales[0], two_scales, self.weight_decay,
            )  # fmt: skip
        else:
            kernels.optimizer_update_32bit(
                self.kernel, gradient, stepped, one, beta1, self.eps, step, self.learning_rate, two, beta2,
                weight_decay=self.weight_decay,
            )  # fmt: skip

    def pieces(self) -> list[Piece]:
        if self.streams:
            torch.cuda.synchronize()  # the copies back to the host are done
        return [
            Piece(f"{tensor.name}.{name}", state, (tensor.shape[0], *state.shape[1:]), tensor.first_row)
            for tensor in self.tensors
            for name, state in self.states[tensor.name].items()
        ]

    def load(self, saved: SavedOptimizer) -> None:
        for piece in self.pieces():
            if saved.shapes.get(piece.name) != piece.shape:
                raise OptimizerStateError(f"the state has no {piece.name} of shape {piece.shape}")
            rows = saved.read(piece.name, piece.first_row, piece.first_row + piece.tensor.shape[0])
            if rows.dtype != piece.tensor.dtype:
                raise OptimizerStateError(f"the state keeps {piece.name} as {rows.dtype}, not {piece.tensor.dtype}")
            piece.tensor.copy_(rows)
