"""LoRA: which layers, the same start always, and files whose product is the adapter's, number for number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from torch import nn

from bootstrap.estimate import work_of
from bootstrap.flux_shape import FluxShape
from bootstrap.layout import bfl_tensors, placements
from bootstrap.lora_targets import target_layers
from jobs.problem import JobError
from jobs.schema import Lora
from tests.runs import make_job
from trainer.adapter import AdapterError, add_adapter, from_kohya, to_kohya

SHAPE = FluxShape(
    double_blocks=2,
    single_blocks=1,
    heads=2,
    head_size=16,
    text_size=24,
    pooled_size=12,
    channels=16,
    rope_axes=(4, 6, 6),
)
TARGETS: dict[str, Any] = {
    "all-linear": "all-linear",
    "attention+feed-forward": "attention+feed-forward",
    "attention": "attention",
    "some of a fused matrix": ("*.attn.to_k", "*.attn.add_v_proj", "single_transformer_blocks.0.proj_mlp"),
    "the last modulation": ("norm_out.linear",),
}


def adapted(lora: Lora, seed: int = 42, shape: FluxShape = SHAPE) -> FluxTransformer2DModel:
    torch.manual_seed(1)
    model = FluxTransformer2DModel(**shape.config()).to(torch.bfloat16)
    add_adapter(model, lora, seed)
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter with random numbers in both halves, as after some training."""
    generator = torch.Generator().manual_seed(7)
    tensors = tensors_of(model)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return tensors


def layers_of(model: nn.Module) -> set[str]:
    return {name.partition(".lora_")[0] for name in tensors_of(model)}


LINEAR = [
    name for name, module in FluxTransformer2DModel(**SHAPE.config()).named_modules() if isinstance(module, nn.Linear)
]

# ---------------------------------------------------------------- which layers


def test_all_linear_layers() -> None:
    assert set(target_layers(LINEAR, "all-linear")) == set(LINEAR)
    assert len(LINEAR) == 6 + 2 + 2 * (2 + 8 + 4) + (1 + 2 + 3) + 2


def test_attention_layers() -> None:
    double = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    expected = {f"transformer_blocks.{i}.attn.{name}" for i in (0, 1) for name in double}
    expected |= {f"single_transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")}
    assert set(target_layers(LINEAR, "attention")) == expected


def test_attention_and_feed_forward_layers() -> None:
    added = set(target_layers(LINEAR, "attention+feed-forward")) - set(target_layers(LINEAR, "attention"))
    expected = {
        f"transformer_blocks.{i}.{ff}.net.{n}" for i in (0, 1) for ff in ("ff", "ff_context") for n in ("0.proj", "2")
    }
    expected |= {"single_transformer_blocks.0.proj_mlp", "single_transformer_blocks.0.proj_out"}
    assert added == expected


def test_patterns() -> None:
    assert target_layers(LINEAR, ["proj_out"]) == ["proj_out"]
    assert target_layers(LINEAR, ["*.1.attn.to_[qk]", "x_*"]) == [
        "x_embedder",
        "transformer_blocks.1.attn.to_q",
        "transformer_blocks.1.attn.to_k",
    ]


def test_a_pattern_that_means_nothing_is_told() -> None:
    with pytest.raises(JobError, match=r"no layer of this base is called 'to_q'(.|\n)*'\*\.attn1\.\*'"):
        adapted(Lora(rank=4, targets=("to_q", "*.attn1.*", "proj_out")))


@pytest.mark.parametrize("targets", [*TARGETS.values(), ("proj_out",)])
def test_exactly_these_layers_get_an_adapter(targets: Any) -> None:
    """peft takes a name for the end of others: proj_out for every single block's."""
    model = adapted(Lora(rank=4, targets=targets))
    assert layers_of(model) == set(target_layers(LINEAR, targets))
    assert all(".lora_" in name for name in tensors_of(model)), "and nothing else is trained"


# ---------------------------------------------------------------- how it starts


def test_an_adapter_is_float32_and_changes_nothing_yet() -> None:
    tensors = tensors_of(adapted(Lora(rank=4, targets="all-linear")))
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert tensor.abs().max() <= bound
            assert tensor.std().item() == pytest.approx(bound / 3**0.5, rel=0.35)


def test_it_starts_the_same_every_time_and_by_each_layers_name_alone() -> None:
    torch.manual_seed(1)
    one = tensors_of(adapted(Lora(rank=4, targets="all-linear")))
    torch.rand(100)
    two = tensors_of(adapted(Lora(rank=4, targets="attention")))
    assert all(torch.equal(one[name], two[name]) for name in two)
    other = tensors_of(adapted(Lora(rank=4, targets="attention"), seed=43))
    downs = [name for name in two if ".lora_A." in name]
    assert not any(torch.equal(two[name], other[name]) for name in downs)
    assert len({tuple(two[name].flatten()[:4].tolist()) for name in downs}) == len(downs)


# ---------------------------------------------------------------- the file


def peft_deltas(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the adapter adds to each weight, by peft."""
    return {
        f"{name}.weight": module.get_delta_weight("default")
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def kohya_deltas(file: dict[str, torch.Tensor], shape: FluxShape) -> dict[str, torch.Tensor]:
    """What the file adds to each tensor of BFL's layout: alpha / rank * up @ down, as every tool reads it."""
    deltas = {}
    for name in bfl_tensors(shape):
        key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        if f"{key}.lora_up.weight" in file:
            up, down = file[f"{key}.lora_up.weight"], file[f"{key}.lora_down.weight"]
            deltas[name] = file[f"{key}.alpha"] / down.shape[0] * (up @ down)
    return deltas


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("alpha", [4.0, 1.0])
def test_the_file_adds_what_the_adapter_adds(targets: Any, alpha: float) -> None:
    model = adapted(Lora(rank=4, alpha=alpha, targets=targets))
    file = to_kohya(trained(model), alpha)
    expected = {name: torch.zeros(size) for name, size in bfl_tensors(SHAPE).items()}
    for name, delta in peft_deltas(model).items():
        for rows in placements(SHAPE)[name]:
            part = delta[rows.first : rows.first + rows.count]
            expected[rows.file_name][rows.file_first : rows.file_first + rows.count] = part
    found = kohya_deltas(file, SHAPE)
    assert found, "nothing was compared"
    assert len(file) == 3 * len(found)
    for name, delta in expected.items():
        assert torch.allclose(found.get(name, torch.zeros(())), delta, atol=1e-5), name


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
def test_the_parts_can_be_cut_out_again(targets: Any) -> None:
    tensors = trained(adapted(Lora(rank=3, targets=targets)))
    again = from_kohya(to_kohya(tensors, 3.0), list(tensors), 3, 3.0)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_the_last_modulations_halves_change_places() -> None:
    tensors = trained(adapted(Lora(rank=2, targets=("norm_out.linear",))))
    up = to_kohya(tensors, 2.0)["lora_unet_final_layer_adaLN_modulation_1.lora_up.weight"]
    scale, shift = tensors["norm_out.linear.lora_B.default.weight"].chunk(2)
    assert torch.equal(up, torch.cat([shift, scale]))


def test_alpha_counts_for_every_fused_part() -> None:
    file = to_kohya(trained(adapted(Lora(rank=4, alpha=2, targets="attention+feed-forward"))), 2.0)
    alphas = {name: file[name].item() for name in file if name.endswith(".alpha")}
    assert alphas["lora_unet_double_blocks_0_img_attn_qkv.alpha"] == 6
    assert alphas["lora_unet_single_blocks_0_linear1.alpha"] == 8
    assert alphas["lora_unet_double_blocks_1_txt_mlp_2.alpha"] == 2


def test_names_and_shapes_of_a_block() -> None:
    """P29: what ComfyUI and Forge look for."""
    w = SHAPE.width
    file = to_kohya(trained(adapted(Lora(rank=4, targets="attention+feed-forward"))), 4.0)
    names = {name: tuple(tensor.shape) for name, tensor in file.items() if "_blocks_0_" in name and "alpha" not in name}
    parts = {
        "double_blocks_0_img_attn_qkv": (12, 3 * w, w),
        "double_blocks_0_img_attn_proj": (4, w, w),
        "double_blocks_0_img_mlp_0": (4, 4 * w, w),
        "double_blocks_0_img_mlp_2": (4, w, 4 * w),
        "double_blocks_0_txt_attn_qkv": (12, 3 * w, w),
        "double_blocks_0_txt_attn_proj": (4, w, w),
        "double_blocks_0_txt_mlp_0": (4, 4 * w, w),
        "double_blocks_0_txt_mlp_2": (4, w, 4 * w),
        "single_blocks_0_linear1": (16, 7 * w, w),
        "single_blocks_0_linear2": (4, w, 5 * w),
    }
    expected = {f"lora_unet_{name}.lora_down.weight": (rank, size) for name, (rank, _, size) in parts.items()}
    expected |= {f"lora_unet_{name}.lora_up.weight": (rows, rank) for name, (rank, rows, _) in parts.items()}
    assert names == expected
    assert all(tensor.is_contiguous() for tensor in file.values())


def test_another_rank_is_told() -> None:
    tensors = trained(adapted(Lora(rank=4, targets="attention")))
    with pytest.raises(AdapterError, match="has rank 4, not 8"):
        from_kohya(to_kohya(tensors, 4.0), list(tensors), 8, 4.0)


def test_a_missing_layer_is_told() -> None:
    more = trained(adapted(Lora(rank=4, targets="all-linear")))
    less = trained(adapted(Lora(rank=4, targets="attention")))
    with pytest.raises(AdapterError, match=r"the adapter has no lora_unet_.*lora_down"):
        from_kohya(to_kohya(less, 4.0), list(more), 4, 4.0)


@pytest.mark.parametrize("targets", ["attention+feed-forward", "attention", ("*.attn.to_q", "*.attn.to_v")])
def test_diffusers_converter_gives_the_adapter_back(targets: Any) -> None:
    """At the real width, which that converter has written into it."""
    one_of_each = FluxShape(double_blocks=1, single_blocks=1)
    sizes = {
        n.removesuffix(".weight"): s for n, s in one_of_each.tensors().items() if n.endswith(".weight") and len(s) == 2
    }
    generator = torch.Generator().manual_seed(7)
    halves = {
        module: (
            torch.randn(2, sizes[module][1], generator=generator),
            torch.randn(sizes[module][0], 2, generator=generator),
        )
        for module in target_layers(list(sizes), targets)
    }
    tensors = {f"{m}.lora_A.default.weight": down for m, (down, _) in halves.items()}
    tensors |= {f"{m}.lora_B.default.weight": up for m, (_, up) in halves.items()}
    converted = _convert_kohya_flux_lora_to_diffusers(to_kohya(tensors, alpha=1.0))
    found = {name.removeprefix("transformer.").removesuffix(".lora_A.weight") for name in converted if "lora_A" in name}
    assert found >= halves.keys()
    for module in found:
        some = torch.randn(sizes[module][1], generator=generator)
        theirs = converted[f"transformer.{module}.lora_B.weight"] @ (
            converted[f"transformer.{module}.lora_A.weight"] @ some
        )
        down, up = halves.get(module, (torch.zeros(1, len(some)), torch.zeros(sizes[module][0], 1)))
        assert torch.allclose(theirs, 0.5 * (up @ (down @ some)), rtol=1e-4, atol=1e-3), module


@pytest.mark.parametrize("targets", ["attention", "attention+feed-forward", "all-linear"])
def test_the_plan_knows_the_size_of_the_file(targets: str) -> None:
    """bootstrap.estimate counts the fused layout's values without making them."""
    job = make_job(method="lora", lora={"rank": 4, "alpha": 4, "targets": targets})
    assert job.lora
    values = sum(tensor.numel() for tensor in to_kohya(trained(adapted(job.lora)), 4).values())
    assert work_of(job, SHAPE, [(64, 64, 1.0)]).weights_file == 4 * values
