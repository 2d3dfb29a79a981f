"""A few steps of training with every tensor updated within the backward pass, wherever weights and states lie."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from diffusers import FluxTransformer2DModel

from bootstrap.flux_shape import FluxShape
from bootstrap.plan import Plan
from tests.runs import make_job
from trainer.data import Batch
from trainer.ema import Ema
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
    average: dict[str, object] | None = None,
) -> dict[str, torch.Tensor]:
    """The weights after ``steps``, on the CPU; with ``average`` (the job's ``ema``) their average, shown and put back
    between the steps."""
    job = make_job(optimizer="AdamW8bit", ema=average)
    model = build_model(job, plan, shape, world, fill_weights).train()
    tensors = trained_tensors(model, 0, 1)
    optimizer, streamed = make_optimizer(tensors, job, plan, world), StreamedWeights.of(model)
    assert (streamed is None) == (plan.streamed_blocks == 0)
    ema = Ema(job.ema, job.seed, model, tensors, 0, host=plan.ema_on_host) if job.ema else None
    update_in_backward(tensors, optimizer, ema, streamed, world.device, lambda: True)
    for step in range(steps):
        optimizer.begin_step(step, learning_rate, torch.ones((), device=world.device))
        if ema:
            ema.begin_step(step)
        predict(model, batch, 1.0, False).float().square().mean().backward()
        if ema:
            ema.finish_step()
        # A sample in between, whose forward passes no backward pass follows.
        with ema.shown() if ema else nullcontext(), torch.no_grad():
            predict(model, batch, 1.0, False)
    if streamed:
        streamed.settle()
    if ema:
        with ema.shown():
            return {tensor.name: tensor.weight.cpu().clone() for tensor in tensors}
    return {tensor.name: tensor.weight.cpu().clone() for tensor in tensors}
