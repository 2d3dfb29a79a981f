from __future__ import annotations

import pytest

from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import target_layers, unmatched

LINEAR = [name.removesuffix(".weight") for name, size in FluxShape().tensors().items() if len(size) == 2]


@pytest.mark.parametrize(
    ("targets", "there", "absent"),
    [
        ("attention", "transformer_blocks.0.attn.to_add_out", "single_transformer_blocks.0.proj_out"),
        ("attention+feed-forward", "single_transformer_blocks.0.proj_mlp", "transformer_blocks.0.norm1.linear"),
        ("attention+feed-forward", "transformer_blocks.18.ff_context.net.2", "proj_out"),
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
