"""DoRA: the numbers are peft's, on any base, without ever making the adapted weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from jobs.schema import Lora
from tests.loras import SMALL, seem_trained
from tests.trainer.test_adapter import adapted, tensors_of
from tests.trainer.test_model import make_batch
from trainer.dora import Lengths, row_lengths
from trainer.model import predict
from trainer.quantised import QuantisedLinear

TARGETS = ("*.attn.*", "*.ff.net.*", "single_transformer_blocks.*.proj_*", "norm_out.linear", "*.norm1.linear")
LORA = Lora(rank=4, alpha=2, targets=TARGETS, dora=True)


def out_of(model: FluxTransformer2DModel) -> torch.Tensor:
    return predict(model, make_batch(shape=SMALL), 1.0, False)


def by_peft(like: dict[str, torch.Tensor]) -> FluxTransformer2DModel:
    """The same model and adapter, as peft computes it."""
    torch.manual_seed(1)
    model = FluxTransformer2DModel(**SMALL.config()).to(torch.bfloat16).requires_grad_(False)
    names = "|".join({name.partition(".lora_")[0] for name in like})
    model.add_adapter(LoraConfig(r=LORA.rank, lora_alpha=2, target_modules=names, use_dora=True))
    parameters = dict(model.named_parameters())
    for name, tensor in like.items():
        parameters[name].data = tensor.clone()
    return model


def scaled(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = seem_trained(model, 0.05)
    for name, tensor in tensors.items():
        if "magnitude" in name:
            tensor.mul_(1.2)
    return tensors


def test_at_the_start_the_model_is_the_base_to_the_bit() -> None:
    model = adapted(LORA)
    expected = out_of(adapted(Lora(rank=4, targets=TARGETS)))
    assert torch.equal(out_of(model), expected)
    lengths = [name for name in tensors_of(model) if name.endswith("lora_magnitude_vector.default.weight")]
    assert 3 * len(lengths) == len(tensors_of(model)), "A, B and lengths of each layer are trained"


def test_output_and_gradients_are_pefts() -> None:
    ours = adapted(LORA)
    tensors = scaled(ours)
    theirs = by_peft(tensors)
    found, expected = out_of(ours), out_of(theirs)
    assert torch.allclose(found.float(), expected.float(), rtol=0.05, atol=0.05 * expected.float().std().item())
    found.float().square().mean().backward()
    expected.float().square().mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert gradients.keys() == tensors.keys()
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            off = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
            assert off < 0.08, name  # bf16's own, through five blocks


@pytest.mark.parametrize("size", [0.0, 0.01, 1.0])  # of the adapter beside the base
@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8", "nf4"])
def test_lengths_are_those_of_the_adapted_weight(precision: Any, size: float) -> None:
    generator = torch.Generator().manual_seed(5)
    layer: nn.Linear = nn.Linear(256, 96).bfloat16().requires_grad_(False)
    if precision != "bf16":
        quantised = QuantisedLinear(layer, precision)
        quantised.take(layer.weight)
        layer = quantised
    down = torch.randn(8, 256, generator=generator) / 16
    up = size * torch.randn(96, 8, generator=generator) / 8
    found = row_lengths(Lengths(layer).squares, layer, down, up, 0.5)
    expected = (layer.weight.double() + 0.5 * (up.double() @ down.double())).norm(dim=1)
    assert torch.allclose(found.double(), expected, rtol=1e-5 if size == 0 else 2e-3)


def test_a_row_that_the_adapter_takes_away_is_no_number_nowhere() -> None:
    layer = nn.Linear(4, 4).bfloat16().requires_grad_(False)
    found = row_lengths(Lengths(layer).squares, layer, -torch.eye(4), layer.weight.float().clone(), 1.0)
    assert found.isfinite().all()


def compiled(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [lambda model: model, compiled], ids=["eager", "compiled"])
def test_no_matrix_is_made_of_an_adapted_weight(prepare: Callable[[Any], Any]) -> None:
    """The largest thing kept for the backward pass beside the weights is an activation."""
    model = prepare(adapted(LORA)).train()
    sizes = {tuple(module.get_base_layer().weight.shape) for module in model.modules() if isinstance(module, LoraLayer)}
    held = {parameter.data_ptr() for parameter in model.parameters()}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = out_of(model)
    made = [t for t in kept if {tuple(t.shape), tuple(t.shape[::-1])} & sizes and t.data_ptr() not in held]
    assert not made
    out.float().sum().backward()


@pytest.mark.slow
def test_compiled_it_gives_the_same_numbers() -> None:
    plain = adapted(LORA)
    scaled(plain)
    expected = out_of(plain.train())
    expected.float().square().mean().backward()
    other = adapted(LORA)
    scaled(other)
    found = out_of(compiled(other).train())
    found.float().square().mean().backward()
    assert torch.allclose(found, expected, rtol=0.02, atol=0.02)
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        if one.requires_grad:
            assert one.grad is not None
            assert two.grad is not None
            assert (one.grad - two.grad).norm() <= 0.03 * one.grad.norm()
