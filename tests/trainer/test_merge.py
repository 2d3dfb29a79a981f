"""LoRAs of any layout merged into a checkpoint of any layout: every weight is the base's plus the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_shape import FluxShape
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.lora_file import Adapter, Layout, LoraFileError, tensors_of
from bootstrap.tensor_files import read_header, read_tensors, write_tensors
from tests.loras import make_adapter
from trainer.export import export_file
from trainer.merge import main, merge
from trainer.tensor_output import ExportError
from trainer.whole_model import open_model


def write_lora(path: Path, adapter: Adapter, layout: Layout = "kohya", **metadata: str) -> Path:
    told = {name.replace("__", "."): text for name, text in metadata.items()}
    write_tensors(path, tensors_of(adapter, layout), told)
    return path


def small(shape: FluxShape = FLUX_TINY, **keys: Any) -> Adapter:
    return make_adapter(shape, scale=lambda _: 0.002, **keys)


def weights(path: Path) -> dict[str, torch.Tensor]:
    """By diffusers' names."""
    with open_model(path) as model:
        return {name: model.read(name) for name in model.shape.tensors()}


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("base", ["a BFL file", "a diffusers folder"])
def test_every_weight_is_the_bases_and_the_product(
    layout: Layout, base: str, flux_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = small(rank=lambda name: 2 + len(name) % 3)
    lora = write_lora(tmp_path / "a.safetensors", adapter, layout, modelspec__trigger_phrase="pprflwr")
    target = tmp_path / "out.safetensors"
    place = flux_tiny / SINGLE_FILE if base == "a BFL file" else flux_tiny
    assert main([f"{lora}@0.5", f"--base={place}", f"--to={target}", "--dtype=fp32"]) == 0
    assert f"wrote {target}: {len(adapter)} layers changed, their weights by" in capsys.readouterr().out
    before, after = weights(flux_tiny / SINGLE_FILE), weights(target)
    for name, weight in before.items():
        each = adapter.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        expected = weight.float() if each is None else weight.float() + 0.5 * each.product()
        assert torch.allclose(after[name], expected, rtol=1e-5, atol=1e-6), name
    told = read_header(target).metadata
    assert told["modelspec.merged_from"].endswith("a (0.5)")
    assert told["modelspec.trigger_phrase"] == "pprflwr"


def test_a_weak_lora_in_a_coarse_format_is_told(
    flux_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weak = make_adapter(FLUX_TINY, "attention", scale=lambda _: 1e-6)
    lora = write_lora(tmp_path / "a.safetensors", weak)
    shares = {}
    for dtype in ("fp8", "bf16", "fp32"):
        line = merge(flux_tiny, [(lora, 1.0)], tmp_path / f"{dtype}.safetensors", "bfl", dtype)
        shares[dtype] = float(line.rpartition(" is ")[2].partition(" %")[0])
    assert shares["fp8"] > shares["bf16"] > 50 > 1 > shares["fp32"]
    nothing = write_lora(tmp_path / "0.safetensors", make_adapter(FLUX_TINY, "attention", scale=lambda _: 0.0))
    assert "by nothing" in merge(flux_tiny, [(nothing, 1.0)], tmp_path / "out.safetensors", "bfl", None)


def test_several_go_in_and_the_bases_format_stays(flux_tiny: Path, tmp_path: Path) -> None:
    one, two = small(targets="attention"), small(targets=("*.ff.*",), dora=True)
    files = [write_lora(tmp_path / "1.safetensors", one), write_lora(tmp_path / "2.safetensors", two)]
    merge(flux_tiny, [(files[0], 1.0), (files[1], -0.3)], tmp_path / "out.safetensors", "bfl", None)
    before, after = weights(flux_tiny), weights(tmp_path / "out.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        expected = weight
        if name.endswith(".weight") and module in one:
            expected = one[module].applied_to(weight).bfloat16()
        if name.endswith(".weight") and module in two:
            expected = two[module].applied_to(weight, -0.3).bfloat16()
        assert torch.equal(after[name], expected), name


def test_diffusers_loads_what_was_merged(flux_tiny: Path, tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel

    lora = write_lora(tmp_path / "a.safetensors", small())
    merge(flux_tiny, [(lora, 1.0)], tmp_path / "out", "diffusers", None)
    merge(flux_tiny, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", None)
    model: Any = FluxTransformer2DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    again = weights(tmp_path / "out.safetensors")
    assert all(torch.equal(parameter, again[name]) for name, parameter in model.named_parameters())


def test_a_merged_file_is_the_bases_tensors_and_no_others(flux_tiny: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "a.safetensors", small(targets="attention"))
    merge(flux_tiny, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", "fp8")
    found, base = read_header(tmp_path / "out.safetensors").tensors, read_header(flux_tiny / SINGLE_FILE).tensors
    assert {n: e.shape for n, e in found.items()} == {n: e.shape for n, e in base.items()}
    assert {e.dtype for e in found.values()} == {torch.float8_e4m3fn, torch.bfloat16}  # biases and norms stay


def test_some_of_a_fused_matrix_go_into_a_base_of_8_bits(flux_tiny: Path, tmp_path: Path) -> None:
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    export_file(flux_tiny / SINGLE_FILE, base, "bfl", "fp8", saturate=False)
    adapter = small(targets=("*.attn.to_q",))
    merge(base, [(write_lora(tmp_path / "a.safetensors", adapter), 1.0)], out, "bfl", None)
    before, after = weights(base), weights(out)
    for name, weight in before.items():
        assert after[name].dtype == weight.dtype
        each = adapter.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        expected = weight if each is None else (weight.float() + each.product()).to(weight.dtype)
        assert torch.equal(after[name].float(), expected.float()), name


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_numbers_beyond_the_format_are_told(dtype: str, flux_tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(FLUX_TINY, targets=("proj_out",), scale=lambda _: 1e6)
    lora = write_lora(tmp_path / "a.safetensors", adapter)
    with pytest.raises(ExportError, match=r"numbers in 1 tensors are beyond the range of torch\.float.*final_layer"):
        merge(flux_tiny, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", dtype)
    assert not list(tmp_path.glob("*out*"))
    merge(flux_tiny, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", dtype, saturate=True)


def other(**sizes: Any) -> FluxShape:
    return FluxShape(**{**FLUX_TINY.__dict__, **sizes})


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (small(other(double_blocks=FLUX_TINY.double_blocks + 1)), "the base lacks its layers: transformer_blocks"),
        (small(other(heads=2 * FLUX_TINY.heads)), r"the base has \(\d+, \d+\) where the LoRA has"),
    ],
)
def test_a_lora_of_another_flux_is_told(adapter: Adapter, told: str, flux_tiny: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "a.safetensors", adapter)
    with pytest.raises(LoraFileError, match=rf"a\.safetensors was made for another FLUX .*{told}"):
        merge(flux_tiny, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", None)


def test_guidance_that_the_base_lacks_is_told(flux_tiny_schnell: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "a.safetensors", small())
    with pytest.raises(LoraFileError, match=r"the base has no guidance, as FLUX\.1-schnell"):
        merge(flux_tiny_schnell, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", None)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (
            {"modelspec__architecture": "flux-1-schnell/lora"},
            "trained on flux-1-schnell, and the base is of the kind of",
        ),
        ({"fluxpod__blocks": "8+38"}, r"trained on a FLUX of 8\+38 blocks, and the base has \d+\+\d+"),
    ],
)
def test_what_a_file_says_of_its_base_counts(
    metadata: dict[str, str], told: str, flux_tiny: Path, tmp_path: Path
) -> None:
    """Its layers alone fit dev and schnell alike."""
    lora = write_lora(tmp_path / "a.safetensors", small(targets="attention"), **metadata)
    with pytest.raises(LoraFileError, match=rf"{told}.*--any-base"):
        merge(flux_tiny, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", None)
    merge(flux_tiny, [(lora, 1.0)], tmp_path / "out.safetensors", "bfl", None, any_base=True)


def test_the_command_tells_problems_in_words(
    flux_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = write_lora(tmp_path / "a.safetensors", small(targets="attention"))
    (tmp_path / "page.safetensors").write_text("a web page")
    tensors = read_tensors(flux_tiny / SINGLE_FILE)
    tensors.pop("img_in.bias")
    write_tensors(tmp_path / "cut.safetensors", tensors)
    for arguments, told in [
        ([lora, f"--base={tmp_path / 'cut.safetensors'}"], "lacks: img_in.bias"),
        ([lora, f"--base={lora}"], "It is a LoRA: give the model that it was made for"),
        ([lora, f"--base={tmp_path / 'page.safetensors'}"], "page.safetensors is not a whole safetensors file"),
        ([lora, f"--base={tmp_path / 'no'}"], "No such file"),
        ([f"{lora}@nan", f"--base={flux_tiny}"], "nan is no strength: write for example"),
        ([flux_tiny / SINGLE_FILE, f"--base={flux_tiny}"], "is no LoRA: its first tensors are"),
        ([lora, f"--base={flux_tiny}", f"--to={lora}"], "a.safetensors is there already"),
    ]:
        assert main([f"--to={tmp_path / 'out.safetensors'}", *map(str, arguments)]) == 64
        assert told in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


# ---------------------------------------------------------------- a LoRA's file in another layout


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_any_lora_can_be_written_in_another_layout(layout: Layout, flux_tiny: Path, tmp_path: Path) -> None:
    """And merged, it makes the same model."""
    adapter = small()
    source = write_lora(tmp_path / "a.safetensors", adapter, "diffusers" if layout == "kohya" else "kohya")
    written = export_file(source, None, layout, None, saturate=False)
    assert written == tmp_path / f"a-{layout}.safetensors"
    for file in (source, written):
        merge(flux_tiny, [(file, 1.0)], tmp_path / f"merged-{file.name}", "bfl", "fp32")
    one, two = (read_tensors(tmp_path / f"merged-{file.name}") for file in (source, written))
    assert all(torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-7) for name in one)


def test_a_checkpoint_without_a_state_is_exported_too(flux_tiny: Path, tmp_path: Path) -> None:
    folder = export_file(flux_tiny / SINGLE_FILE, tmp_path / "out", "diffusers", None, saturate=False)
    one, two = weights(folder), weights(flux_tiny)
    assert all(torch.equal(one[name], two[name]) for name in two)
