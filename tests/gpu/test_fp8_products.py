"""Products in fp8 on a card: the same compiled, with right gradients, in a block of FLUX's width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bootstrap.flux_shape import FluxShape
from tests.gpu.test_streamed import make_batch, random_weights
from tests.runs import PLAN, make_job
from trainer.fp8_products import SCALINGS, Scaling
from trainer.model import build_model, predict
from trainer.self_check import distance
from trainer.world import World

needs = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.skipif(not needs, reason="needs a GPU with fp8"), pytest.mark.timeout(300)]

SHAPE = FluxShape(double_blocks=1, single_blocks=2)


def gradients(products: str, compiled: bool) -> dict[str, torch.Tensor]:
    device = torch.device("cuda", 0)
    world = World(0, 1, device, None)  # type: ignore[arg-type]
    torch.compiler.reset()
    plan = replace(PLAN, device="cuda", compile=compiled, products=products)
    model = build_model(make_job(), plan, SHAPE, world, random_weights).train()
    predict(model, make_batch(), 1.0, False).float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.dim() > 1}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_off_by_what_fp8_gives(scaling: Scaling, compiled: bool) -> None:
    exact, found = gradients("bf16", compiled), gradients(scaling, compiled)
    assert found.keys() == exact.keys()
    errors = {name: distance(found[name], expected) for name, expected in exact.items()}
    assert max(errors.values()) < 0.25, errors
    assert min(errors.values()) > 0
