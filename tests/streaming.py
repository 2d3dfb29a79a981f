"""A few steps of training with every tensor updated within the backward pass, wherever weights and states lie."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import FluxTransformer2DModel

from bootstrap.flux_shape import FluxShape
from bootstrap.plan import Plan
from tests.runs import make_job
from trainer.data import Batch
from trainer.make_optimizer import make_optimizer
from trainer.model import build_model, predict
from trainer.streamed import StreamedWeights
from trainer.train import update_in_backward
from trainer.trained import trained_tensors
from trainer.world import World


def train_in_backward(
    plan: Plan,
    shape: FluxShape,
    world: World,
    fill_weights: Callable[[FluxTransformer2DModel], None],
    batch: Batch,
    *,
    steps: int,
    learning_rate: float,
) -> dict[str, torch.Tensor]:
    """The weights after ``steps``, on the CPU."""
    job = make_job(optimizer="AdamW8bit")
    model = build_model(job, plan, shape, world, fill_weights).train()
    tensors = trained_tensors(model, 0, 1)
    optimizer, streamed = make_optimizer(tensors, job, plan, world), StreamedWeights.of(model)
    assert (streamed is None) == (plan.streamed_blocks == 0)
    update_in_backward(tensors, optimizer, streamed, world.device, lambda: True)
    for step in range(steps):
        optimizer.begin_step(step, learning_rate, torch.ones((), device=world.device))
        predict(model, batch, 1.0, False).float().square().mean().backward()
        with torch.no_grad():  # a sample in between, whose forward passes no backward pass follows
            predict(model, batch, 1.0, False)
    if streamed:
        streamed.settle()
    return {tensor.name: tensor.weight.cpu().clone() for tensor in tensors}
