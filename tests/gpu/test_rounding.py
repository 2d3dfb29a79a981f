"""On a GPU rounding is compiled; its bits are those of a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.rounding import round_stochastically

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.mark.parametrize(("shape", "first"), [((300, 7), 0), ((300, 7), 2100), ((5,), 3), ((0, 9), 0), ((1000, 3072), 1)])
def test_a_gpu_rounds_as_a_cpu(shape: tuple[int, ...], first: int) -> None:
    source = torch.randn(shape)
    source.view(-1)[:2] = torch.tensor([math.inf, -math.inf])[: source.numel()]
    for step in range(3):
        results = [
            round_stochastically(source.to(device), "some.weight", seed=42, step=step, first=first).cpu()
            for device in ("cpu", "cuda")
        ]
        assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))


def test_nan_stays() -> None:
    broken = torch.full((1000,), math.inf, device="cuda") - math.inf
    assert round_stochastically(broken, "some.weight", seed=42, step=0, first=0).isnan().all()
