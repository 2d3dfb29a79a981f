"""Training goes on from a LoRA file (``lora.start``) of any layout that other tools write: whole runs of flux-tiny."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.layout import module_in_bfl
from bootstrap.lora_file import Adapter, read_lora, tensors_of
from bootstrap.tensor_files import write_tensors
from bootstrap.validation import read_rounds
from bootstrap.volume import Volume
from tests.training import Trained, fill_volume, trained
from tiny.drawn import draw_dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANK, ALPHA = 4, 2
KEYS: dict[str, Any] = {
    "method": "lora",
    "steps": 3,
    "images_per_step": 2,
    "learning_rate": 1e-2,
    "warmup": 0,
    "validation": {"path": "datasets/others"},
}
SAME = 1e-3  # of a loss: where a layout multiplies alpha into a matrix, that rounds, and bf16 passes round it on
Tensors = dict[str, torch.Tensor]


def spelt(adapter: Adapter, module: Callable[[str], str], down: str, up: str, lengths: str, alpha: bool) -> Tensors:
    """A file's tensors by a tool's own names; ``module`` gives what it calls a layer."""
    tensors: Tensors = {}
    for name, each in adapter.items():
        stem = module(name)
        tensors |= {f"{stem}.{down}": each.down, f"{stem}.{up}": each.up * (1 if alpha else each.scale)}
        if alpha:
            tensors[f"{stem}.alpha"] = torch.tensor(each.scale * each.rank)
        if each.magnitude is not None:
            tensors[f"{stem}.{lengths}"] = each.magnitude
    return tensors


def underscored(prefix: str) -> Callable[[Adapter], Tensors]:
    def write(adapter: Adapter) -> Tensors:
        halves = ("lora_down.weight", "lora_up.weight", "dora_scale")
        return spelt(adapter, lambda name: prefix + name.replace(".", "_"), *halves, alpha=True)

    return write


def bfl_with_dots(adapter: Adapter) -> Tensors:
    """As ComfyUI's own trainer and others: fused as in kohya's layout."""
    dotted = {module_in_bfl(name)[0] for name in adapter}
    stems = {f"lora_unet_{name.replace('.', '_')}": f"diffusion_model.{name}" for name in dotted}
    told = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
    split = ((name.partition("."), tensor) for name, tensor in tensors_of(adapter, "kohya").items())
    return {f"{stems[stem]}.{told.get(role, role)}": tensor for (stem, _, role), tensor in split}


def before_peft(adapter: Adapter) -> Tensors:
    """As diffusers wrote until 0.20."""
    return spelt(adapter, "transformer.{}".format, "lora.down.weight", "lora.up.weight", "", alpha=False)


def peft(adapter: Adapter) -> Tensors:
    """The scale is in ``adapter_config.json``."""
    plain = {name: type(each)(each.down, each.up, 1.0, each.magnitude) for name, each in adapter.items()}
    halves = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    return spelt(plain, "base_model.model.{}".format, *halves, alpha=False)


LAYOUTS: dict[str, Callable[[Adapter], Tensors]] = {
    "kohya": lambda adapter: tensors_of(adapter, "kohya"),
    "diffusers": lambda adapter: tensors_of(adapter, "diffusers"),
    "peft": peft,
    "bfl-dots": bfl_with_dots,
    "diffusers-under-unet": underscored("lora_unet_"),
    "diffusers-under-transformer": underscored("lora_transformer_"),
    "lycoris": underscored("lycoris_"),
    "before-peft": before_peft,
}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Volume:
    volume = fill_volume(tmp_path_factory.mktemp("volume"), flux_tiny)
    draw_dataset(volume.datasets / "others", 4, seed=2)
    return volume


def lora(**more: Any) -> dict[str, Any]:
    return {"rank": RANK, "alpha": ALPHA, "targets": "all-linear"} | more


def losses(each: Trained) -> tuple[float, float]:
    """Of the pictures of validation, before the first step and after the last."""
    first, *_, last = [round.loss for round in read_rounds(each.run.folder.validation)]
    assert first is not None
    assert last is not None
    return first, last


@pytest.fixture(scope="module")
def ends(volume: Volume) -> dict[bool, Trained]:
    """A LoRA and a DoRA that were trained."""
    return {dora: trained(volume, name=f"end-{dora}", lora=lora(dora=dora), **KEYS) for dora in (False, True)}


def start(volume: Volume, name: str, tensors: Tensors, dora: bool = False) -> Trained:
    """Trains on from a file of these tensors."""
    folder = volume.models / name
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", {key: tensor.contiguous() for key, tensor in tensors.items()})
    if name.startswith("peft"):
        (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA, "use_dora": dora}))
    file = f"models/{name}/adapter_model.safetensors"
    return trained(volume, name=f"on-{name}", lora=lora(dora=dora, start=file), **KEYS)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_begins_with_the_loss_that_the_other_ended_with(
    layout: str, dora: bool, volume: Volume, ends: dict[bool, Trained]
) -> None:
    if dora and layout == "before-peft":
        pytest.skip("older than DoRA")
    adapter = read_lora(ends[dora].output)
    untrained, ended = losses(ends[dora])
    begun, _ = losses(start(volume, f"{layout}-{dora}", LAYOUTS[layout](adapter), dora))
    assert begun == pytest.approx(ended, rel=SAME)
    assert abs(untrained - ended) > 20 * SAME * ended


def test_one_down_matrix_of_q_k_and_v_becomes_one_of_each(volume: Volume, ends: dict[bool, Trained]) -> None:
    """kohya's trainer has a fused layer's parts share it: the same start as from a file that repeats it."""
    fused: dict[str, dict[int, str]] = {}
    for name in (adapter := read_lora(ends[False].output)):
        bfl, part = module_in_bfl(name)
        fused.setdefault(bfl, {})[part] = name
    shared: Tensors = {}
    for bfl, parts in fused.items():
        names = [parts[part] for part in sorted(parts)]
        down, stem = adapter[names[0]].down, f"lora_unet_{bfl.replace('.', '_')}"
        for name in names:
            adapter[name] = type(adapter[name])(down, adapter[name].up, adapter[name].scale)
        whole = tensors_of({name: adapter[name] for name in names}, "kohya")
        up = whole[f"{stem}.lora_up.weight"]
        shared |= {f"{stem}.lora_down.weight": down, f"{stem}.alpha": torch.tensor(float(ALPHA))}
        shared[f"{stem}.lora_up.weight"] = sum(up.split(RANK, dim=1)[1:], up[:, :RANK])
    repeated = losses(start(volume, "repeated", tensors_of(adapter, "diffusers")))
    found = losses(start(volume, "shared", shared))
    assert found[0] == pytest.approx(repeated[0], rel=SAME)
    assert found[0] != pytest.approx(losses(ends[False])[1], rel=SAME)
