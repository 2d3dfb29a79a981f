"""The average of the weights on a real card: wherever it and the weights lie, it is the same, and showing it loses
nothing of the training."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_streamed import SHAPE, STEPS, make_batch, plan_with, random_weights
from tests.streaming import train_in_backward
from trainer.ema import go_back, show
from trainer.world import World

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]


def averaged(dtype: str, *, host: bool, streamed: int = 0) -> dict[str, torch.Tensor]:
    """Shown between all steps, as samples do, and followed every other step."""
    device = torch.device("cuda", 0)
    world = World(0, 1, device, None)  # type: ignore[arg-type]
    plan = plan_with(streamed, SHAPE.blocks if streamed else 0, ema_on_host=host)
    average: dict[str, object] = {"decay": 0.9, "every": 2, "dtype": dtype}
    batch = make_batch()
    return train_in_backward(
        plan, SHAPE, world, random_weights, batch, steps=STEPS, learning_rate=1e-4, average=average
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_average_on_the_host_is_the_one_on_the_card(dtype: str) -> None:
    resident = averaged(dtype, host=False)
    for streamed in (0, 3):
        found = averaged(dtype, host=True, streamed=streamed)
        assert all(torch.equal(found[name], weight) for name, weight in resident.items()), streamed


def test_the_exchange_is_exact_on_the_card() -> None:
    weight = torch.randn(1 << 20, device="cuda").bfloat16()
    average = torch.randn(1 << 20, device="cuda")
    shown, kept = weight.clone(), average.clone()
    show(shown, kept)
    assert (shown.float() - average).abs().le(average.abs() * 2**-8).all()
    go_back(shown, kept)
    assert torch.equal(shown, weight)
    assert torch.equal(kept, average)
