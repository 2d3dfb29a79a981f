"""From a job's optimizer to the object that steps its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bootstrap.plan import Plan
from bootstrap.ways import needs_whole_model
from jobs.problem import JobError, Problem
from jobs.schema import Job
from trainer.blockwise import Blockwise
from trainer.optimizer import Optimizer
from trainer.schedule import imported
from trainer.torch_optimizer import TorchOptimizer
from trainer.trained import Trained
from trainer.world import World

BLOCKWISE: dict[str, dict[str, Any]] = {
    "AdamW8bit": {"kernel": "adam", "bits": 8},
    "PagedAdamW8bit": {"kernel": "adam", "bits": 8},
    "PagedAdamW32bit": {"kernel": "adam", "bits": 32},
    "Lion8bit": {"kernel": "lion", "bits": 8},
    "PagedLion8bit": {"kernel": "lion", "bits": 8},
}
CLASSES = {"AdamW": "torch.optim.AdamW", "Adafactor": "torch.optim.Adafactor", "Prodigy": "prodigyopt.Prodigy"}
# One kernel, which leaves all as it is where the host cannot know yet that it must. Not on the CPU, whose fused kernel
# rounds otherwise at the end of a tensor, so that rows would not be the whole to the bit.
FUSED = ("AdamW",)
ELEMENTWISE = ("AdamW",)  # among CLASSES: a row's update needs nothing of the others


def make_optimizer(tensors: Sequence[Trained], job: Job, plan: Plan, world: World) -> Optimizer:
    """Raises JobError for an import path that leads nowhere, and for arguments that the optimizer does not take."""
    if job.optimizer in BLOCKWISE:
        return Blockwise(tensors, job, host=plan.host_state_blocks, **BLOCKWISE[job.optimizer])
    kind = imported(CLASSES.get(job.optimizer, job.optimizer), "optimizer")
    arguments = dict(job.optimizer_args)
    if "weight_decay" in inspect.signature(kind).parameters:
        arguments = {"weight_decay": job.weight_decay} | arguments
    if job.optimizer in FUSED and tensors[0].weight.device.type == "cuda":
        arguments = {"fused": True} | arguments
    make = partial(_make, kind, job, arguments)
    float32 = all(tensor.weight.dtype == torch.float32 for tensor in tensors)
    together = needs_whole_model(job.optimizer) or (float32 and not plan.optimizer_in_backward)
    return TorchOptimizer(tensors, job.seed, make, world, together=together, elementwise=job.optimizer in ELEMENTWISE)


def _make(kind: Any, job: Job, arguments: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        return kind(parameters, lr=job.learning_rate, **arguments)
    except (TypeError, ValueError) as error:
        told = f"{job.optimizer} does not take these ({error})"
        raise JobError([Problem(told, "See that optimizer's documentation", key="optimizer_args")]) from error
