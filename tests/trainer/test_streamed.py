"""Training with weights and states on the host is training, to the bit. On the CPU; tests/gpu has the same on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel

from bootstrap.bases import FLUX_TINY
from tests.runs import PLAN, make_job, make_trained, make_world
from tests.streaming import train_in_backward
from tests.trainer.test_model import make_batch
from trainer.blockwise import Blockwise
from trainer.make_optimizer import make_optimizer
from trainer.model import build_model
from trainer.streamed import StreamedStates, StreamedWeights
from trainer.trained import plain_name
from trainer.world import World

STEPS = 3


def random_weights(model: FluxTransformer2DModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters(), key=lambda item: plain_name(item[0])):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def trained(world: World, streamed: int) -> dict[str, torch.Tensor]:
    plan = replace(PLAN, checkpointed_blocks=FLUX_TINY.blocks, streamed_blocks=streamed, optimizer_in_backward=True)
    return train_in_backward(plan, FLUX_TINY, world, random_weights, make_batch(), steps=STEPS, learning_rate=1e-2)


@pytest.fixture(scope="module")
def world(control: dist.ProcessGroup) -> World:
    return make_world(control)


@pytest.fixture(scope="module")
def resident(world: World) -> dict[str, torch.Tensor]:
    return trained(world, 0)


@pytest.mark.parametrize("count", [1, 2, FLUX_TINY.blocks])
def test_weights_on_the_host_change_nothing(count: int, resident: dict[str, torch.Tensor], world: World) -> None:
    streamed = trained(world, count)
    assert streamed.keys() == resident.keys()
    assert all(torch.equal(streamed[name], weight) for name, weight in resident.items())


def test_the_weights_of_streamed_blocks_are_in_the_hosts_slab(world: World) -> None:
    plan = replace(PLAN, checkpointed_blocks=FLUX_TINY.blocks, streamed_blocks=1)
    model = build_model(make_job(), plan, FLUX_TINY, world, random_weights)
    weights = StreamedWeights.of(model)
    assert weights
    (block,) = weights.ring.blocks
    start, end = block.host.data_ptr(), block.host.data_ptr() + block.host.numel()
    inside = [start <= parameter.data_ptr() < end for parameter in model.parameters()]
    assert sum(inside) == len(weights.parameters[0])


def test_streamed_states_change_nothing(world: World) -> None:
    """As Blockwise uses them on a GPU, but with its steps on the CPU."""
    names = {f"single_transformer_blocks.{block}.w": torch.randn(64, 256) for block in range(5)}
    plain = make_optimizer(make_trained(names), make_job(optimizer="AdamW8bit"), PLAN, world)
    assert isinstance(plain, Blockwise)
    groups = [{name: plain.states[name]} for name in reversed(names)]
    streamed = StreamedStates(groups, torch.device("cpu"))
    for turn in range(4):
        for name in reversed(names):
            for key, state in streamed.on_gpu(name).items():
                assert (state == turn).all(), (name, key)
                state += 1
            streamed.done(name)
        if turn == 1:
            streamed.on_host()
    assert all((state == 4).all() for states in streamed.on_host().values() for state in states.values())
