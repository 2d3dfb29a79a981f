"""LoRA: which layers, and the same start always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import target_layers
from jobs.problem import JobError
from jobs.schema import Lora
from tests.loras import SMALL, TARGETS
from trainer.adapter import add_adapter


def adapted(lora: Lora, seed: int = 42, shape: FluxShape = SMALL) -> FluxTransformer2DModel:
    torch.manual_seed(1)
    model = FluxTransformer2DModel(**shape.config()).to(torch.bfloat16)
    add_adapter(model, lora, seed)
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def layers_of(model: nn.Module) -> set[str]:
    return {name.partition(".lora_")[0] for name in tensors_of(model)}


LINEAR = [
    name for name, module in FluxTransformer2DModel(**SMALL.config()).named_modules() if isinstance(module, nn.Linear)
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
