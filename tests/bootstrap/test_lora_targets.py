from __future__ import annotations

import pytest

from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import AdapterLayer, adapters_of, lora_problems, target_layers, unmatched
from jobs.schema import Lora, LoraLayers
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


LORA = Lora(
    rank=16,
    alpha=8,
    targets="attention+feed-forward",
    layers=[
        LoraLayers(match="attention", rank=32, learning_rate=5e-5),
        LoraLayers(match=["transformer_blocks.7.*"], alpha=4),
        LoraLayers(match=["*.7.attn.to_q"], rank=2),
    ],
)


def test_a_layer_is_as_the_last_entry_that_says_something_of_it_has_it() -> None:
    found = adapters_of(LINEAR, LORA)
    assert list(found) == target_layers(LINEAR, LORA.targets)
    assert found["transformer_blocks.0.ff.net.2"] == AdapterLayer(16, 0.5)
    assert found["transformer_blocks.0.attn.to_q"] == AdapterLayer(32, 0.5, 5e-5), "the adapter's strength"
    assert found["transformer_blocks.7.ff.net.2"] == AdapterLayer(16, 4 / 16)
    assert found["transformer_blocks.7.attn.to_k"] == AdapterLayer(32, 4 / 32, 5e-5)
    assert found["transformer_blocks.7.attn.to_q"] == AdapterLayer(2, 4 / 2, 5e-5)


def test_rank_stabilised_the_root_of_the_rank_divides() -> None:
    found = adapters_of(LINEAR, Lora(rank=16, alpha=8, rslora=True, layers=[LoraLayers(match="attention", rank=64)]))
    assert found["transformer_blocks.0.ff.net.2"].scale == 8 / 4
    assert found["transformer_blocks.0.attn.to_q"].scale == 0.5 * 8


def test_entries_that_mean_nothing_are_told() -> None:
    lora = Lora(
        targets="attention",
        layers=[LoraLayers(match="feed-forward", rank=4), LoraLayers(match=["*.to_x"], rank=4)],
    )
    told = [(problem.key, problem.message) for problem in lora_problems(LINEAR, lora)]
    assert told == [
        ("lora.layers[0].match", "has no effect: no layer with an adapter is meant"),
        ("lora.layers[1].match", "no layer of this base is called '*.to_x'"),
    ]


def test_a_dora_of_a_part_of_a_matrix_is_told_where_the_file_has_it_whole() -> None:
    lora = Lora(targets="attention", dora=True)  # a single block's q, k and v without its proj_mlp
    (problem,) = lora_problems(LINEAR, lora)
    assert problem.key == "lora.targets"
    assert "single_transformer_blocks.0.proj_mlp" in problem.message
    assert lora_problems(LINEAR, lora.model_copy(update={"layout": "diffusers"})) == []
    assert lora_problems(LINEAR, Lora(dora=True)) == []
