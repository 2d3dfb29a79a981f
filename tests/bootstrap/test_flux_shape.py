"""A FLUX transformer's dimensions, held against diffusers' own class."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel

from bootstrap.bases import FLUX_TINY, FLUX_TINY_SCHNELL
from bootstrap.flux_shape import FluxShape, spread

DEV, SCHNELL = FluxShape(), FluxShape(guidance=False)
SMALL = FluxShape(double_blocks=1, single_blocks=3, heads=2, head_size=32, channels=16, rope_axes=(4, 14, 14))
SHAPES = {"dev": DEV, "schnell": SCHNELL, "tiny": FLUX_TINY, "tiny-schnell": FLUX_TINY_SCHNELL, "small": SMALL}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_tensors_are_those_of_diffusers_model(shape: FluxShape) -> None:
    with torch.device("meta"):
        model = FluxTransformer2DModel(**shape.config())
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shape.tensors() == expected
    assert not list(model.named_buffers()), "a buffer would have to be kept too"
    assert shape.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_the_sizes_of_flux_1() -> None:
    assert DEV.parameters() == 11_901_408_320
    assert SCHNELL.parameters() == 11_891_178_560
    assert len(DEV.tensors()) == 1160
    assert DEV.width == 3072


def test_the_largest_block_is_a_double_one() -> None:
    tensors = DEV.tensors()

    def size(prefix: str) -> int:
        return sum(torch.Size(shape).numel() for name, shape in tensors.items() if name.startswith(prefix))

    assert DEV.block_parameters() == size("transformer_blocks.7.") > size("single_transformer_blocks.7.")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_configuration_gives_its_shape_back(shape: FluxShape, tmp_path: Path) -> None:
    assert FluxShape.from_config(shape.config()) == shape
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"} | shape.config()))
    assert FluxShape.from_config_file(file) == shape


def test_an_empty_configuration_is_diffusers_default() -> None:
    with torch.device("meta"):
        model = FluxTransformer2DModel()
    assert FluxShape.from_config({}) == FluxShape.from_config(model.config) == SCHNELL


@pytest.mark.parametrize(("size", "teraflops"), [(512, 21.5), (1024, 74.4)])
def test_floating_point_operations_of_one_image(size: int, teraflops: float) -> None:
    """The figures of a count by hand, see the docstring."""
    assert DEV.forward_flops(size, size, 512) / 1e12 == pytest.approx(teraflops, abs=0.05)


def test_floating_point_operations_are_those_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    height, width, text = 64, 128, 32
    tokens = height * width // 256
    with torch.device("meta"):
        model = FluxTransformer2DModel(**SMALL.config())
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model(
                hidden_states=torch.zeros(1, tokens, SMALL.channels),
                encoder_hidden_states=torch.zeros(1, text, SMALL.text_size),
                pooled_projections=torch.zeros(1, SMALL.pooled_size),
                timestep=torch.zeros(1),
                guidance=torch.zeros(1),
                img_ids=torch.zeros(tokens, 3),
                txt_ids=torch.zeros(text, 3),
            )
    embedders = 2 * SMALL.width * text * SMALL.text_size  # not counted by us: a thousandth in the real model
    estimated = SMALL.forward_flops(width, height, text)
    assert estimated == pytest.approx(counter.get_total_flops() - embedders, rel=0.03)


@pytest.mark.parametrize(("count", "blocks"), [(1, 57), (20, 57), (57, 57), (3, 4)])
def test_blocks_are_chosen_evenly(count: int, blocks: int) -> None:
    chosen = spread(count, blocks)
    assert len(set(chosen)) == count
    assert 0 <= min(chosen) <= max(chosen) < blocks
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1
