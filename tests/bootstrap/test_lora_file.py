"""LoRA files: the same product for every layer in every layout, and nothing passed over that is not understood."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.flux_shape import FluxShape
from bootstrap.layout import bfl_tensors
from bootstrap.lora_file import (
    LAYOUTS,
    Adapter,
    Layout,
    LoraFileError,
    LowRank,
    adapter_of,
    check_fits,
    is_exact,
    left_out,
    read_lora,
    tensors_of,
)
from bootstrap.tensor_files import write_tensors
from tests.loras import SMALL, TARGETS, bfl_products, kohya_products, make_adapter

RANKS: dict[str, Callable[[str], int]] = {
    "the same rank": lambda _: 4,
    "a rank for each": lambda name: 2 + sum(map(ord, name)) % 5,
}
SCALES: dict[str, Callable[[str], float]] = {
    "alpha = rank": lambda _: 1.0,
    "2 / 3": lambda _: 2 / 3,
    "rsLoRA": lambda name: 8 / math.sqrt(RANKS["a rank for each"](name)),
    "0": lambda _: 0.0,
}


def assert_same(found: Mapping[str, LowRank], expected: Mapping[str, LowRank], exactly: bool = False) -> None:
    """Every layer's effective weight, and the lengths of a DoRA."""
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        mine = found[name]
        product = each.scale * (each.up.double() @ each.down.double())
        assert torch.allclose(mine.scale * (mine.up.double() @ mine.down.double()), product, rtol=1e-5, atol=1e-5), name
        if exactly:
            assert torch.equal(mine.down, each.down), name
            assert torch.equal(mine.up, each.up), name
        assert (mine.magnitude is None) == (each.magnitude is None)
        if each.magnitude is not None:
            assert mine.magnitude is not None
            assert torch.equal(mine.magnitude, each.magnitude)


# ---------------------------------------------------------------- the same product


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
def test_kohyas_file_adds_what_the_adapter_adds(targets: Any, rank: Any, scale: Any) -> None:
    adapter = make_adapter(targets=targets, rank=rank, scale=scale)
    file = tensors_of(adapter, "kohya")
    expected = bfl_products(adapter, SMALL)
    found = kohya_products(file, list(bfl_tensors(SMALL)))
    assert found.keys() == expected.keys()
    assert len(file) == 3 * len(found)
    for name, product in expected.items():
        assert torch.allclose(found[name], product, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_back(targets: Any, rank: Any, scale: Any, layout: Layout) -> None:
    adapter = make_adapter(targets=targets, rank=rank, scale=scale)
    ranks = {name: each.rank for name, each in adapter.items()}
    file = tensors_of(adapter, layout)
    again = adapter_of(file, ranks=ranks)
    assert_same(again, adapter, exactly=is_exact(adapter, layout) and layout == "kohya")
    if scale(next(iter(adapter))) != 0:
        assert_same(adapter_of(file), adapter)  # without being told how the fused matrices were made


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("dora", [False, True])
def test_there_and_back_again(rank: Any, dora: bool) -> None:
    adapter = make_adapter(rank=rank, scale=SCALES["rsLoRA"], dora=dora)
    there = adapter_of(tensors_of(adapter, "diffusers"))
    back = adapter_of(tensors_of(adapter_of(tensors_of(there, "kohya")), "diffusers"))
    assert_same(back, adapter)


def test_the_diffusers_layout_has_no_alpha() -> None:
    adapter = make_adapter(targets="attention", scale=lambda _: 0.3)
    for name, tensor in tensors_of(adapter, "diffusers").items():
        module = name.removeprefix("transformer.").rpartition(".lora_")[0]
        half = adapter[module].down if "lora_A" in name else adapter[module].up * 0.3
        assert torch.equal(tensor, half)


@pytest.mark.parametrize(
    ("layout", "scale", "exact"),
    [
        ("kohya", "2 / 3", True),
        ("kohya", "rsLoRA", False),
        ("diffusers", "alpha = rank", True),
        ("diffusers", "2 / 3", False),
        ("diffusers", "0", True),
    ],
)
def test_what_is_kept_to_the_bit(layout: Layout, scale: str, exact: bool) -> None:
    assert is_exact(make_adapter(targets="attention", scale=SCALES[scale]), layout) == exact


def test_layers_that_add_nothing_yet_are_cut_all_the_same() -> None:
    """The up matrices of a run's first steps may be zero: the down matrices must come back."""
    ranks = {"to_q": 2, "to_k": 3, "to_v": 4}
    adapter = make_adapter(targets="attention", rank=lambda name: ranks.get(name.rpartition(".")[2], 2))
    zero = {name: LowRank(each.down, torch.zeros_like(each.up), 1.0) for name, each in adapter.items()}
    again = adapter_of(tensors_of(zero, "kohya"), ranks={name: each.rank for name, each in zero.items()})
    assert_same(again, zero, exactly=True)


# ---------------------------------------------------------------- DoRA


def test_a_part_that_is_not_turned_keeps_its_lengths() -> None:
    """Alpha 0 for k alone: nothing of its up matrix is in kohya's file, but its lengths are."""
    ranks = {"to_q": 2, "to_k": 3, "to_v": 4}
    of = make_adapter(rank=lambda name: ranks.get(name.rpartition(".")[2], 2), dora=True)
    key = "transformer_blocks.0.attn.to_k"
    of[key] = LowRank(of[key].down, of[key].up, 0.0, of[key].magnitude)
    again = adapter_of(tensors_of(of, "kohya"))
    assert again.keys() == of.keys()
    assert not again[key].product().any()
    assert all(torch.equal(again[name].magnitude, each.magnitude) for name, each in of.items())  # type: ignore[arg-type]


def test_a_row_of_zeros_stays_one_in_a_dora() -> None:
    each = LowRank(torch.ones(1, 3), torch.tensor([[0.0], [1.0]]), 1.0, torch.tensor([0.0, 2.0]))
    assert each.applied_to(torch.zeros(2, 3))[0].tolist() == [0, 0, 0]


def dora_weights(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Each layer's whole weight by the paper: m (W + s B A) / |W + s B A|, for some W."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, each in sorted(adapter.items()):
        base = torch.randn(each.size, generator=generator)
        whole = base + each.product()
        assert each.magnitude is not None
        found[name] = each.magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True)
        assert torch.allclose(each.applied_to(base), found[name], rtol=1e-5, atol=1e-6)
        half = each.applied_to(base, 0.5)
        assert torch.allclose(half, (base + found[name]) / 2, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dora_has_the_same_weights_in_every_layout(layout: Layout) -> None:
    """Fused rows lie one above the other, so their lengths do, too."""
    adapter = make_adapter(dora=True, scale=lambda _: 2.0)
    again = adapter_of(tensors_of(adapter, layout))
    expected, found = dora_weights(adapter), dora_weights(again)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def test_the_lengths_of_kohyas_layout_are_a_column() -> None:
    """[rows, 1]: of a plain vector ComfyUI makes a square."""
    file = tensors_of(make_adapter(dora=True), "kohya")
    assert file["lora_unet_double_blocks_0_img_attn_qkv.dora_scale"].shape == (3 * SMALL.width, 1)
    assert file["lora_unet_single_blocks_0_linear1.dora_scale"].shape == (7 * SMALL.width, 1)


def test_a_dora_of_a_part_of_a_fused_matrix_is_told() -> None:
    """The rows without an adapter have lengths as well, which only the base knows."""
    adapter = make_adapter(targets=("*.attn.to_q", "*.attn.to_v"), dora=True)
    with pytest.raises(LoraFileError, match=r"img_attn\.qkv, and this DoRA leaves out .*to_k: target these too, or"):
        tensors_of(adapter, "kohya")
    assert_same(adapter_of(tensors_of(adapter, "diffusers")), adapter)


def test_a_dora_of_q_beside_a_lora_of_k_and_v_is_told() -> None:
    adapter = make_adapter(targets=("transformer_blocks.0.attn.to_[qkv]",))
    name = "transformer_blocks.0.attn.to_q"
    adapter[name] = LowRank(adapter[name].down, adapter[name].up, 1.0, torch.ones(SMALL.width))
    with pytest.raises(LoraFileError, match=r"this DoRA leaves out \S*to_k, \S*to_v:"):
        tensors_of(adapter, "kohya")


# ---------------------------------------------------------------- files of other tools


def renamed(adapter: Adapter, spell: Callable[[str, str], str], alpha: bool = True) -> dict[str, torch.Tensor]:
    """A file in diffusers' modules: ``spell`` makes a name of a module and a role."""
    tensors = {}
    for module, each in adapter.items():
        tensors[spell(module, "down")] = each.down
        tensors[spell(module, "up")] = each.up
        if alpha:
            tensors[spell(module, "alpha")] = torch.tensor(each.scale * each.rank)
    return tensors


def spelled(prefix: str, dots: bool, down: str, up: str) -> Callable[[str, str], str]:
    endings = {"down": down, "up": up, "alpha": "alpha"}
    return lambda module, role: f"{prefix}{module if dots else module.replace('.', '_')}.{endings[role]}"


@pytest.mark.parametrize(
    "spell",
    [
        spelled("lora_unet_", False, "lora_down.weight", "lora_up.weight"),
        spelled("lora_transformer_", False, "lora_down.weight", "lora_up.weight"),
        spelled("lycoris_", False, "lora_down.weight", "lora_up.weight"),
        spelled("transformer.", True, "lora_A.weight", "lora_B.weight"),
        spelled("transformer.", True, "lora.down.weight", "lora.up.weight"),
        spelled("base_model.model.", True, "lora_A.weight", "lora_B.weight"),
        spelled("base_model.model.transformer.", True, "lora_A.default.weight", "lora_B.default.weight"),
        spelled("", True, "lora_A.default.weight", "lora_B.default.weight"),
    ],
)
def test_names_of_diffusers_modules_that_other_trainers_write(spell: Callable[[str, str], str]) -> None:
    adapter = make_adapter(scale=lambda _: 0.5)
    assert_same(adapter_of(renamed(adapter, spell)), adapter, exactly=True)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", "base_model.model.", ""])
@pytest.mark.parametrize("halves", [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_names_of_bfl_with_dots(prefix: str, halves: tuple[str, str]) -> None:
    adapter = make_adapter(scale=lambda _: 0.5)
    dotted = {name.removesuffix(".weight").replace(".", "_"): name for name in bfl_tensors(SMALL) if "norm" not in name}
    tensors = {}
    for name, tensor in tensors_of(adapter, "kohya").items():
        module, _, ending = name.removeprefix("lora_unet_").partition(".")
        ending = ending.replace("lora_down", halves[0]).replace("lora_up", halves[1])
        tensors[f"{prefix}{dotted[module].removesuffix('.weight')}.{ending}"] = tensor
    assert_same(adapter_of(tensors), adapter, exactly=True)


def test_parts_that_share_one_down_matrix() -> None:
    """kohya's own trainer: one adapter of rank r on the whole fused matrix."""
    w, generator = SMALL.width, torch.Generator().manual_seed(1)
    down, up = torch.randn(4, w, generator=generator), torch.randn(7 * w, 4, generator=generator)
    key = "lora_unet_single_blocks_0_linear1"
    file = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(2.0)}
    names = [*(f"attn.to_{each}" for each in "qkv"), "proj_mlp"]
    for ranks in (None, {f"single_transformer_blocks.0.{name}": 4 for name in names}):
        adapter = adapter_of(file, ranks=ranks)
        parts = [adapter[f"single_transformer_blocks.0.{name}"] for name in names]
        assert [part.rank for part in parts] == [4] * 4
        assert [part.size[0] for part in parts] == [w, w, w, 4 * w]
        assert torch.allclose(torch.cat([part.product() for part in parts]), 0.5 * (up @ down), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_files_of_fewer_bits_are_computed_with_in_32(dtype: torch.dtype) -> None:
    adapter = make_adapter(targets="attention+feed-forward", dora=True, scale=lambda _: 0.3)
    file = {name: tensor.to(dtype) for name, tensor in tensors_of(adapter, "kohya").items()}
    found = adapter_of(file)
    for name, each in found.items():
        assert torch.equal(each.up, adapter[name].up.to(dtype).float())
        assert torch.equal(each.down, adapter[name].down.to(dtype).float())
    assert_same(adapter_of(tensors_of(found, "diffusers")), found)


def test_without_an_alpha_the_product_is_taken_as_it_is() -> None:
    """As ComfyUI and diffusers read it."""
    adapter = make_adapter(targets="attention", scale=lambda _: 1.0)
    file = {name: tensor for name, tensor in tensors_of(adapter, "kohya").items() if "alpha" not in name}
    assert_same(adapter_of(file), adapter)


@pytest.mark.parametrize("where", ["in the header", "beside it"])
def test_pefts_settings_are_minded(where: str, tmp_path: Path) -> None:
    adapter = make_adapter(targets="attention", scale=lambda name: 4.0 if "to_q" in name else 8 / 2)
    special = {name: LowRank(e.down, e.up, (32 if "to_q" in name else 8) / math.sqrt(4)) for name, e in adapter.items()}
    prefix = "transformer." if where == "in the header" else "base_model.model."
    spell = spelled(prefix, True, "lora_A.weight", "lora_B.weight")
    config = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"attn.to_q": 32}, "use_rslora": True}
    told = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}
    file = tmp_path / "adapter_model.safetensors"
    write_tensors(file, renamed(adapter, spell, alpha=False), told if where == "in the header" else {})
    if where == "beside it":
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert_same(read_lora(file), special)


@pytest.mark.parametrize(
    "config",
    [
        "[",
        "[1]",
        '{"transformer.lora_alpha": "x"}',
        '{"lora_alpha": 1, "alpha_pattern": {"(": 2}}',
        '{"lora_alpha": []}',
    ],
)
def test_settings_that_are_not_understood_are_told(config: str, tmp_path: Path) -> None:
    spell = spelled("transformer.", True, "lora_A.weight", "lora_B.weight")
    file = tmp_path / "a.safetensors"
    tensors = renamed(make_adapter(targets="attention"), spell, alpha=False)
    write_tensors(file, tensors, {"lora_adapter_metadata": config})
    with pytest.raises(LoraFileError, match=r"a\.safetensors: .*PEFT"):
        read_lora(file)


def test_another_adapters_settings_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 99}')
    adapter = make_adapter(targets="attention")
    write_tensors(tmp_path / "mine.safetensors", tensors_of(adapter, "diffusers"))
    assert_same(read_lora(tmp_path / "mine.safetensors"), adapter)


# ---------------------------------------------------------------- what is not understood


def spoiled(change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    file = tensors_of(make_adapter(targets="attention+feed-forward", dora=True), "kohya")
    change(file)
    return file


KEY = "lora_unet_double_blocks_0_img_attn_proj"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: f.update({"lora_unet_double_blocks_0_img_attn_qkv.lokr_w1": KEY}), "a LoKr, which is no LoRA"),
        (lambda f: f.update({"lora_unet_down_blocks_0_attn.lora_up.weight": KEY}), "names that FLUX does not have"),
        (lambda f: f.update({"double_blocks.0.processor.qkv_lora1.up.weight": KEY}), "XLabs"),
        (lambda f: f.update({"transformer.proj_out.lora_B.bias": KEY}), "changed biases"),
        (lambda f: f.update({"lora_unet_double_blocks_99999_img_attn_qkv.lora_up.weight": KEY}), "FLUX does not have"),
        (
            lambda f: f.pop(f"{KEY}.lora_up.weight"),
            r"lacks one of the two matrices of: double_blocks\.0\.img_attn\.proj",
        ),
        (lambda f: f.update({f"{KEY}.lora_down.weight": torch.ones(3, 32)}), r"do not fit each other, \(32, 4\) and"),
        (lambda f: f.update({f"{KEY}.alpha": torch.ones(2)}), "an alpha that is no number"),
        (lambda f: f.update({f"{KEY}.alpha": torch.tensor(math.nan)}), "holds NaN or infinity"),
        (lambda f: f[f"{KEY}.lora_up.weight"].fill_(math.inf), "holds NaN or infinity"),
        (lambda f: f.update({f"{KEY}.dora_scale": torch.ones(1, 31)}), "31 lengths for 32 rows"),
        (
            lambda f: (
                f.update({"transformer.transformer_blocks.0.attn.to_out.0.lora_A.weight": torch.ones(4, 32)})
                or f.update({"transformer.transformer_blocks.0.attn.to_out.0.lora_B.weight": torch.ones(32, 4)})
            ),
            r"two sets of weights for one layer: transformer_blocks\.0\.attn\.to_out\.0",
        ),
        (lambda f: f.update({f"{KEY}.dora_scale": torch.tensor(1.0)}), "1 lengths for 32 rows"),
        (
            lambda f: f.update({f"{KEY}.lora_down.weight": torch.tensor(1.0)}),
            r"do not fit each other, \(32, 4\) and \(\)",
        ),
        (
            lambda f: f.update({f"{KEY}.lora_up.weight": torch.ones(32, 4, 3, 3)}),
            r"fit each other, \(32, 4, 3, 3\) and",
        ),
        (lambda f: f.update({f"{KEY}.lora_up.weight": torch.ones(32, 4, dtype=torch.int8)}), "or whole numbers"),
        (
            lambda f: f.update({"lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": torch.ones(95, 12)}),
            "95 rows, which q, k and v cannot share",
        ),
        (lambda f: f.clear(), "no LoRA weights"),
    ],
)
def test_what_is_not_understood_is_told(change: Callable[[dict[str, torch.Tensor]], Any], told: str) -> None:
    with pytest.raises(LoraFileError, match=told):
        adapter_of(spoiled(change))


def test_a_dora_over_the_inputs_is_told() -> None:
    key = "lora_unet_double_blocks_0_img_mlp_0"
    file = tensors_of(make_adapter(targets="attention+feed-forward", dora=True), "kohya")
    file[f"{key}.dora_scale"] = torch.ones(1, 32)
    with pytest.raises(LoraFileError, match="a DoRA over the inputs"):
        adapter_of(file)


def test_all_problems_come_at_once() -> None:
    file = spoiled(lambda f: f.pop(f"{KEY}.lora_up.weight"))
    file["lora_unet_down_blocks_0.alpha"] = file[f"{KEY}.alpha"]
    with pytest.raises(LoraFileError, match=r"does not have: lora_unet_down_blocks_0\.alpha; lacks one"):
        adapter_of(file)


OF_TEXT_ENCODERS = (
    "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
    "lora_te1_text_model_encoder_layers_0_mlp_fc1.lokr_w1",
    "lora_te3_encoder_block_0_layer_0_SelfAttention_q.alpha",
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
    "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.lora_B.weight",
    "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.lora_up.weight",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_encoders_beside_the_transformer_are_left_out(layout: Layout, tmp_path: Path) -> None:
    adapter = make_adapter(targets="attention")
    file = tmp_path / "a.safetensors"
    write_tensors(file, tensors_of(adapter, layout) | {name: torch.ones(1, 1) for name in OF_TEXT_ENCODERS})
    assert_same(read_lora(file), adapter)
    assert left_out(file) == f"{file} holds a LoRA of text encoders too (6 tensors), which is left out"


def test_text_encoders_alone_are_no_lora_of_the_transformer(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {name: torch.ones(1, 1) for name in OF_TEXT_ENCODERS})
    with pytest.raises(LoraFileError, match="it holds no LoRA weights of the transformer"):
        read_lora(tmp_path / "a.safetensors")


def test_what_is_no_lora_is_told(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"double_blocks.0.img_attn.proj.weight": torch.ones(2, 2)})
    with pytest.raises(LoraFileError, match=r"a\.safetensors is no LoRA: its first tensors are double_blocks"):
        read_lora(tmp_path / "a.safetensors")


SCHNELL = FluxShape(**{**SMALL.__dict__, "guidance": False})


@pytest.mark.parametrize(
    ("base", "told"),
    [
        (SCHNELL, r"the base has no guidance, as FLUX.1-schnell: time_text_embed\.guidance_embedder\.linear_1"),
        (FluxShape(**{**SMALL.__dict__, "double_blocks": 1}), r"the base lacks its layers: transformer_blocks\.1\."),
        (FluxShape(**{**SMALL.__dict__, "heads": 4}), r"the base has \(\d+, \d+\) where the LoRA has"),
    ],
)
def test_another_base_is_told(base: FluxShape, told: str) -> None:
    with pytest.raises(LoraFileError, match=rf"it was made for another FLUX .*{told}"):
        check_fits(make_adapter(), base, "it")
    check_fits(make_adapter(), SMALL, "it")
    check_fits(make_adapter(targets="attention"), SCHNELL, "it")


# ---------------------------------------------------------------- golden lists


def golden_kohya(rank: int) -> dict[str, tuple[int, ...]]:
    """P29. Every name and shape of a LoRA on all linear layers of FLUX.1-dev, as ComfyUI, Forge and kohya look for it:
    up matrix's rows, down matrix's columns, and how many ranks a fused one has."""
    w = 3072
    layers: dict[str, tuple[int, int, int]] = {
        "img_in": (w, 64, 1),
        "txt_in": (w, 4096, 1),
        "time_in_in_layer": (w, 256, 1),
        "time_in_out_layer": (w, w, 1),
        "guidance_in_in_layer": (w, 256, 1),
        "guidance_in_out_layer": (w, w, 1),
        "vector_in_in_layer": (w, 768, 1),
        "vector_in_out_layer": (w, w, 1),
        "final_layer_linear": (64, w, 1),
        "final_layer_adaLN_modulation_1": (2 * w, w, 1),
    }
    for i in range(19):
        for stream in ("img", "txt"):
            layers[f"double_blocks_{i}_{stream}_attn_qkv"] = (9216, w, 3)
            layers[f"double_blocks_{i}_{stream}_attn_proj"] = (w, w, 1)
            layers[f"double_blocks_{i}_{stream}_mlp_0"] = (12288, w, 1)
            layers[f"double_blocks_{i}_{stream}_mlp_2"] = (w, 12288, 1)
            layers[f"double_blocks_{i}_{stream}_mod_lin"] = (18432, w, 1)
    for i in range(38):
        layers[f"single_blocks_{i}_linear1"] = (21504, w, 4)
        layers[f"single_blocks_{i}_linear2"] = (w, 15360, 1)
        layers[f"single_blocks_{i}_modulation_lin"] = (9216, w, 1)
    golden: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, parts) in layers.items():
        golden[f"lora_unet_{name}.alpha"] = ()
        golden[f"lora_unet_{name}.lora_down.weight"] = (parts * rank, columns)
        golden[f"lora_unet_{name}.lora_up.weight"] = (rows, parts * rank)
    return golden


def golden_diffusers(rank: int) -> dict[str, tuple[int, ...]]:
    w = 3072
    embedders = {"timestep_embedder": 256, "guidance_embedder": 256, "text_embedder": 768}
    layers = {"x_embedder": (w, 64), "context_embedder": (w, 4096), "norm_out.linear": (2 * w, w), "proj_out": (64, w)}
    for name, size in embedders.items():
        layers[f"time_text_embed.{name}.linear_1"] = (w, size)
        layers[f"time_text_embed.{name}.linear_2"] = (w, w)
    for i in range(19):
        block = f"transformer_blocks.{i}"
        for name in ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]:
            layers[f"{block}.attn.{name}"] = (w, w)
        for name in ("ff", "ff_context"):
            layers[f"{block}.{name}.net.0.proj"] = (12288, w)
            layers[f"{block}.{name}.net.2"] = (w, 12288)
        for name in ("norm1", "norm1_context"):
            layers[f"{block}.{name}.linear"] = (18432, w)
    for i in range(38):
        block = f"single_transformer_blocks.{i}"
        for name in ("to_q", "to_k", "to_v"):
            layers[f"{block}.attn.{name}"] = (w, w)
        layers[f"{block}.proj_mlp"] = (12288, w)
        layers[f"{block}.proj_out"] = (w, 15360)
        layers[f"{block}.norm.linear"] = (9216, w)
    golden: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in layers.items():
        golden[f"transformer.{name}.lora_A.weight"] = (rank, columns)
        golden[f"transformer.{name}.lora_B.weight"] = (rows, rank)
    return golden


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_and_shapes_at_flux_1s_full_depth(layout: Layout) -> None:
    """P29. Without numbers: on the meta device."""
    file = tensors_of(make_adapter(FluxShape(), rank=lambda _: 16, device="meta"), layout)
    golden = golden_kohya(16) if layout == "kohya" else golden_diffusers(16)
    assert {name: tuple(tensor.shape) for name, tensor in file.items()} == golden
    assert len(golden) == {"kohya": 3 * (10 + 19 * 10 + 38 * 3), "diffusers": 2 * (10 + 19 * 14 + 38 * 6)}[layout]
    assert all(tensor.dtype == torch.float32 for tensor in file.values())
    assert all(tensor.is_contiguous() for tensor in file.values())
