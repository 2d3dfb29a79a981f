"""BFL's single-file layout, held against the published key list and diffusers' own converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.bases import FLUX_TINY, FLUX_TINY_SCHNELL
from bootstrap.flux_shape import FluxShape
from bootstrap.layout import Rows, bfl_tensors, clip_rows, module_in_bfl, placements, shape_of_bfl
from bootstrap.tensor_files import write_tensors

DEV, SCHNELL = FluxShape(), FluxShape(guidance=False)
ONE_OF_EACH = FluxShape(double_blocks=1, single_blocks=1)
SHAPES = {"dev": DEV, "schnell": SCHNELL, "tiny": FLUX_TINY, "tiny-schnell": FLUX_TINY_SCHNELL, "one": ONE_OF_EACH}
KEYS = Path(__file__).with_name("bfl_keys.txt")  # of flux1-dev.safetensors: a name and its sizes on each line


def to_bfl(shape: FluxShape, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A whole model in BFL's layout, tail sizes as they are in ``state``."""
    file: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, placement in placements(shape).items():
        for rows in placement:
            part = state[name][rows.first : rows.first + rows.count]
            file.setdefault(rows.file_name, []).append((rows.file_first, part))
    return {name: torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])]) for name, parts in file.items()}


def test_the_full_size_file_is_flux1_dev() -> None:
    lines = [f"{name} {'x'.join(map(str, size))}" for name, size in bfl_tensors(DEV).items()]
    assert lines == KEYS.read_text(encoding="ascii").splitlines()
    assert len(lines) == 780


def test_schnell_lacks_only_the_guidance() -> None:
    dev, schnell = bfl_tensors(DEV), bfl_tensors(SCHNELL)
    assert len(schnell) == 776
    assert {name for name in dev if name not in schnell} == {n for n in dev if n.startswith("guidance_in.")}
    assert all(schnell[name] == dev[name] for name in schnell)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_row_of_both_layouts_has_one_place_in_the_other(shape: FluxShape) -> None:
    file_rows: dict[str, list[tuple[int, int]]] = {}
    for name, size in shape.tensors().items():
        position = 0
        for part in placements(shape)[name]:
            assert part.first == position, name
            position += part.count
            file_rows.setdefault(part.file_name, []).append((part.file_first, part.count))
        assert position == size[0], name
    assert file_rows.keys() == bfl_tensors(shape).keys()
    for name, runs in file_rows.items():
        position = 0
        for first, count in sorted(runs):
            assert first == position, name
            position += count
        assert position == bfl_tensors(shape)[name][0], name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_file_tells_its_shape(shape: FluxShape) -> None:
    assert shape_of_bfl(bfl_tensors(shape)) == shape


def test_a_file_that_lacks_what_tells_its_shape() -> None:
    with pytest.raises(KeyError):
        shape_of_bfl({"double_blocks.0.img_attn.qkv.weight": (9216, 3072)})


def test_our_file_by_diffusers_converter_is_the_model_again() -> None:
    """At the real width, which that converter has written into it; two columns of each matrix are enough."""
    state = {}
    for number, (name, size) in enumerate(ONE_OF_EACH.tensors().items()):
        shape = (size[0], min(2, size[1])) if len(size) == 2 else size
        state[name] = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + number * 2**20
    again = convert_flux_transformer_checkpoint_to_diffusers(to_bfl(ONE_OF_EACH, state))
    assert again.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(again[name], tensor), name


def test_a_full_width_file_loads_in_diffusers(tmp_path: Path) -> None:
    """As ComfyUI's users have it, so diffusers reads it: every tensor is the trainer's."""
    state = {}
    for number, (name, size) in enumerate(ONE_OF_EACH.tensors().items()):
        row = torch.arange(torch.Size(size[1:]).numel(), dtype=torch.float32).reshape(size[1:])
        rows = torch.arange(size[0]).reshape(-1, *[1] * (len(size) - 1))
        state[name] = (row + rows % 1009 + number).to(torch.bfloat16)
    write_tensors(tmp_path / "model.safetensors", to_bfl(ONE_OF_EACH, state), {"modelspec.title": "test"})
    config = tmp_path / "config" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"} | ONE_OF_EACH.config()))
    model = FluxTransformer2DModel.from_single_file(
        str(tmp_path / "model.safetensors"),
        config=str(config.parent),
        torch_dtype=torch.bfloat16,
        local_files_only=True,
    )
    loaded = dict(model.named_parameters())
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("transformer_blocks.3.attn.to_k", ("double_blocks.3.img_attn.qkv", 1)),
        ("transformer_blocks.11.attn.add_v_proj", ("double_blocks.11.txt_attn.qkv", 2)),
        ("transformer_blocks.0.ff_context.net.2", ("double_blocks.0.txt_mlp.2", 0)),
        ("single_transformer_blocks.37.proj_mlp", ("single_blocks.37.linear1", 3)),
        ("single_transformer_blocks.0.proj_out", ("single_blocks.0.linear2", 0)),
        ("proj_out", ("final_layer.linear", 0)),
        ("norm_out.linear", ("final_layer.adaLN_modulation.1", 0)),
        ("time_text_embed.guidance_embedder.linear_2", ("guidance_in.out_layer", 0)),
        ("x_embedder", ("img_in", 0)),
    ],
)
def test_modules_by_bfls_names(module: str, place: tuple[str, int]) -> None:
    assert module_in_bfl(module) == place


@pytest.mark.parametrize("module", ["transformer_blocks.0.attn.to_z", "y_embedder", "time_text_embed.time_proj", ""])
def test_a_module_that_flux_has_not(module: str) -> None:
    with pytest.raises(KeyError):
        module_in_bfl(module)


# ---------------------------------------------------------------- a process's rows

PLACEMENTS = [*placements(FLUX_TINY).values()]


@given(st.sampled_from(PLACEMENTS), st.data())
def test_clipped_rows_are_those_of_the_whole(placement: tuple[Rows, ...], data: st.DataObject) -> None:
    rows = sum(part.count for part in placement)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    whole = {part.first + i: (part.file_name, part.file_first + i) for part in placement for i in range(part.count)}
    clipped = {
        part.first + i: (part.file_name, part.file_first + i)
        for part in clip_rows(placement, start, stop)
        for i in range(part.count)
    }
    assert clipped == {row: whole[row] for row in range(start, stop)}


@given(st.sampled_from(PLACEMENTS), st.integers(1, 9))
def test_the_rows_of_all_processes_are_all_rows_once(placement: tuple[Rows, ...], processes: int) -> None:
    rows = sum(part.count for part in placement)
    chunk = -(-rows // processes)
    parts = [part for i in range(processes) for part in clip_rows(placement, i * chunk, min((i + 1) * chunk, rows))]
    assert sum(part.count for part in parts) == rows
    assert len({(part.file_name, part.file_first + i) for part in parts for i in range(part.count)}) == rows
