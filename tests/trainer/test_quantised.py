"""The quantised base: what it is off by, that it is the same each time, and that memory holds no more than it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bitsandbytes import functional as bitsandbytes
from diffusers import FluxTransformer2DModel
from torch import nn

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.precision import ERRORS, Precision, base_bytes, quantised_tensors
from bootstrap.state import State
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import Volume
from tests.runs import PLAN, make_job, make_world
from tests.trainer.test_model import files_of, make_batch
from tests.training import Trained, fill_volume, trained
from trainer.model import Layout, bare_model, build_model, fill, predict, sources
from trainer.quantised import QuantisedLinear, dequantise, quantise, quantised_linear
from trainer.world import World

PRECISIONS: tuple[Precision, ...] = ("int8", "fp8", "nf4")


@pytest.fixture
def world(control: dist.ProcessGroup) -> World:
    return make_world(control)


def weight(rows: int = 64, columns: int = 3072) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).mul(0.02).bfloat16()


def off_by(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())


def layer(precision: Precision, columns: int = 256, rows: int = 64) -> QuantisedLinear:
    plain = nn.Linear(columns, rows).bfloat16().requires_grad_(False)
    made = QuantisedLinear(plain, precision)
    made.take(plain.weight)
    return made


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_weight_is_off_by(precision: Precision) -> None:
    codes, scales = quantise(weight(), precision)
    found = dequantise(codes, scales)
    assert found.dtype == torch.bfloat16
    assert off_by(found, weight()) == pytest.approx(ERRORS[precision], rel=0.05)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_quantised_weight_is_its_own(precision: Precision) -> None:
    """Nothing is lost by quantising again what came out: scales and codes fit each other."""
    first = dequantise(*quantise(weight(), precision))
    assert off_by(dequantise(*quantise(first, precision)), first) < 3e-3


def test_nf4_has_the_codes_of_bitsandbytes() -> None:
    packed, _ = bitsandbytes.quantize_4bit(weight(), blocksize=64, quant_type="nf4")
    codes, _ = quantise(weight(), "nf4")
    assert (packed.flatten() != codes.flatten()).float().mean() < 1e-3  # those between two, by the scale's rounding


@pytest.mark.parametrize("precision", PRECISIONS)
def test_zeros_stay_zeros_and_what_is_no_number_stays_none(precision: Precision) -> None:
    assert not dequantise(*quantise(torch.zeros(2, 128), precision)).any()
    for broken in (float("nan"), float("inf")):
        spoiled = torch.ones(2, 128)
        spoiled[1, 5] = broken
        found = dequantise(*quantise(spoiled, precision))
        assert not found[1].isfinite().all()
        assert off_by(found[0], torch.ones(128)) < 3e-3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_quantised_by_themselves(precision: Precision) -> None:
    whole, parts = layer(precision), layer(precision)
    rows = weight(64, 256)
    whole.take(rows)
    parts.take(rows[40:], 40)
    parts.take(rows[:40])
    assert torch.equal(whole.weight, parts.weight)


# ---------------------------------------------------------------- the product


@pytest.mark.parametrize("precision", PRECISIONS)
def test_product_and_gradient_are_those_of_the_dequantised_weight(precision: Precision) -> None:
    quantised = layer(precision)
    x = torch.randn(2, 256, 5, dtype=torch.bfloat16).transpose(1, 2)  # not dense
    given, plain = (x.clone().requires_grad_() for _ in range(2))
    output, expected = quantised(given), F.linear(plain, quantised.weight, quantised.bias)
    assert off_by(output, expected) < 5e-3  # sums in another order
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected.backward(gradient)
    assert given.grad is not None
    assert plain.grad is not None
    assert off_by(given.grad, plain.grad) < 5e-3
    assert not quantised.bias.requires_grad


@pytest.mark.parametrize("precision", ["int8", "nf4"])  # the check itself cannot compare fp8 tensors
def test_the_operation_is_what_the_compiler_takes_it_for(precision: Precision) -> None:
    quantised = layer(precision)
    x = torch.randn(3, 256, dtype=torch.bfloat16, requires_grad=True)
    torch.library.opcheck(quantised_linear, (x, quantised.codes, quantised.scales, quantised.bias))


# ---------------------------------------------------------------- the model


def build(
    folder: Path, world: World, precision: Precision, layout: Layout = "bfl", **plan: Any
) -> FluxTransformer2DModel:
    places = sources(FLUX_TINY, files_of(folder, layout), layout)
    planned = replace(PLAN, base_precision=precision, **plan)
    job = make_job(method="lora", lora={"rank": 4})
    return build_model(job, planned, FLUX_TINY, world, lambda model: fill(model, places, world))


def base_of(model: FluxTransformer2DModel) -> dict[str, torch.Tensor]:
    """The whole base in bf16, by diffusers' names."""
    found = {
        f"{name.removesuffix('.base_layer')}.weight": layer.weight
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.RMSNorm)) and "lora_" not in name
    }
    return {name: found[name].detach() for name in FLUX_TINY.tensors() if name in found}


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_matrix_of_the_blocks_is_the_files_quantised(
    precision: Precision, layout: Layout, flux_tiny: Path, world: World
) -> None:
    plain, quantised = (base_of(build(flux_tiny, world, each, layout)) for each in ("bf16", precision))
    inside = quantised_tensors(FLUX_TINY)
    assert plain.keys() == quantised.keys()
    assert inside.keys() < plain.keys()
    for name, expected in plain.items():
        same = dequantise(*quantise(expected, precision)) if name in inside else expected
        assert torch.equal(quantised[name], same), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_plan_knows_the_bytes(precision: Precision) -> None:
    model = bare_model(FLUX_TINY, precision)
    held = sum(t.numel() * t.dtype.itemsize for t in [*model.parameters(), *model.buffers()])
    assert held == base_bytes(FLUX_TINY, precision)
    assert held < base_bytes(FLUX_TINY, "bf16") * 0.6


def test_the_files_bytes_are_not_held(flux_tiny: Path, world: World) -> None:
    """The quantised model has no bf16 matrix in it, nor another way to one."""
    model = build(flux_tiny, world, "nf4")
    inside = set(quantised_tensors(FLUX_TINY).values())
    held = [*model.parameters(), *model.buffers()]
    assert not [t.shape for t in held if tuple(t.shape) in inside and t.dtype == torch.bfloat16 and t.shape[0] > 256]
    assert sum(t.numel() for t in read_tensors(flux_tiny / SINGLE_FILE).values()) > sum(t.numel() for t in held)


def gradients(model: FluxTransformer2DModel) -> dict[str, torch.Tensor]:
    model.train()
    predict(model, make_batch(), 1.0, False).float().square().sum().backward()
    return {name.replace("_orig_mod.", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_the_adapter_is_trained(precision: Precision, flux_tiny: Path, world: World) -> None:
    found, plain = (gradients(build(flux_tiny, world, each)) for each in (precision, "bf16"))
    assert found.keys() == plain.keys()
    assert 0 < off_by(flat(found), flat(plain)) < 8 * ERRORS[precision]


@pytest.mark.parametrize("precision", ["nf4"])  # compiling takes seconds; the test after this traces the others too
def test_compiled_and_checkpointed_it_gives_the_same_gradients(
    precision: Precision, flux_tiny: Path, world: World
) -> None:
    """With the backend that traces and differentiates as on a GPU, but generates no code."""
    expected = gradients(build(flux_tiny, world, precision))
    model = build(flux_tiny, world, precision, checkpointed_blocks=2)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert off_by(flat(found), flat(expected)) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_dequantised_weight_is_kept_for_the_backward_pass(
    precision: Precision, compiled: bool, flux_tiny: Path, world: World
) -> None:
    model = build(flux_tiny, world, precision).train()
    if compiled:
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    sizes = {size for size in quantised_tensors(FLUX_TINY).values() if size[0] > 256}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        predict(model, make_batch(), 1.0, False)
    assert any(t.dtype == layer(precision).codes.dtype for t in kept)
    assert not [t for t in kept if {tuple(t.shape), tuple(t.shape[::-1])} & sizes and t.dtype.itemsize > 1]


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Volume:
    return fill_volume(tmp_path_factory.mktemp("volume"), flux_tiny)


def run(volume: Volume, name: str, precision: Precision, resume: State | None = None, steps: int = 6) -> Trained:
    keys: dict[str, Any] = {"method": "lora", "lora": {"rank": 4}, "learning_rate": 1e-2, "steps": steps}
    return trained(volume, resume, name=name, plan={"base_precision": precision}, **keys)


def test_a_run_goes_on_over_the_same_base_and_learns_as_over_the_whole_one(volume: Volume) -> None:
    plain, whole = run(volume, "bf16", "bf16"), run(volume, "nf4", "nf4")
    losses, expected = (torch.tensor(each.values("loss")) for each in (whole, plain))
    assert 0 < off_by(losses, expected) < 0.02
    half = run(volume, "half", "nf4", steps=3)
    rest = run(volume, "rest", "nf4", half.states[-1])
    assert half.values("loss") + rest.values("loss") == whole.values("loss")
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in rest.weights.items())
