from __future__ import annotations

import pytest
import torch

from trainer.rounding import round_stochastically

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("first", [0, 12345, 3072 * 15360])
def test_the_gpu_rounds_bit_for_bit_as_the_cpu(first: int) -> None:
    source = torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * 3
    source[:4] = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    keys = {"seed": 7, "step": 3, "first": first}
    on_gpu = round_stochastically(source.cuda(), "some.weight", **keys)
    assert torch.equal(on_gpu.cpu(), round_stochastically(source, "some.weight", **keys))


def test_a_nan_stays_one_on_the_gpu() -> None:
    source = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32).cuda()
    assert round_stochastically(source, "w", seed=0, step=0, first=0).isnan().all()
