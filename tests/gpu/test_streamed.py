"""Weights and states on the host, with streams and a real card: to the bit what they are on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from bootstrap.flux_shape import FluxShape
from bootstrap.plan import Plan
from tests.runs import PLAN
from tests.streaming import train_in_backward
from trainer.data import Batch
from trainer.flow import image_ids
from trainer.trained import plain_name
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


def plan_with(streamed: int, states: int, **more: Any) -> Plan:
    """With weights and states of so many blocks on the host."""
    return replace(
        PLAN,
        device="cuda",
        checkpointed_blocks=SHAPE.blocks,
        streamed_blocks=streamed,
        host_state_blocks=states,
        optimizer_in_backward=True,
        **more,
    )


def trained(streamed: int, states: int, compiled: bool) -> dict[str, torch.Tensor]:
    device = torch.device("cuda", 0)
    world = World(0, 1, device, None)  # type: ignore[arg-type]
    torch.compiler.reset()
    plan = plan_with(streamed, states, compile=compiled)
    return train_in_backward(plan, SHAPE, world, random_weights, make_batch(), steps=STEPS, learning_rate=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_lies_on_the_host_changes_nothing(compiled: bool) -> None:
    resident = trained(0, 0, compiled)
    for streamed, states in ((0, 4), (3, SHAPE.blocks), (SHAPE.blocks, SHAPE.blocks)):
        found = trained(streamed, states, compiled)
        assert all(torch.equal(found[name], weight) for name, weight in resident.items()), (streamed, states)
