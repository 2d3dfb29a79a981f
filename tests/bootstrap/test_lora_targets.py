from __future__ import annotations

import pytest

from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import target_layers, unmatched
from jobs.values import LORA_TARGETS

LINEAR = [name.removesuffix(".weight") for name, size in FluxShape().tensors().items() if len(size) == 2]


@pytest.mark.parametrize(
    ("targets", "there", "absent"),
    [
        ("attention", "transformer_blocks.0.attn.to_add_out", "single_transformer_blocks.0.proj_out"),
        ("attention+feed-forward", "single_transformer_blocks.0.proj_mlp", "transformer_blocks.0.norm1.linear"),
        ("attention+feed-forward", "transformer_blocks.18.ff_context.net.2", "proj_out"),
        ("feed-forward", "transformer_blocks.18.ff.net.0.proj", "transformer_blocks.18.attn.to_q"),
        ("modulation", "single_transformer_blocks.37.norm.linear", "transformer_blocks.0.attn.to_q"),
        ("embedders", "time_text_embed.guidance_embedder.linear_1", "norm_out.linear"),
        (("modulation", "*.7.attn.to_q"), "norm_out.linear", "transformer_blocks.8.attn.to_q"),
        ("all-linear", "proj_out", ""),
        (("*.7.*",), "single_transformer_blocks.7.proj_out", "transformer_blocks.17.attn.to_q"),
    ],
)
def test_layers(targets: str | tuple[str, ...], there: str, absent: str) -> None:
    layers = target_layers(LINEAR, targets)
    assert there in layers
    assert absent not in layers
    assert layers == [name for name in LINEAR if name in layers]
    assert unmatched(LINEAR, targets) == []


def test_patterns_without_a_layer_are_found() -> None:
    assert unmatched(LINEAR, ("to_q", "*.attn.to_q")) == ["to_q"]


def test_the_groups_are_all_layers_each_once() -> None:
    groups = [set(target_layers(LINEAR, name)) for name in LORA_TARGETS if name != "all-linear"]
    assert set().union(*groups) == set(LINEAR)
    assert sum(map(len, groups)) == len(LINEAR)
    joined = "+".join(name for name in LORA_TARGETS if name != "all-linear")
    assert target_layers(LINEAR, joined) == LINEAR
