"""The trainer's adapter and its files: the same effective weights, in stock diffusers too, and back to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import nn

from bootstrap.estimate import work_of
from bootstrap.flux_shape import FluxShape
from bootstrap.lora_file import LAYOUTS, Layout, LoraFileError, tensors_of
from bootstrap.tensor_files import read_tensors, write_tensors
from jobs.schema import Lora
from tests.loras import SMALL, TARGETS, make_adapter
from tests.runs import make_job
from trainer.adapter import add_adapter
from trainer.adapter_files import Expected, adapter_in, kept_pieces, load_adapter
from trainer.trained import Trained, trained_tensors


def trained(lora: Lora, shape: FluxShape = SMALL) -> tuple[nn.Module, list[Trained]]:
    """A model whose adapter has random numbers in it, as after some training."""
    torch.manual_seed(1)
    model = FluxTransformer2DModel(**shape.config()).to(torch.bfloat16)
    add_adapter(model, lora, 42)
    tensors = trained_tensors(model, 0, 1)
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors:
        tensor.weight.copy_(torch.randn(tensor.shape, generator=generator))
    return model, tensors


def weights(tensors: list[Trained]) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.weight for tensor in tensors}


def peft_products(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the adapter adds to each weight, by peft."""
    return {
        name: module.get_delta_weight(next(iter(module.lora_A)))
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def lora_file(folder: Path, tensors: list[Trained], lora: Lora) -> Path:
    file = folder / "adapter.safetensors"
    write_tensors(file, tensors_of(adapter_in(weights(tensors), lora), lora.layout))
    return file


def product(up: torch.Tensor, down: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return up.detach().double() @ (down.detach().double() @ column)


# ---------------------------------------------------------------- effective weights


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("alpha", [4.0, 1.0, 3.0])
def test_the_adapter_is_what_peft_adds(targets: Any, alpha: float) -> None:
    lora = Lora(rank=4, alpha=alpha, targets=targets)
    model, tensors = trained(lora)
    adapter = adapter_in(weights(tensors), lora)
    expected = peft_products(model)
    assert adapter.keys() == expected.keys()
    assert all(torch.allclose(adapter[name].product(), expected[name], atol=1e-5) for name in expected)


ONE_OF_EACH = FluxShape(double_blocks=1, single_blocks=1)  # at FLUX.1's width, which diffusers' reader counts on


@pytest.fixture(scope="module")
def stock() -> FluxTransformer2DModel:
    with torch.device("meta"):
        model = FluxTransformer2DModel(**ONE_OF_EACH.config())
    return model.to_empty(device="cpu").requires_grad_(False)  # never touched: only the adapters' numbers matter


@pytest.mark.parametrize(
    ("layout", "targets"),
    [("kohya", "attention+feed-forward"), ("kohya", ["*.to_q", "*.to_v"]), ("diffusers", "all-linear")],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_stock_diffusers_loads_the_same_weights(
    layout: Layout, targets: Any, mixed: bool, stock: FluxTransformer2DModel, tmp_path: Path
) -> None:
    """P29: load_lora_weights, and then what peft would add to each weight; also with a rank and strength for each."""
    rank = (lambda name: 1 + sum(map(ord, name)) % 4) if mixed else (lambda _: 2)
    adapter = make_adapter(ONE_OF_EACH, targets, rank, lambda name: 1.5 / rank(name))
    write_tensors(tmp_path / "a.safetensors", tensors_of(adapter, layout))
    pipeline: Any = FluxPipeline(None, None, None, None, None, None, stock)
    pipeline.load_lora_weights(tmp_path / "a.safetensors")
    try:
        generator = torch.Generator().manual_seed(5)
        found = {n: m for n, m in stock.named_modules() if hasattr(m, "get_delta_weight")}
        for name in sorted(found.keys() | adapter.keys()):
            (scale,) = found[name].scaling.values()
            (down,), (up,) = found[name].lora_A.values(), found[name].lora_B.values()
            some = torch.randn(down.weight.shape[1], generator=generator, dtype=torch.float64)
            theirs = scale * product(up.weight, down.weight, some)
            ours = adapter[name].scale * product(adapter[name].up, adapter[name].down, some) if name in adapter else 0
            # of what is summed, not of the sum: that is near 0 by chance, and the files' float32 is then most of it
            summed = scale * product(up.weight.abs(), down.weight.abs(), some.abs())
            assert float((theirs - ours).abs().max()) <= 1e-6 * float(summed.max()), name
    finally:
        pipeline.unload_lora_weights()


def test_stock_diffusers_loads_a_doras_lengths(stock: FluxTransformer2DModel, tmp_path: Path) -> None:
    """In its own layout; of kohya's it leaves them out, with a warning."""
    adapter = make_adapter(ONE_OF_EACH, ["*.attn.to_q", "*.proj_mlp"], rank=lambda _: 2, dora=True)
    write_tensors(tmp_path / "a.safetensors", tensors_of(adapter, "diffusers"))
    pipeline: Any = FluxPipeline(None, None, None, None, None, None, stock)
    pipeline.load_lora_weights(tmp_path / "a.safetensors")
    try:
        for name, each in adapter.items():
            (lengths,) = stock.get_submodule(name).lora_magnitude_vector.values()
            assert each.magnitude is not None
            assert torch.equal(lengths.weight.detach(), each.magnitude)
    finally:
        pipeline.unload_lora_weights()


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alpha", [3.0, 2.0])
def test_a_file_fills_an_adapter(layout: Layout, alpha: float, tmp_path: Path) -> None:
    lora = Lora(rank=3, alpha=alpha, targets="all-linear", layout=layout)
    _, tensors = trained(lora)
    file = lora_file(tmp_path, tensors, lora)
    expected = {tensor.name: tensor.weight.clone() for tensor in tensors}
    for tensor in tensors:
        tensor.weight.zero_()
    load_adapter(file, tensors, lora)
    exact = layout == "kohya" or alpha == 3
    for tensor in tensors:
        assert torch.allclose(tensor.weight, expected[tensor.name], rtol=1e-6), tensor.name
        assert torch.equal(tensor.weight, expected[tensor.name]) or not exact
    assert bool(kept_pieces(tensors, lora)) != exact


EVERYTHING: dict[str, Any] = {
    "rank": 4,
    "alpha": 3,
    "dora": True,
    "rslora": True,
    "targets": "all-linear",
    "layers": [{"match": "attention", "rank": 6}, {"match": ["*.to_q"], "rank": 2, "alpha": 5}],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("without", ["dora", "layers", "nothing"])
def test_all_that_an_adapter_can_be_is_in_its_file(layout: Layout, without: str, tmp_path: Path) -> None:
    """Layers of their own rank and alpha, rsLoRA's strength, a DoRA's lengths: saved, checked, and taken back."""
    lora = Lora(**{key: value for key, value in EVERYTHING.items() if key != without}, layout=layout)
    model, tensors = trained(lora)
    expected = {tensor.name: tensor.weight.clone() for tensor in tensors}
    products = peft_products(model) if without == "dora" else {}
    file = lora_file(tmp_path, tensors, lora)
    Expected.of(tensors, lora).check(file)
    kept = kept_pieces(tensors, lora)
    assert {piece.name.removeprefix("adapter.") for piece in kept} == (expected.keys() if kept else set())
    assert bool(kept) == (layout == "diffusers" or without != "layers")
    for tensor in tensors:
        tensor.weight.zero_()
    load_adapter(file, tensors, lora)
    for tensor in tensors:
        assert torch.allclose(tensor.weight, expected[tensor.name], rtol=1e-5), tensor.name
    for name, product in products.items():
        assert torch.allclose(peft_products(model)[name], product, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_a_dora_is_no_lora_to_start_from(dora: bool, tmp_path: Path) -> None:
    lora = Lora(rank=4, targets="all-linear", dora=not dora)
    file = lora_file(tmp_path, trained(lora)[1], lora)
    other = Lora(rank=4, targets="all-linear", dora=dora)
    with pytest.raises(LoraFileError, match=r"it is (no|a) DoRA: write dora: (true|false)$"):
        load_adapter(file, trained(other)[1], other)


def test_a_file_of_another_strength_means_the_same(tmp_path: Path) -> None:
    lora = Lora(rank=4, alpha=2, targets="attention")
    model, tensors = trained(lora)
    file = lora_file(tmp_path, tensors, lora)
    other_model, others = trained(Lora(rank=4, alpha=16, targets="attention"))
    load_adapter(file, others, Lora(rank=4, alpha=16, targets="attention"))
    found, expected = peft_products(other_model), peft_products(model)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-5) for name in expected)


def test_an_adapter_of_kohyas_trainer_fills_three(tmp_path: Path) -> None:
    """One down matrix for q, k and v of rank 4 is the down matrix of each."""
    adapter = make_adapter(targets="attention")
    first = adapter["transformer_blocks.0.attn.to_q"]
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(3 * SMALL.width, 4, generator=generator)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    file = {f"{key}.lora_down.weight": first.down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(4.0)}
    write_tensors(tmp_path / "a.safetensors", file)
    lora = Lora(rank=4, targets=[f"transformer_blocks.0.attn.to_{each}" for each in "qkv"])
    model, tensors = trained(lora)
    load_adapter(tmp_path / "a.safetensors", tensors, lora)
    found = peft_products(model)
    product = torch.cat([found[f"transformer_blocks.0.attn.to_{each}"] for each in "qkv"])
    assert torch.allclose(product, up @ first.down, atol=1e-5)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"rank": 8, "targets": "attention"},
            r"its rank is 4, not 8, in single_transformer_blocks.*: write that in the job",
        ),
        ({"rank": 4, "targets": "all-linear"}, r"it has nothing for context_embedder, .* and \d+ more, which"),
        ({"rank": 4, "targets": ["*.attn.to_q"]}, "it has single_.*, which lora.targets leaves out"),
        ({"rank": 4, "targets": "attention", "dora": True, "layout": "diffusers"}, "it is no DoRA: write dora: false"),
    ],
)
def test_another_adapter_than_the_jobs_is_told(other: dict[str, Any], told: str, tmp_path: Path) -> None:
    lora = Lora(rank=4, targets="attention")
    file = lora_file(tmp_path, trained(lora)[1], lora)
    with pytest.raises(LoraFileError, match=told):
        load_adapter(file, trained(Lora(**other))[1], Lora(**other))


def test_an_adapter_for_another_flux_is_told(tmp_path: Path) -> None:
    lora = Lora(rank=4, targets="attention")
    wider = FluxShape(**{**SMALL.__dict__, "heads": 4})
    file = lora_file(tmp_path, trained(lora, wider)[1], lora)
    with pytest.raises(LoraFileError, match=r"made for another FLUX: \S+ has \(64, 64\), and the base \(32, 32\)"):
        load_adapter(file, trained(lora)[1], lora)


# ---------------------------------------------------------------- the check after each save


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_file_just_written_is_what_was_trained(layout: Layout, tmp_path: Path) -> None:
    lora = Lora(rank=4, alpha=3, targets="all-linear", layout=layout)
    _, tensors = trained(lora)
    expected = Expected.of(tensors, lora)
    expected.check(lora_file(tmp_path, tensors, lora))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["one number", "a strength", "two rows", "a layer", "a name"])
def test_a_file_that_is_off_is_told(layout: Layout, what: str, tmp_path: Path) -> None:
    lora = Lora(rank=4, alpha=3, targets="attention", layout=layout)
    _, tensors = trained(lora)
    expected = Expected.of(tensors, lora)
    file = lora_file(tmp_path, tensors, lora)
    saved = read_tensors(file)
    up = next(name for name in saved if name.endswith(("lora_up.weight", "lora_B.weight")))
    if what == "one number":
        saved[up][0, 0] += 0.01
    elif what == "two rows":
        saved[up][:2] = saved[up][:2].flip(0)
    elif what == "a strength":
        saved[up] *= 1.001
    elif what == "a layer":
        module = up.rpartition(".lora_")[0]
        saved = {name: tensor for name, tensor in saved.items() if not name.startswith(f"{module}.")}
    else:
        saved[f"strange.{up}"] = saved.pop(up)
    write_tensors(file, saved)
    with pytest.raises(OSError, match=r"does not hold what was trained|cannot be read back"):
        expected.check(file)


def test_what_a_dora_has_learned_is_compared_by_its_own_size(tmp_path: Path) -> None:
    """In the first steps the product is a millionth of the lengths, and must be right all the same."""
    lora = Lora(rank=4, targets="all-linear", dora=True)
    _, tensors = trained(lora)
    for tensor in tensors:
        if "lora_B" in tensor.name:
            tensor.weight.mul_(1e-7)
    expected = Expected.of(tensors, lora)
    file = lora_file(tmp_path, tensors, lora)
    expected.check(file)
    saved = read_tensors(file)
    up = next(name for name in saved if name.endswith("lora_up.weight"))
    write_tensors(file, saved | {up: -saved[up]})
    with pytest.raises(OSError, match="is off by"):
        expected.check(file)
    lengths = next(name for name in saved if name.endswith("dora_scale"))
    write_tensors(file, {name: tensor for name, tensor in saved.items() if name != lengths})
    with pytest.raises(OSError, match="has other lengths"):
        expected.check(file)


def test_an_adapter_that_adds_nothing_yet_is_right(tmp_path: Path) -> None:
    lora = Lora(rank=4, targets="all-linear")
    _, tensors = trained(lora)
    for tensor in tensors:
        if ".lora_B." in tensor.name:
            tensor.weight.zero_()
    Expected.of(tensors, lora).check(lora_file(tmp_path, tensors, lora))


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize("targets", ["attention", "attention+feed-forward", "all-linear"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_knows_the_size_of_the_file(targets: str, layout: Layout) -> None:
    """bootstrap.estimate counts a layout's values without making them."""
    job = make_job(method="lora", lora={"rank": 4, "alpha": 4, "targets": targets, "layout": layout})
    assert job.lora
    file = tensors_of(make_adapter(targets=targets), layout)
    assert work_of(job, SMALL, [(64, 64, 1.0)]).weights_file == 4 * sum(tensor.numel() for tensor in file.values())
