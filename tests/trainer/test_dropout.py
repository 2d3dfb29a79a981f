"""Dropout of an adapter: the share it says, and the same for an image wherever and however often it is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from jobs.schema import Lora
from tests.loras import SMALL, seem_trained
from tests.trainer.test_model import make_batch
from trainer.adapter import add_adapter
from trainer.data import Batch
from trainer.dropout import kept
from trainer.model import checkpoint_blocks, predict

KEYS = torch.tensor([[123, 456], [789, 2**32 - 1], [2**31, 5]])


def adapted(dropout: float, images: int = 3, **lora: Any) -> FluxTransformer2DModel:
    torch.manual_seed(1)
    model = FluxTransformer2DModel(**SMALL.config()).to(torch.bfloat16)
    add_adapter(model, Lora(rank=4, targets="all-linear", dropout=dropout, **lora), 42, images)
    seem_trained(model, 0.05)
    return model.train()


def batch_of(images: slice) -> Batch:
    whole = make_batch(3, SMALL)
    parts = {n: getattr(whole, n)[images] for n in Batch.__dataclass_fields__ if n not in ("image_ids", "dropout_keys")}
    return Batch(**parts, image_ids=whole.image_ids, dropout_keys=KEYS[images])


def gradients(model: FluxTransformer2DModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_what_is_left_out(share: float) -> None:
    found = kept(torch.empty(3, 1000, 64), KEYS, share)
    for image in found:
        assert 1 - image.float().mean().item() == pytest.approx(share, abs=0.004)
        columns = image.float().mean(dim=0)  # of each rank: no row or column is favoured
        assert columns.std() < 1.3 * (share * (1 - share) / 1000) ** 0.5 + 1e-6
    if share:
        same = (found[0] == found[1]).float().mean().item()  # independent of each other
        assert same == pytest.approx(share**2 + (1 - share) ** 2, abs=0.006)


def test_it_is_pinned() -> None:
    """A resumed run draws by it: another result would be another run."""
    found = kept(torch.empty(1, 4, 16), KEYS[1:2], 0.5).int().flatten().tolist()
    assert "".join(map(str, found)) == "1110101010110101110111110001000001011011011011011100110100111100"


def test_an_image_loses_the_same_values_in_any_pass() -> None:
    model = adapted(0.3)
    together = predict(model, batch_of(slice(0, 3)), 1.0, False)
    alone = torch.cat([predict(model, batch_of(slice(i, i + 1)), 1.0, False) for i in range(3)])
    assert torch.allclose(together.float(), alone.float(), atol=0.02)
    assert torch.equal(together, predict(model, batch_of(slice(0, 3)), 1.0, False))
    other = replace(batch_of(slice(0, 3)), dropout_keys=KEYS + 1)
    assert not torch.allclose(together.float(), predict(model, other, 1.0, False).float(), atol=0.02)


def test_samples_are_drawn_with_the_whole_adapter() -> None:
    dropping, plain = adapted(0.3), adapted(0.0)
    assert torch.equal(
        predict(dropping.eval(), batch_of(slice(0, 3)), 1.0, False), predict(plain, batch_of(slice(0, 3)), 1.0, False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["checkpointed", "compiled"])
@pytest.mark.parametrize("dora", [False, True])
def test_gradients_are_the_same_computed_again_and_compiled(how: str, dora: bool) -> None:
    plain, other = adapted(0.3, dora=dora), adapted(0.3, dora=dora)
    if how == "checkpointed":
        checkpoint_blocks(other, SMALL.blocks)
    else:
        other.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    for model in (plain, other):
        predict(model, batch_of(slice(0, 2)), 1.0, False).float().square().mean().backward()
    off = (gradients(plain) - gradients(other)).norm() / gradients(plain).norm()
    assert off == 0 if how == "checkpointed" else off < 0.02
