"""Adam and Lion with bitsandbytes' arithmetic and states of 8 or 32 bits: on the GPU by one fused kernel, with states
there or streamed from host memory; on the CPU by bitsandbytes' own kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from bitsandbytes import functional as kernels

from bootstrap.estimate import BLOCK_8BIT, stored_in_8bit
from bootstrap.flux_shape import spread
from bootstrap.tensor_files import Rows
from jobs.problem import JobError, Problem
from jobs.schema import Job
from trainer.optimizer import Optimizer, OptimizerStateError, Piece, SavedOptimizer
from trainer.randomness import hash_keys
from trainer.streamed import StreamedStates
from trainer.trained import Trained, by_block

DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lion": {"betas": (0.9, 0.99), "eps": 0.0},
}


class Blockwise(Optimizer):
    """Two states per weight (Adam) or one (Lion); always rows, as the weights are.

    A state is 8-bit where the *logical* tensor is a matrix whose rows are whole blocks of 256, so that no block
    straddles two processes, and float32 elsewhere. bitsandbytes' own rule looks at the local size and would change with
    the GPU count. Those of ``host`` blocks lie in the host's memory, on a GPU.
    """

    any_stream = True  # one kernel of our own, on whatever stream is current

    def __init__(
        self, tensors: Iterable[Trained], job: Job, *, kernel: Literal["adam", "lion"], bits: Literal[8, 32], host: int
    ):
        super().__init__(tensors, job.seed)
        self.kernel = kernel
        arguments = DEFAULTS[kernel] | {"weight_decay": job.weight_decay} | job.optimizer_args
        beta1, beta2 = arguments.pop("betas")
        self.betas = float(beta1), float(beta2)
        self.eps, self.weight_decay = float(arguments.pop("eps")), float(arguments.pop("weight_decay"))
        if arguments:
            told = f"{job.optimizer} does not take {', '.join(arguments)}"
            raise JobError([Problem(told, "It takes betas and eps", key="optimizer_args")])
        self.names = ("state1", "state2") if kernel == "adam" else ("state1",)
        device = self.tensors[0].weight.device
        self.on_gpu = device.type == "cuda"
        blocks = by_block(self.tensors) if self.on_gpu else []
        blocks = [blocks[number] for number in spread(host, len(blocks))] if blocks else []
        meta = [{t.name: self._new_states(t, bits, torch.device("meta")) for t in block} for block in blocks]
        self.streamed = StreamedStates(meta, device) if meta else None
        self.states = {
            tensor.name: self._new_states(tensor, bits, device)
            for tensor in self.tensors
            if self.streamed is None or tensor.name not in self.streamed.block_of
        }
        self.maps = [kernels.create_dynamic_map(signed=signed) for signed in (True, False)]  # for the CPU's kernels

    def _new_states(self, tensor: Trained, bits: int, device: torch.device) -> dict[str, torch.Tensor]:
        shape = tensor.weight.shape
        if not (bits == 8 and stored_in_8bit(tensor.shape)):
            return {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in self.names}
        states = {name: torch.zeros(shape, dtype=torch.uint8, device=device) for name in self.names}
        for name in self.names:
            states[f"{name}.absmax"] = torch.zeros(shape[0], shape[1] // BLOCK_8BIT, dtype=torch.float32, device=device)
        return states

    @torch.no_grad()
    def update(self, tensor: Trained) -> None:
        gradient = tensor.take_gradient()
        if gradient is None or gradient.numel() == 0:
            return
        if not self.on_gpu:
            self._update_on_cpu(tensor, gradient.float())
        elif self.streamed is None or tensor.name not in self.streamed.block_of:
            self._update_on_gpu(tensor, gradient, self.states[tensor.name])
        else:
            self._update_on_gpu(tensor, gradient, self.streamed.on_gpu(tensor.name))
            self.streamed.done(tensor.name)

    def _update_on_gpu(self, tensor: Trained, gradient: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        from trainer.blockwise_kernel import step_on_gpu  # Triton comes with torch's CUDA builds alone

        step_on_gpu(
            tensor.weight,
            gradient,
            states,
            self.go,
            self.skipped,
            first=tensor.first_index,
            keys=hash_keys(self.seed, self.step_index, tensor.name),
            adam=self.kernel == "adam",
            step=self.step_index + 1,
            learning_rate=self.learning_rate * tensor.pace,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )

    def _update_on_cpu(self, tensor: Trained, gradient: torch.Tensor) -> None:
        if not self.admit(gradient):
            return
        stepped = tensor.weight.float()  # a copy where bf16, the weight itself where float32
        self._run_kernel(gradient, stepped, self.states[tensor.name], self.learning_rate * tensor.pace)
        self.put_back(tensor, stepped)

    def _run_kernel(
        self, gradient: torch.Tensor, stepped: torch.Tensor, states: dict[str, torch.Tensor], learning_rate: float
    ) -> None:
        one, two = states["state1"], states.get("state2")
        beta1, beta2 = self.betas
        step = self.step_index + 1  # Adam's bias correction counts from 1
        if one.dtype == torch.uint8:
            scales = [states[f"{name}.absmax"].view(-1) for name in self.names]
            two_map, two_scales = (self.maps[1], scales[1]) if two is not None else (None, None)
            kernels.optimizer_update_8bit_blockwise(
                self.kernel, gradient, stepped, one, two, beta1, beta2, 0.0, 0.0, self.eps, step, learning_rate,
                self.maps[0], two_map, scales[0], two_scales, self.weight_decay,
            )  # fmt: skip
        else:
            kernels.optimizer_update_32bit(
                self.kernel, gradient, stepped, one, beta1, self.eps, step, learning_rate, two, beta2,
                weight_decay=self.weight_decay,
            )  # fmt: skip

    def pieces(self) -> list[Piece]:
        states = self.states | (self.streamed.on_host() if self.streamed else {})
        return [
            Piece(f"{tensor.name}.{name}", state, (tensor.shape[0], *state.shape[1:]), tensor.first_row)
            for tensor in self.tensors
            for name, state in states[tensor.name].items()
        ]

    def load(self, saved: SavedOptimizer) -> None:
        pieces = self.pieces()
        for piece in pieces:
            if saved.shapes.get(piece.name) != piece.shape:
                raise OptimizerStateError(f"the state has no {piece.name} of shape {piece.shape}")
            if (kept := saved.dtypes[piece.name]) != piece.tensor.dtype:
                raise OptimizerStateError(f"the state keeps {piece.name} as {kept}, not {piece.tensor.dtype}")
        saved.fill(Rows(piece.tensor, piece.name, piece.first_row) for piece in pieces)
