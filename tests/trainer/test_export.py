"""Exported files hold the state's numbers, in the layout and the format asked for, or are not written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.lora_file import tensors_of
from bootstrap.run_file import RunFile
from bootstrap.state import State
from bootstrap.tensor_files import read_header, read_tensors, write_tensors
from tests.loras import make_adapter
from tests.runs import make_job, make_run, make_weights, make_world
from trainer.checkpoint import Saver
from trainer.export import export, export_file, main
from trainer.make_optimizer import make_optimizer
from trainer.metadata import metadata
from trainer.model import build_model, fill, sources
from trainer.tensor_output import DTYPES, ExportError, cast
from trainer.trained import Trained, trained_tensors

LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 2, "targets": ["*_blocks.0.attn.*"]}}
Saved = tuple[RunFile, State, list[Trained]]


@pytest.fixture
def saved(flux_tiny: Path, tmp_path: Path, control: dist.ProcessGroup) -> Callable[..., Saved]:
    """A state of a model at its start; an adapter with numbers in it."""

    def make(spoil: float = 0.0, **keys: Any) -> Saved:
        world = make_world(control)
        datasets = [{"path": "datasets/test", "trigger": "pprflwr"}]
        run = make_run(tmp_path, make_job(datasets=datasets, **keys), make_weights(flux_tiny), threads=1)
        run.folder.root.mkdir(parents=True)
        run.write(())
        places = sources(FLUX_TINY, [flux_tiny / SINGLE_FILE], "bfl")
        model = build_model(run.job, run.plan, FLUX_TINY, world, lambda model: fill(model, places, world))
        tensors = trained_tensors(model, 0, 1)
        for tensor in tensors if keys else []:
            tensor.weight.normal_(generator=torch.Generator().manual_seed(1))
        if spoil:
            tensors[0].weight.view(-1)[0] = spoil
        saver = Saver(run, world)
        saver.begin(7, tensors, make_optimizer(tensors, run.job, run.plan, world), metadata(run, 7))
        return run, saver.publish(), tensors

    return make


def test_a_full_model_for_diffusers(saved: Callable[..., Saved], tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel

    _, state, tensors = saved()
    folder = export(state, tmp_path / "out", "diffusers", None, saturate=False)
    model: Any = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == {tensor.name for tensor in tensors}
    assert all(torch.equal(loaded[t.name], t.weight) for t in tensors)


def test_a_full_model_in_16_and_in_8_bits(saved: Callable[..., Saved]) -> None:
    _, state, _ = saved()
    whole = read_tensors(state.model)
    half = export(state, None, None, "fp16", saturate=False)
    assert half == state.path.parent.parent / "output" / "test-step-000007-bfl-fp16.safetensors"
    assert all(torch.equal(tensor, whole[name].half()) for name, tensor in read_tensors(half).items())
    small = read_tensors(export(state, None, "bfl", "fp8", saturate=False))
    assert {t.dtype for t in small.values() if t.dim() == 2} == {torch.float8_e4m3fn}
    assert {t.dtype for t in small.values() if t.dim() == 1} == {torch.bfloat16}
    assert read_header(half).metadata["modelspec.title"] == "test"
    with pytest.raises(ExportError, match="is there already"):
        export(state, None, None, "fp16", saturate=False)


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_what_is_beyond_the_range_is_told_and_not_written(
    dtype: str, saved: Callable[..., Saved], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P54: bf16 reaches to 3e38, fp16 to 65504, fp8 to 448."""
    _, state, _ = saved(spoil=1e6)
    with pytest.raises(ExportError, match=r"1 numbers in 1 tensors are beyond the range of torch\.float.*Nothing"):
        export(state, tmp_path / "out.safetensors", None, dtype, saturate=False)
    assert list(tmp_path.glob("*out*")) == []
    path = export(state, tmp_path / "out.safetensors", None, dtype, saturate=True)
    assert "1 numbers in 1 tensors were put to the largest" in capsys.readouterr().out
    assert all(bool(torch.isfinite(t.float()).all()) for t in read_tensors(path).values())


def test_an_adapter_for_diffusers_is_the_same_product(saved: Callable[..., Saved], tmp_path: Path) -> None:
    """Its layout knows no alpha: what alpha / rank multiplies stands in the weights."""
    run, state, tensors = saved(**LORA)
    weights = read_tensors(export(state, tmp_path / "out.safetensors", "diffusers", None, saturate=False))
    assert run.job.lora is not None
    assert len(weights) == len(tensors)
    by_name = {tensor.name: tensor.weight for tensor in tensors}
    for name, down in weights.items():
        if ".lora_A." not in name:
            continue
        ours = name.removeprefix("transformer.").replace(".weight", ".default.weight")
        product = by_name[ours.replace("lora_A", "lora_B")] @ by_name[ours] * run.job.lora.alpha / run.job.lora.rank
        assert torch.allclose(weights[name.replace("lora_A", "lora_B")] @ down, product, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_few_bits_leave_a_dora_its_strength_and_8_its_lengths(dtype: str, tmp_path: Path) -> None:
    """0.07 * 4 is no number of bf16, and a length in 8 bits would be off by 6 %."""
    file = tmp_path / "a.safetensors"
    write_tensors(file, tensors_of(make_adapter(scale=lambda _: 0.07, dora=True), "kohya"))
    before, after = read_tensors(file), read_tensors(export_file(file, None, "kohya", dtype, saturate=False))
    for name, tensor in after.items():
        exact = name.endswith(".alpha") or (name.endswith(".dora_scale") and dtype == "fp8")
        assert tensor.dtype == (torch.float32 if exact else DTYPES[dtype]), name
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name


def test_the_command_tells_problems_in_words(
    saved: Callable[..., Saved], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, state, _ = saved(**LORA)
    assert main([str(state.path), "--layout", "bfl"]) == 64
    assert "a LoRA is exported as kohya or diffusers, not as bfl" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 64
    assert "has no state.json" in capsys.readouterr().err
    assert main([str(state.path), "--dtype", "fp16", "--to", str(tmp_path / "a.safetensors")]) == 0
    told = read_header(tmp_path / "a.safetensors").metadata
    assert told["modelspec.trigger_phrase"] == "pprflwr"
    assert told["modelspec.architecture"] == "flux-1-dev/lora"
    assert told["modelspec.license"] == "that of its base, flux-tiny"


def test_numbers_in_range_are_only_rounded() -> None:
    tensor = torch.tensor([1.0, -448.0, 0.1], dtype=torch.bfloat16)
    assert cast(tensor, torch.float8_e4m3fn)[1] == 0
    assert cast(tensor, torch.float32)[0].tolist() == tensor.tolist()
    assert cast(torch.tensor([449.0, -1e9]), torch.float8_e4m3fn)[1] == 2
