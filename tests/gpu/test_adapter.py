"""DoRA and dropout on a GPU: dropout's choice is the CPU's to the bit, and compiled code gives eager's gradients."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel

from bootstrap.flux_shape import FluxShape
from jobs.schema import Lora
from tests.loras import seem_trained
from tests.trainer.test_model import make_batch
from trainer.adapter import add_adapter
from trainer.dropout import kept
from trainer.model import predict

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

SHAPE = FluxShape(
    double_blocks=1, single_blocks=1, heads=4, head_size=64, text_size=128, pooled_size=64, rope_axes=(8, 28, 28)
)


def test_what_is_left_out_is_the_same_on_every_device() -> None:
    keys = torch.tensor([[123, 456], [2**32 - 1, 2**31]])
    like = torch.empty(2, 4608, 64)
    expected = kept(like, keys, 0.3)
    assert torch.equal(kept(like.cuda(), keys.cuda(), 0.3).cpu(), expected)
    compiled = torch.compile(kept, fullgraph=True)
    assert torch.equal(compiled(like.cuda(), keys.cuda(), 0.3).cpu(), expected)


def gradients(lora: Lora, compiled: bool) -> torch.Tensor:
    torch.manual_seed(1)
    model = FluxTransformer2DModel(**SHAPE.config()).to("cuda", torch.bfloat16)
    add_adapter(model, lora, 42, 2)
    seem_trained(model, 0.02)
    if compiled:
        model.compile_repeated_blocks(fullgraph=True)
    batch = make_batch(2, SHAPE).to(torch.device("cuda"))
    predict(model.train(), batch, 1.0, False).float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("lora", [{"dora": True}, {"dropout": 0.3}, {"dora": True, "dropout": 0.3, "rslora": True}])
def test_compiled_it_gives_eagers_gradients(lora: dict[str, object]) -> None:
    keys = Lora.model_validate({"rank": 16, **lora})
    expected = gradients(keys, compiled=False)
    assert (gradients(keys, compiled=True) - expected).norm() < 0.03 * expected.norm()
