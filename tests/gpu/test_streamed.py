"""Weights and states on the host, with streams and a real card: to the bit what they are on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import FluxTransformer2DModel

from bootstrap.flux_shape import FluxShape
from tests.runs import PLAN, make_job
from trainer.data import Batch
from trainer.flow import image_ids
from trainer.make_optimizer import make_optimizer
from trainer.model import build_model, predict
from trainer.streamed import StreamedWeights
from trainer.trained import plain_name, trained_tensors
from trainer.world import World

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

SHAPE = FluxShape(double_blocks=3, single_blocks=5)  # full width: copies take their time
STEPS = 4


def random_weights(model: FluxTransformer2DModel) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters(), key=lambda item: plain_name(item[0])):
            random = torch.empty(parameter.shape, device="cuda", dtype=torch.bfloat16)
            parameter.copy_(random.normal_(0, 0.02, generator=generator))


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).bfloat16()

    return Batch(
        noisy=random(1, 256, 64),
        target=random(1, 256, 64).float(),
        mask=torch.ones(1, 256, 4),
        sigma=torch.full((1,), 0.5),
        text=random(1, 512, 4096),
        pooled=random(1, 768),
        text_mask=torch.ones(1, 512, dtype=torch.bool),
        image_ids=image_ids(32, 32),
        weights=torch.ones(1),
    ).to(torch.device("cuda"))


def trained(streamed: int, states: int, compiled: bool) -> dict[str, torch.Tensor]:
    device = torch.device("cuda", 0)
    world = World(0, 1, device, None)  # type: ignore[arg-type]
    plan = replace(
        PLAN,
        device="cuda",
        checkpointed_blocks=SHAPE.blocks,
        streamed_blocks=streamed,
        host_state_blocks=states,
        optimizer_in_backward=True,
        compile=compiled,
    )
    job = make_job(optimizer="AdamW8bit")
    torch.compiler.reset()
    model = build_model(job, plan, SHAPE, world, random_weights).train()
    tensors = trained_tensors(model, 0, 1)
    stepper, weights = make_optimizer(tensors, job, plan, world), StreamedWeights.of(model)
    for tensor in tensors:

        def use(_: torch.Tensor, tensor=tensor) -> None:  # type: ignore[no-untyped-def]
            stepper.update(tensor)
            if weights:
                weights.updated(tensor.parameter)

        tensor.parameter.register_post_accumulate_grad_hook(use)
    batch = make_batch()
    for step in range(STEPS):
        stepper.begin_step(step, 1e-4, torch.ones((), device=device))
        predict(model, batch, 1.0, False).float().square().mean().backward()
        with torch.no_grad():
            predict(model, batch, 1.0, False)
    if weights:
        weights.settle()
    torch.cuda.synchronize()
    return {tensor.name: tensor.weight.cpu() for tensor in tensors}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_lies_on_the_host_changes_nothing(compiled: bool) -> None:
    resident = trained(0, 0, compiled)
    for streamed, states in ((0, 4), (3, SHAPE.blocks), (SHAPE.blocks, SHAPE.blocks)):
        found = trained(streamed, states, compiled)
        assert all(torch.equal(found[name], weight) for name, weight in resident.items()), (streamed, states)
