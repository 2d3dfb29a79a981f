"""Extracting a LoRA: as near to the change as its rank allows, and told for each layer how near."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.lora_file import read_lora, tensors_of
from bootstrap.tensor_files import read_header, read_tensors, write_tensors
from tests.loras import make_adapter
from trainer.extract import Captured, extract, main, nearest, rounding_of, summary
from trainer.merge import merge
from trainer.tensor_output import ExportError
from trainer.whole_model import open_model


@pytest.fixture(scope="module")
def tuned(flux_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune whose change is of rank 4 exactly, in float32, in diffusers' layout."""
    folder = tmp_path_factory.mktemp("tuned")
    adapter = make_adapter(FLUX_TINY, "attention+feed-forward", scale=lambda _: 0.01)
    write_tensors(folder / "lora.safetensors", tensors_of(adapter, "kohya"))
    merge(flux_tiny, [(folder / "lora.safetensors", 1.0)], folder / "tuned", "diffusers", "fp32")
    return folder / "tuned"


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_change_of_that_rank_comes_back_whole(
    layout: str, tuned: Path, flux_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two models are of different layouts and formats."""
    file = tmp_path / "out.safetensors"
    base = flux_tiny / SINGLE_FILE
    assert main([str(tuned), f"--base={base}", "--rank=4", f"--to={file}", f"--layout={layout}"]) == 0
    assert "in all 0.0 % of the change is lost" in capsys.readouterr().out
    expected = read_lora(tuned.parent / "lora.safetensors")
    found = read_lora(file)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        product = each.product()
        assert float((found[name].product() - product).norm() / product.norm()) < 1e-4, name
    told = read_header(file).metadata
    assert told["ss_network_dim"] == told["ss_network_alpha"] == "4"
    assert told["modelspec.architecture"] == "flux-1-dev/lora"
    with file.with_name("out-layers.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert {row["layer"] for row in rows} == found.keys()
    assert all(float(row["lost"]) < 1e-3 for row in rows)


def test_the_error_is_near_the_least_there_is() -> None:
    """For a change like a real one: singular values that fall slowly over the whole spectrum."""
    generator = torch.Generator().manual_seed(1)
    left, _ = torch.linalg.qr(torch.randn(384, 256, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(256, 256, generator=generator))
    sizes = torch.arange(1, 257, dtype=torch.float32) ** -0.5
    change = left * sizes @ right.T
    for rank in (4, 16, 64):
        found, error = nearest(change, rank, seed=1)
        least = float(sizes[rank:].square().sum().sqrt())
        assert found.rank == rank
        assert least <= error * 1.0001
        assert error < 1.01 * least
        assert error == pytest.approx(float((change - found.product()).norm()), rel=1e-4)
    again, _ = nearest(change, 64, seed=1)
    assert torch.equal(again.up, found.up)


def test_a_rank_beyond_the_matrix_is_the_whole() -> None:
    change = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    found, error = nearest(change, 64, seed=1)
    assert found.rank == 5
    assert error < 1e-5


def test_what_no_lora_holds_is_told(tuned: Path, flux_tiny: Path) -> None:
    """Biases and norms, and layers that are not asked for."""
    with open_model(tuned) as one, open_model(flux_tiny) as two:
        adapter, captured, outside = extract(one, two, 4, ["*.attn.*"])
    assert all(".attn." in name for name in adapter)
    assert outside > 0
    lines = summary([Captured("transformer_blocks.0.attn.to_q", 4.0, 0.0)], 3.0)
    assert lines[-1].startswith("in all 60.0 % of the change is lost, 60.0 % being in layers, biases and norms")
    assert len(captured) == len(adapter)


def test_kinds_of_layers_are_told_the_worst_first() -> None:
    found = [
        Captured("transformer_blocks.0.attn.to_q", 1.0, 0.1),
        Captured("transformer_blocks.1.attn.to_q", 1.0, 0.1),
        Captured("proj_out", 1.0, 0.5),
    ]
    lines = [" ".join(line.split()) for line in summary(found, 0.0)]
    assert lines == [
        "proj_out 1 layers 50.0 % of the change is lost",
        "transformer_blocks.*.attn.to_q 2 layers 10.0 % of the change is lost",
        "in all 30.0 % of the change is lost",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_a_format_rounds_is_known(dtype: torch.dtype) -> None:
    exact = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    rounded = exact.to(dtype)
    expected = float((rounded.float() - exact).norm())
    assert rounding_of(rounded) == pytest.approx(expected, rel=0.05)
    assert rounding_of(exact) == 0


def test_rounding_is_told_from_what_was_learned() -> None:
    lines = summary([Captured("proj_out", 1.0, 0.9, 0.8)], 0.0)
    assert lines[-1] == "about 80 % of it is what the fine-tune's number format rounded: nothing that it learned"


def test_problems_are_told_in_words(
    tuned: Path, flux_tiny: Path, flux_tiny_schnell: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = f"--to={tmp_path / 'out.safetensors'}"
    for arguments, told in [
        (
            [tuned, f"--base={flux_tiny_schnell}"],
            "not of one kind: .* with guidance; .* without guidance. Give the base",
        ),
        ([tuned, f"--base={tuned}"], "do not differ in all-linear"),
        (
            [tuned, f"--base={flux_tiny}", "--targets=*.nothing"],
            r"no layer is called \*\.nothing; layers are called like",
        ),
        (
            [tuned, f"--base={flux_tiny}", "--targets=attention+*.nothing,*.proj"],
            r"no layer is called \*\.nothing;",
        ),
        ([tuned, f"--base={flux_tiny}", "--rank=0"], "--rank 0 is not from 1 to 1024"),
        ([tuned.parent / "lora.safetensors", f"--base={flux_tiny}"], "It is a LoRA"),
    ]:
        assert main([to, *map(str, arguments)]) == 64
        assert re.search(told, capsys.readouterr().err)
    assert not list(tmp_path.glob("*out*"))


def test_what_is_no_number_is_told(flux_tiny: Path, tmp_path: Path) -> None:
    tensors = read_tensors(flux_tiny / SINGLE_FILE)
    tensors["img_in.weight"][0, 0] = torch.nan
    write_tensors(tmp_path / "bad.safetensors", tensors)
    with (
        open_model(tmp_path / "bad.safetensors") as one,
        open_model(flux_tiny) as two,
        pytest.raises(ExportError, match=r"x_embedder\.weight holds NaN or infinity"),
    ):
        extract(one, two, 4)
