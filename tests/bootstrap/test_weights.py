"""Every kind of base, right and wrong, ends in ``Weights`` or in words that tell what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.bases import FLUX_TINY, FLUX_TINY_SCHNELL
from bootstrap.flux_shape import FluxShape
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.outcome import AccessError
from bootstrap.parts import vae_in_bfl
from bootstrap.single_files import tokenizer_for
from bootstrap.tensor_files import read_tensors, write_tensors
from bootstrap.volume import Volume
from bootstrap.weights import Weights, fetch_weights, peek_shape
from jobs.problem import JobError
from jobs.schema import Job
from tests.loopback_hub import LoopbackHub, Repo

SHARD = "transformer/diffusion_pytorch_model-00003-of-00003.safetensors"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path / "volume")
    volume.create()
    return volume


def copy_of(folder: Path, target: Path) -> Path:
    """A copy to spoil; what is not touched is linked."""
    return Path(shutil.copytree(folder, target, copy_function=os.link))


def job(base: str | Path, **keys: Any) -> Job:
    common = {"name": "test", "method": "full", "datasets": [{"path": "datasets/test"}]}
    return Job.model_validate(common | {"base": str(base)} | keys)


def fetch(volume: Volume, base: str | Path, token: str | None = None, **keys: Any) -> Weights:
    return fetch_weights(job(base, **keys), volume, token, lambda line: None)


def refusal(volume: Volume, base: str | Path, **keys: Any) -> str:
    with pytest.raises(JobError) as caught:
        fetch(volume, base, **keys)
    return str(caught.value)


def single_file_keys(folder: Path) -> dict[str, Any]:
    encoders = {"clip": str(folder / "text_encoder"), "t5": str(folder / "text_encoder_2")}
    return {"vae": str(folder / "vae"), "text_encoders": encoders}


# ---- bases that are right ----


def test_embedded_is_made_on_the_volume_once(volume: Volume) -> None:
    assert peek_shape("flux-tiny-schnell", volume) == FLUX_TINY_SCHNELL
    weights = fetch(volume, "flux-tiny-schnell")
    made = (volume.models / "flux-tiny-schnell").stat().st_mtime_ns
    assert weights.shape == FLUX_TINY_SCHNELL
    assert fetch(volume, "flux-tiny-schnell") == weights
    assert (volume.models / "flux-tiny-schnell").stat().st_mtime_ns == made
    assert [path.name for path in volume.models.iterdir()] == ["flux-tiny-schnell"]


def test_local_folder(volume: Volume, flux_tiny: Path) -> None:
    weights = fetch(volume, flux_tiny)
    assert weights.layout == "diffusers"
    assert [path.name[-22:] for path in weights.transformer] == [
        f"{i:05}-of-00003.safetensors"[-22:] for i in (1, 2, 3)
    ]
    assert weights.shape == FLUX_TINY == peek_shape(str(flux_tiny), volume)
    assert weights.text_tokens == 32
    for name, part in (("vae", weights.vae), ("tokenizer_2", weights.tokenizer_2), ("scheduler", weights.scheduler)):
        assert part == flux_tiny / name
    assert fetch(volume, flux_tiny) == weights


def test_a_folder_by_its_path_below_the_volume(volume: Volume, flux_tiny: Path) -> None:
    copy_of(flux_tiny, volume.models / "mine")
    weights = fetch(volume, "models/mine")
    assert weights.vae == volume.models / "mine" / "vae"
    assert weights.digest == fetch(volume, flux_tiny).digest  # of the content, not of the place
    assert weights.revision == fetch(volume, flux_tiny).revision


@pytest.mark.parametrize("whole_folders", [False, True])
def test_single_file(whole_folders: bool, volume: Volume, flux_tiny: Path) -> None:
    keys = single_file_keys(flux_tiny)
    if whole_folders:  # the diffusers folder that the parts lie in does as well
        keys = {"vae": str(flux_tiny), "text_encoders": {"clip": str(flux_tiny), "t5": str(flux_tiny)}}
    weights = fetch(volume, flux_tiny / SINGLE_FILE, **keys)
    assert weights.layout == "bfl"
    assert weights.transformer == (flux_tiny / SINGLE_FILE,)
    assert weights.shape == FLUX_TINY == FluxShape.from_config_file(weights.config)
    assert peek_shape(str(flux_tiny / SINGLE_FILE), volume) == FLUX_TINY
    folder = fetch(volume, flux_tiny)
    assert (weights.tokenizer, weights.tokenizer_2) == (folder.tokenizer, folder.tokenizer_2)
    assert weights.digest == folder.digest


def test_a_single_file_has_its_scheduler_and_class_loads_the_config(
    volume: Volume, flux_tiny: Path, flux_tiny_schnell: Path
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    for folder in (flux_tiny, flux_tiny_schnell):
        weights = fetch(volume, folder / SINGLE_FILE, **single_file_keys(folder))
        made = FlowMatchEulerDiscreteScheduler.from_pretrained(weights.scheduler).config
        given = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler").config
        assert {k: v for k, v in made.items() if k[0] != "_"} == {k: v for k, v in given.items() if k[0] != "_"}
        with torch.device("meta"):
            model: Any = FluxTransformer2DModel.from_config(json.loads(weights.config.read_text()))
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == weights.shape.tensors()


def test_from_the_hub(hub: LoopbackHub, volume: Volume, flux_tiny: Path) -> None:
    hub.tokens = {"hf_reader"}
    hub.repos["painter/flux"] = Repo(flux_tiny, gated=True, readers=("hf_reader",))
    assert peek_shape("painter/flux", volume) is None
    weights = fetch(volume, "painter/flux", token="hf_reader\n")
    folder = volume.models / "painter--flux" / hub.repos["painter/flux"].commit
    assert weights.vae == folder / "vae"
    assert weights.revision == folder.name
    assert weights.digest == fetch(volume, flux_tiny).digest
    assert not list(folder.rglob(SINGLE_FILE))
    hub.requests.clear()
    assert fetch(volume, "painter/flux") == weights
    assert fetch(volume, f"painter/flux@{folder.name}") == weights
    assert peek_shape("painter/flux", volume) == FLUX_TINY
    assert hub.requests == []


@pytest.mark.parametrize("path", [SHARD, "vae/config.json"])
def test_a_fetched_file_that_was_damaged_in_place_is_fetched_again(
    path: str, hub: LoopbackHub, volume: Volume, flux_tiny: Path
) -> None:
    """As a disk does it: size and time are as they were."""
    hub.repos["painter/flux"] = Repo(flux_tiny)
    weights = fetch(volume, "painter/flux")
    damaged = volume.models / "painter--flux" / weights.revision / path
    times = damaged.stat().st_mtime_ns
    damaged.write_bytes(bytes(damaged.stat().st_size))
    os.utime(damaged, ns=(times, times))
    hub.requests.clear()
    assert fetch(volume, "painter/flux") == weights
    assert damaged.read_bytes() == (flux_tiny / path).read_bytes()
    assert len([request for request in hub.requests if request.startswith("HEAD ")]) == 1


def test_a_hub_that_refuses(hub: LoopbackHub, volume: Volume) -> None:
    with pytest.raises(AccessError, match="nobody/nothing is not on the hub"):
        fetch(volume, "nobody/nothing")


def test_peeking_at_known_names_needs_no_network(volume: Volume) -> None:
    assert peek_shape("black-forest-labs/FLUX.1-dev", volume) == FluxShape()
    assert peek_shape("black-forest-labs/FLUX.1-dev@main", volume) == FluxShape()
    assert peek_shape("black-forest-labs/FLUX.1-Krea-dev", volume) == FluxShape()
    assert peek_shape("black-forest-labs/FLUX.1-schnell", volume) == FluxShape(guidance=False)
    assert peek_shape("flux-tiny", volume) == FLUX_TINY


def test_looking_at_a_base_imports_no_torch() -> None:
    program = "import sys, bootstrap.weights; print('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


# ---- bases that are wrong ----


@pytest.mark.parametrize(
    ("base", "told"),
    [
        ("./flux", "is not there"),
        ("/nowhere/flux", "is not there"),
        ("models/flux-devv", "has flux-dev: is it that?"),
        ("models/flux-devv/", "has flux-dev: is it that?"),
        ("volume/flux", "is not there"),  # written with the name of the mount point
        ("a/b/c", "is not there"),
        ("models/flux-devv@main", "is not there"),
        ("models/flux1.safetensors", "is not there"),
        ("models/notes.txt", "is not a .safetensors file"),
        ("flux-tiney", "Did you mean flux-tiny?"),
        ("FLUX.1-dev", "Did you mean black-forest-labs/FLUX.1-dev?"),
        ("something", "Write a hub id"),
        ("models\\flux", "is not there"),
    ],
)
def test_a_base_that_names_nothing(base: str, told: str, volume: Volume) -> None:
    (volume.models / "flux-dev").mkdir()
    (volume.models / "notes.txt").write_text("hello")
    keys = single_file_keys(volume.models) if base.endswith(".safetensors") else {}
    assert told in refusal(volume, base, **keys)


def test_every_missing_misshapen_and_foreign_tensor_is_told(volume: Volume, flux_tiny: Path) -> None:
    folder = copy_of(flux_tiny, volume.models / "broken")
    tensors = read_tensors(folder / SHARD)
    lost, grown, *_ = sorted(tensors)
    del tensors[lost]
    tensors[grown] = torch.zeros(3, 5, dtype=torch.bfloat16)
    tensors["stranger.weight"] = torch.zeros(1, dtype=torch.bfloat16)
    (folder / SHARD).unlink()
    write_tensors(folder / SHARD, tensors)
    told = refusal(volume, folder)
    assert f"lacks: {lost}" in told
    assert f"{grown} is (3, 5), not" in told
    assert "tensors that FLUX does not: stranger.weight" in told


def test_a_cut_shard(volume: Volume, flux_tiny: Path) -> None:
    folder = copy_of(flux_tiny, volume.models / "broken")
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    (folder / SHARD).write_bytes(content[:-10])
    assert "was cut or overwritten" in refusal(volume, folder)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("transformer/config.json", "transformer/config.json is not there"),
        (SHARD, "lacks diffusion_pytorch_model-00003-of-00003.safetensors"),
        ("vae/config.json", "vae/config.json is not there"),
        ("text_encoder/model.safetensors", "text_encoder/model.safetensors is not there"),
        ("tokenizer_2/tokenizer_config.json", "tokenizer_2/tokenizer_config.json is not there"),
        ("scheduler/scheduler_config.json", "scheduler/scheduler_config.json is not there"),
    ],
)
def test_a_folder_with_a_part_missing(lost: str, told: str, volume: Volume, flux_tiny: Path) -> None:
    folder = copy_of(flux_tiny, volume.models / "broken")
    (folder / lost).unlink()
    assert told in refusal(volume, folder)


def test_parts_of_another_model(volume: Volume, flux_tiny: Path) -> None:
    folder = copy_of(flux_tiny, volume.models / "mixed")
    config = json.loads((folder / "text_encoder_2" / "config.json").read_text())
    (folder / "text_encoder_2" / "config.json").unlink()
    (folder / "text_encoder_2" / "config.json").write_text(json.dumps(config | {"d_model": 4096}))
    assert "d_model is 4096, the transformer takes text tokens of 128" in refusal(volume, folder)


def test_another_kind_of_model(volume: Volume) -> None:
    folder = volume.models / "other" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}')
    assert "describes SD3Transformer2DModel, not a FluxTransformer2DModel" in refusal(volume, folder.parent)
    (folder / "config.json").write_text('{"_class_name": "FluxTransformer2DModel", "in_channels": 384}')
    assert "takes 384 channels" in refusal(volume, folder.parent)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "It is a LoRA"),
        ("model.diffusion_model.img_in.weight", "holds no FLUX transformer"),
        ("transformer_blocks.0.attn.to_q.weight", "holds no FLUX transformer"),
        ("blocks.0.weight", "Its first tensors are blocks.0.weight"),
    ],
)
def test_a_file_that_holds_no_transformer(name: str, told: str, volume: Volume, flux_tiny: Path) -> None:
    path = volume.models / "it.safetensors"
    write_tensors(path, {name: torch.zeros(4, 4)})
    assert told in refusal(volume, path, **single_file_keys(flux_tiny))


def test_numbers_too_coarse_to_train_on(volume: Volume, flux_tiny: Path) -> None:
    path = volume.models / "fp8.safetensors"
    tensors = read_tensors(flux_tiny / SINGLE_FILE)
    write_tensors(path, {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()})
    assert "float8_e4m3fn" in refusal(volume, path, **single_file_keys(flux_tiny))


def test_an_encoder_without_tokenizer(volume: Volume, flux_tiny: Path) -> None:
    keys = single_file_keys(flux_tiny)
    keys["text_encoders"]["t5"] = str(copy_of(flux_tiny / "text_encoder_2", volume.models / "t5"))
    assert "no tokenizer lies in" in refusal(volume, flux_tiny / SINGLE_FILE, **keys)


# ---- one file for each part


def all_files(flux_tiny: Path, folder: Path) -> dict[str, Any]:
    """A base, VAE and encoders as ComfyUI users have them: four files, in other names and types than diffusers'."""
    folder.mkdir(parents=True, exist_ok=True)
    clip = read_tensors(flux_tiny / "text_encoder" / "model.safetensors")
    named = {f"text_model.{name.removeprefix('text_model.')}": tensor.half() for name, tensor in clip.items()}
    named["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    write_tensors(folder / "clip_l.safetensors", named)
    t5 = read_tensors(flux_tiny / "text_encoder_2" / "model.safetensors")
    t5["encoder.embed_tokens.weight"] = t5["shared.weight"].clone()
    write_tensors(folder / "t5xxl_fp16.safetensors", {name: tensor.half() for name, tensor in t5.items()})
    vae = read_tensors(flux_tiny / "vae" / "diffusion_pytorch_model.safetensors")
    write_tensors(
        folder / "ae.safetensors", {vae_in_bfl(name, 4): as_bfl(name, tensor) for name, tensor in vae.items()}
    )
    shutil.copyfile(
        flux_tiny / "text_encoder" / "config.json", folder / "config.json"
    )  # how many heads a tiny CLIP has
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(flux_tiny / name, folder.parent / name, dirs_exist_ok=True)
    encoders = {"clip": str(folder / "clip_l.safetensors"), "t5": str(folder / "t5xxl_fp16.safetensors")}
    return {"vae": str(folder / "ae.safetensors"), "text_encoders": encoders}


def as_bfl(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :, None, None] if ".attentions.0.to_" in name and tensor.dim() == 2 else tensor


@pytest.fixture
def files(volume: Volume, flux_tiny: Path) -> dict[str, Any]:
    keys = all_files(flux_tiny, volume.models / "comfy")
    config = json.loads((volume.models / "comfy" / "config.json").read_text())
    (volume.models / "comfy" / "config.json").write_text(json.dumps(config | {"norm_num_groups": 8}))
    return keys


def test_all_parts_as_files(volume: Volume, flux_tiny: Path, files: dict[str, Any]) -> None:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, T5EncoderModel

    from trainer.encode import _load

    weights = fetch(volume, flux_tiny / SINGLE_FILE, **files)
    assert fetch(volume, flux_tiny / SINGLE_FILE, **files) == weights
    assert weights.tokenizer == (volume.models / "tokenizer").absolute()
    assert not list((volume.cache / "parts").glob(".*"))
    given: Any = AutoencoderKL.from_pretrained(flux_tiny / "vae")
    made: Any = AutoencoderKL.from_pretrained(weights.vae)
    for key, value in given.config.items():
        assert key[0] == "_" or made.config[key] == value, key
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, made.state_dict()[name])
    for kind, folder, inside in (
        (CLIPTextModel, weights.clip, "text_encoder"),
        (T5EncoderModel, weights.t5, "text_encoder_2"),
    ):
        right, read = (_load(kind, path, torch.device("cpu")).state_dict() for path in (flux_tiny / inside, folder))
        assert right.keys() == read.keys()
        assert all(torch.allclose(right[name], read[name], atol=1e-2) for name in right)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
def test_fine_tunes_of_others(layout: str, prefix: str, volume: Volume, flux_tiny: Path) -> None:
    if layout == "bfl":
        tensors = read_tensors(flux_tiny / SINGLE_FILE)
    else:
        shards = sorted((flux_tiny / "transformer").glob("*.safetensors"))
        tensors = {name: tensor for shard in shards for name, tensor in read_tensors(shard).items()}
    path = volume.models / "somebody-elses-schnell.safetensors"  # which it is, its tensors tell
    write_tensors(path, {prefix + name: tensor for name, tensor in tensors.items()})
    weights = fetch(volume, path, **single_file_keys(flux_tiny))
    assert (weights.layout, weights.prefix, weights.shape) == (layout, prefix, FLUX_TINY)
    assert peek_shape(str(path), volume) == FLUX_TINY

    from trainer.model import bare_model, fill, sources
    from trainer.world import World

    model = bare_model(weights.shape).to_empty(device="cpu")
    alone = World(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    fill(model, sources(weights.shape, weights.transformer, weights.layout, weights.prefix), alone)
    folder = fetch(volume, flux_tiny)
    right = bare_model(folder.shape).to_empty(device="cpu")
    fill(right, sources(folder.shape, folder.transformer, folder.layout), alone)
    for name, tensor in right.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_pruned_model_is_told_by_its_tensors(volume: Volume, flux_tiny: Path) -> None:
    tensors = read_tensors(flux_tiny / SINGLE_FILE)
    pruned = {name: tensor for name, tensor in tensors.items() if not name.startswith("single_blocks.2.")}
    write_tensors(volume.models / "flux1-dev.safetensors", pruned)
    weights = fetch(volume, "models/flux1-dev.safetensors", **single_file_keys(flux_tiny))
    assert weights.shape == replace(FLUX_TINY, single_blocks=2)


def test_everything_in_one_file_is_refused(volume: Volume, flux_tiny: Path) -> None:
    tensors = read_tensors(flux_tiny / SINGLE_FILE)
    all_in_one = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    path = volume.models / "all.safetensors"
    write_tensors(path, all_in_one | {"vae.decoder.conv_in.weight": torch.zeros(1)})
    assert "everything in one" in refusal(volume, path, **single_file_keys(flux_tiny))


def test_an_encoder_in_fp8_is_used_with_a_note(volume: Volume, flux_tiny: Path, files: dict[str, Any]) -> None:
    path = Path(files["text_encoders"]["t5"])
    tensors = read_tensors(path)
    write_tensors(path, {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()})
    lines: list[str] = []
    fetch_weights(job(flux_tiny / SINGLE_FILE, **files), volume, None, lines.append)
    assert any("is in fp8" in line for line in lines)
    write_tensors(path, tensors | {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)})
    assert "fp8 with scales" in refusal(volume, flux_tiny / SINGLE_FILE, **files)


def test_missing_misshapen_and_foreign_tensors_of_parts_are_told(
    volume: Volume, flux_tiny: Path, files: dict[str, Any]
) -> None:
    path = Path(files["text_encoders"]["t5"])
    tensors = read_tensors(path)
    del tensors["encoder.final_layer_norm.weight"]
    tensors["encoder.block.1.layer.0.layer_norm.weight"] = torch.zeros(3)
    tensors["decoder.x"] = torch.zeros(1)
    write_tensors(path, tensors)
    told = refusal(volume, flux_tiny / SINGLE_FILE, **files)
    for words in ("text_encoders.t5", "lacks: encoder.final_layer_norm.weight", "is (3,), not (128,)", "decoder.x"):
        assert words in told
    files["text_encoders"]["clip"] = files["vae"]
    assert "is not a CLIP text encoder" in refusal(volume, flux_tiny / SINGLE_FILE, **files)


def test_a_folder_whose_encoder_lacks_a_tensor(volume: Volume, flux_tiny: Path) -> None:
    folder = copy_of(flux_tiny, volume.models / "broken")
    path = folder / "text_encoder" / "model.safetensors"
    tensors = read_tensors(path)
    lost = sorted(tensors)[0]
    del tensors[lost]
    path.unlink()
    write_tensors(path, tensors)
    assert f"lacks: {lost.removeprefix('text_model.')}" in refusal(volume, folder)


def test_tokenizers_come_from_the_hub_where_nobody_has_them(hub: LoopbackHub, volume: Volume, flux_tiny: Path) -> None:
    real = {"embeddings.token_embedding.weight": torch.zeros(49408, 1)}
    path = volume.models / "clip" / "clip_l.safetensors"
    path.parent.mkdir()
    write_tensors(path, {f"text_model.{name}": tensor for name, tensor in real.items()})
    hub.repos["openai/clip-vit-large-patch14"] = Repo(flux_tiny / "tokenizer")
    found = tokenizer_for(path, "clip", "tokenizer", "text_encoders.clip", volume, None, lambda line: None)
    assert (found / "tokenizer_config.json").read_bytes() == (
        flux_tiny / "tokenizer" / "tokenizer_config.json"
    ).read_bytes()
    hub.requests.clear()
    assert tokenizer_for(path, "clip", "tokenizer", "text_encoders.clip", volume, None, lambda line: None) == found
    assert hub.requests == []
