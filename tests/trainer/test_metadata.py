"""What a finished file says of itself: read by galleries, so by their names; and never what is nobody's business."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from bootstrap.dataset import Item
from bootstrap.lora_file import tensors_of
from bootstrap.tensor_files import read_header, read_tensors, write_tensors
from tests.loras import make_adapter
from tests.runs import make_job, make_run
from trainer.file_hashes import PLACES, fill_places, with_places
from trainer.metadata import MOST_TAGS, in_layout, metadata, tag_frequency


def item(path: str, caption: str, dataset: int = 0, bucket: tuple[int, int] = (64, 64)) -> Item:
    return Item(path, "", caption, 2, 64, 64, bucket, dataset)


def told(folder: Path, items: tuple[Item, ...] = (), **keys: Any) -> dict[str, str]:
    run = make_run(folder, make_job(**keys))
    run.folder.root.mkdir(parents=True)
    run.write(items)
    return metadata(run, 12)


LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 8, "alpha": 4}}


def test_a_lora_says_what_galleries_show(tmp_path: Path) -> None:
    datasets = [{"path": "datasets/flowers", "trigger": "pprflwr"}, {"path": "https://a.example/x.zip?token=s3cret"}]
    items = (
        item("a.jpg", "[trigger], red, a  tulip"),
        item("a.jpg", "[trigger], red, a  tulip", bucket=(32, 32)),
        item("b.jpg", "red, " + "a long sentence " * 9),
        item("c.jpg", "red", dataset=1),
    )
    keys = LORA | {"datasets": datasets, "resolution": [512, 1024], "base": "/volume/secret/place/my-base.safetensors"}
    keys |= {"vae": "v", "text_encoders": {"clip": "c", "t5": "t"}}
    found = told(tmp_path, items, **keys)
    expected = {
        "modelspec.architecture": "flux-1-dev/lora",
        "modelspec.title": "test",
        "modelspec.resolution": "1024x1024",
        "modelspec.trigger_phrase": "pprflwr",
        "modelspec.license": "that of its base, my-base.safetensors",
        "ss_output_name": "test",
        "ss_base_model_version": "flux1",
        "ss_sd_model_name": "my-base.safetensors",
        "ss_network_module": "networks.lora_flux",
        "ss_network_dim": "8",
        "ss_network_alpha": "4",
        "ss_resolution": "(1024, 1024)",
        "ss_num_train_images": "8",
        "ss_steps": "12",
        "ss_epoch": "1",
        "ss_num_epochs": "1",
        "fluxpod.blocks": "2+4",
        "fluxpod.layout": "kohya",
    }
    shape = make_run(tmp_path).weights.shape
    expected["fluxpod.blocks"] = f"{shape.double_blocks}+{shape.single_blocks}"
    assert {name: found.get(name) for name in expected} == expected
    tags = {"flowers": {"pprflwr": 2, "red": 2, "a tulip": 1}, "dataset 2": {"red": 1}}
    assert json.loads(found["ss_tag_frequency"]) == tags
    assert "s3cret" not in json.dumps(found)
    assert "/volume" not in json.dumps(found)
    assert str(tmp_path) not in json.dumps(found)


@pytest.mark.parametrize("mask", [False, True])
def test_settings_that_using_it_must_match_are_told(mask: bool, tmp_path: Path) -> None:
    """P56, P57, P58: shift, guidance in training, and the mask of T5's tokens."""
    found = told(tmp_path, **LORA | {"t5_mask": mask, "timestep_sampling": "shift", "discrete_flow_shift": 2.5})
    assert found["ss_apply_t5_attn_mask"] == str(mask)
    assert found["fluxpod.t5_mask"] == str(mask).lower()
    assert found["ss_guidance_scale"] == "1"
    assert (found["ss_timestep_sampling"], found["ss_discrete_flow_shift"]) == ("shift", "2.5")


def test_kinds_of_adapters_are_told(tmp_path: Path) -> None:
    found = told(tmp_path, method="lora", lora={"rank": 8, "dora": True, "rslora": True})
    assert json.loads(found["ss_network_args"]) == {"dora_wd": True, "rs_lora": True}


def test_a_checkpoint_has_nothing_of_a_lora(tmp_path: Path) -> None:
    found = told(tmp_path, (item("a.jpg", "red"),))
    assert not any(name.startswith(("ss_", "sshs_")) for name in found)
    assert found["modelspec.architecture"] == "flux-1-dev"
    assert found["fluxpod.t5_mask"] == "false"


def test_only_the_most_frequent_tags_are_told() -> None:
    items = [item(f"{i}.jpg", f"common, rare {i}") for i in range(MOST_TAGS + 50)]
    (tags,) = tag_frequency(items, [("flowers", "")]).values()
    assert len(tags) == MOST_TAGS
    assert next(iter(tags.items())) == ("common", MOST_TAGS + 50)


def test_another_layout_is_another_file() -> None:
    before = {"ss_steps": "3", "lora_adapter_metadata": "{}", "sshs_model_hash": "of the other file"}
    assert in_layout(before, "diffusers") == {"ss_steps": "3", "fluxpod.layout": "diffusers"} | PLACES


# ---------------------------------------------------------------- hashes


def by_the_field(file: Path) -> dict[str, str]:
    """As sd-webui-additional-networks and kohya's trainer define them, by the library's own writer."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    kept = {name: text for name, text in read_header(file).metadata.items() if name.startswith("ss_")}
    lean = io.BytesIO(safetensors.torch.save(read_tensors(file), kept))
    lean.seek(0x100000)
    whole = hashlib.sha256(data[start:]).hexdigest()
    legacy = hashlib.sha256(lean.read(0x10000)).hexdigest()[:8]
    return {"modelspec.hash_sha256": f"0x{whole}", "sshs_model_hash": whole, "sshs_legacy_hash": legacy}


@pytest.mark.parametrize("size", [10, 600])
def test_the_hashes_are_those_of_the_field(size: int, tmp_path: Path) -> None:
    """Of files below and beyond the first megabyte, where the old hash begins."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(size, 997, generator=generator) for name in "abc"}
    file = tmp_path / "a.safetensors"
    write_tensors(file, tensors, with_places({"ss_network_dim": "8", "modelspec.title": "test"}))
    head = fill_places(file)
    found = read_header(file).metadata
    assert {name: found[name] for name in PLACES} == by_the_field(file)
    assert found["modelspec.title"] == "test"
    assert file.read_bytes().startswith(head)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(file).items())
    assert fill_places(file) == head, "once is enough"


def test_a_file_without_places_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_tensors(file, tensors_of(make_adapter(targets="attention"), "kohya"), {"modelspec.title": "test"})
    before = file.read_bytes()
    fill_places(file)
    assert file.read_bytes() == before
