"""Products in fp8, by torch's own on the CPU. How fast they are, and that compiled ones are the same, is for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bootstrap.bases import FLUX_TINY
from tests.training import fill_volume, trained
from trainer.fp8_products import SCALINGS, Fp8Linear, Scaling, codes, multiply_in_fp8, product
from trainer.model import bare_model
from trainer.self_check import distance


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("by_row", [True, False])
def test_a_product_is_off_by_what_three_bits_of_mantissa_give(by_row: bool) -> None:
    a, b = random(32, 256), random(48, 256, seed=1)
    exact = a.float() @ b.float().t()
    assert 0.02 < distance(product(a, b, by_row), exact) < 0.05
    outlier = a.clone()
    outlier[3] *= 1e5  # one row that is large swamps the others where they share a scale
    rest = [0, 1, 2, *range(4, 32)]
    error = distance(product(outlier, b, by_row)[rest], exact[rest])
    assert error < 0.05 if by_row else error > 0.1


@pytest.mark.parametrize("by_row", [True, False])
def test_codes_use_the_whole_range_and_pass_on_what_is_no_number(by_row: bool) -> None:
    found, scale = codes(random(16, 64), by_row)
    assert found.dtype == torch.float8_e4m3fn
    assert found.float().abs().max() == 448
    assert scale.shape == ((16, 1) if by_row else ())
    zero, _ = codes(torch.zeros(16, 64, dtype=torch.bfloat16), by_row)
    assert not zero.float().any()
    broken = random(16, 64)
    broken[2, 3] = torch.nan
    assert product(broken, random(16, 64), by_row)[2].isnan().all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tokens", [(2, 40), (1, 33)], ids=["fp8", "no multiple of 16"])
def test_a_layer_and_its_gradients(scaling: Scaling, tokens: tuple[int, int]) -> None:
    like = nn.Linear(64, 96).bfloat16()
    layer = Fp8Linear(like, scaling)
    assert layer.weight is like.weight
    outputs: list[Any] = []
    for each in (like, layer):
        x = random(*tokens, 64).requires_grad_()
        each.zero_grad()
        output = each(x)
        output.backward(random(*output.shape, seed=2))
        outputs.append((output.detach(), x.grad, each.weight.grad, each.bias.grad))
    exact, found = outputs
    assert [distance(a, b) < 0.06 for a, b in zip(found, exact, strict=True)] == [True] * 4
    assert torch.equal(found[3], exact[3])


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer = Fp8Linear(nn.Linear(64, 96).bfloat16().requires_grad_(False), "fp8-rowwise")
    x = random(32, 64).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


def test_only_layers_that_see_every_token_take_part() -> None:
    model = bare_model(FLUX_TINY)
    names = multiply_in_fp8(model, "fp8-rowwise")
    assert len(names) == FLUX_TINY.double_blocks * 12 + FLUX_TINY.single_blocks * 5
    assert not any("norm" in name or "embed" in name for name in names)
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in bare_model(FLUX_TINY).named_parameters()]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_trains_in_the_products_own_loop(method: str, tmp_path: Path, flux_tiny: Path) -> None:
    """As close to bf16 as fp8 is, and not bf16: the adapter's base and all weights go through it."""
    volume = fill_volume(tmp_path / "volume", flux_tiny)
    keys: dict[str, Any] = {"method": method, "steps": 3, "images_per_step": 2}
    bf16 = trained(volume, name="bf16", **keys)
    fp8 = trained(volume, name="fp8", plan={"products": "fp8-rowwise"}, **keys)
    assert fp8.values("loss") == pytest.approx(bf16.values("loss"), rel=0.02)
    assert fp8.values("loss") != bf16.values("loss")
    assert fp8.weights.keys() == bf16.weights.keys()
