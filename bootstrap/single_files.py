"""CLIP, T5 or VAE that come as one file each, as ComfyUI users have them, made into folders that the libraries load.

``clip_l.safetensors`` and ``t5xxl_fp16.safetensors`` hold the libraries' own tensors: a link and a configuration are
enough. ``ae.safetensors`` has Black Forest Labs' names and is written once more, into the cache, under diffusers'.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootstrap.base_files import PART_FILES, check_tensors, read_entries, tokenizer_beside
from bootstrap.bases import wrong
from bootstrap.download import fetch_repo
from bootstrap.hub import RemoteFile
from bootstrap.manifest import MANIFEST, Manifest
from bootstrap.outcome import AccessError
from bootstrap.parts import CONFIG_OF, Part, is_bfl_vae, plain_names, vae_in_bfl, vae_tensors
from bootstrap.transfers import Say
from bootstrap.volume import Volume, own_parts, read_json, write_json

if TYPE_CHECKING:
    from bootstrap.tensor_files import TensorEntry

MEANT: dict[Part, str] = {
    "clip": "a CLIP text encoder, such as clip_l.safetensors",
    "t5": "a T5 encoder, such as t5xxl_fp16.safetensors",
    "vae": "FLUX's VAE, such as ae.safetensors",
}
# Where the tokenizers of the encoders that FLUX.1 uses come from, and the vocabularies by which these are told. A file
# of weights brings none; these repositories are open to all, and a few megabytes are taken from them.
TOKENIZERS: dict[Part, tuple[str, int]] = {
    "clip": ("openai/clip-vit-large-patch14", 49408),
    "t5": ("google/t5-v1_1-xxl", 32128),
}
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "vocab.json", "merges.txt", "special_tokens_map.json", "spiece.model",
)  # fmt: skip


def part_folder(path: Path, part: Part, key: str, volume: Volume, say: Say) -> Path:
    """A folder in the cache with the part that ``path`` holds. Raises JobError with every tensor that does not fit."""
    entries = read_entries([path], key)
    if any(name == "scaled_fp8" or name.endswith((".scale_weight", ".scale_input")) for name in entries):
        remedy = "Give it in 16 bits, e.g. t5xxl_fp16.safetensors"
        raise wrong(key, f"{path} is in fp8 with scales, which no text should be encoded with", remedy)
    new_names = _diffusers_names(entries) if part == "vae" and is_bfl_vae(_shapes(entries)) else {}
    found = {new_names.get(name, name): _linear(new_names.get(name, name), entry) for name, entry in entries.items()}
    config = _config(path, part, key, found)
    check_tensors(path, found, part, config, key)
    if any("float8" in str(entry.dtype) for entry in entries.values()):
        say(f"{path} is in fp8: it is used as 16 bits, but what it lost is lost; t5xxl_fp16.safetensors is better")
    digest = hashlib.sha256(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns} {config}".encode()).hexdigest()
    folder = (volume.cache / "parts" / f"{part}-{digest[:16]}").absolute()
    if not folder.is_dir():
        _write(folder, path, part, config, new_names, found)
    return folder


def _shapes(entries: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in entries.items()}


def _diffusers_names(entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """BFL's name of every tensor that a VAE of this depth can have, to diffusers'."""
    blocks = len({name.split(".")[2] for name in entries if name.startswith("encoder.down.")})
    layers = len({name.split(".")[4] for name in entries if name.startswith("encoder.down.0.block.")})
    widths = range(1, blocks + 1)  # all different, so that every shortcut is named
    names = vae_tensors({"block_out_channels": widths, "layers_per_block": layers, "latent_channels": 16})
    return {vae_in_bfl(name, blocks): name for name in names}


def _linear(name: str, entry: TensorEntry) -> TensorEntry:
    """BFL's attention has 1 x 1 convolutions where diffusers has matrices: the same numbers."""
    squeezed = ".attentions.0.to_" in name and entry.shape[2:] == (1, 1)
    return replace(entry, shape=entry.shape[:2]) if squeezed else entry


def _config(path: Path, part: Part, key: str, found: Mapping[str, TensorEntry]) -> dict[str, Any]:
    beside = read_json(path.parent / "config.json")
    try:
        return CONFIG_OF[part](plain_names(part, _shapes(found)), beside if isinstance(beside, dict) else {})
    except KeyError:
        names = ", ".join(sorted(found)[:3]) or "nothing"
        raise wrong(key, f"{path} is not {MEANT[part]}", f"Its first tensors are {names}") from None
    except ValueError as error:
        raise wrong(key, f"{path}: {error}", "Give its folder, with config.json") from None


def _write(
    folder: Path,
    path: Path,
    part: Part,
    config: Mapping[str, Any],
    new_names: Mapping[str, str],
    found: Mapping[str, TensorEntry],
) -> None:
    from bootstrap.tensor_files import rename_tensors

    building = folder.with_name(f".{folder.name}.{own_parts()}.part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        write_json(building / "config.json", config)
        target = building / PART_FILES[part]
        if new_names:
            rename_tensors(path, target, {name: entry.shape for name, entry in found.items()}, new_names)
        else:
            _link(path.absolute(), target)
        building.replace(folder)
    except OSError:
        if not folder.is_dir():  # another process made the same
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _link(path: Path, target: Path) -> None:
    try:
        target.symlink_to(path)
    except OSError:  # a file system without links
        shutil.copyfile(path, target)


# ---- tokenizers


def tokenizer_for(encoder: Path, part: Part, name: str, key: str, volume: Volume, token: str | None, say: Say) -> Path:
    """The tokenizer's folder: beside the encoder, or of a FLUX.1 on this volume, or fetched from the hub.

    ``encoder`` is what the job names, ``name`` what a diffusers folder calls the tokenizer. The last two only for the
    encoders that FLUX.1 has. Raises JobError, AccessError.
    """
    beside = encoder.parent if encoder.is_file() else encoder
    if (found := tokenizer_beside(beside, name)) is not None:
        return found
    repo, vocabulary = TOKENIZERS[part]
    embedding = "embeddings.token_embedding.weight" if part == "clip" else "shared.weight"
    files = [encoder] if encoder.is_file() else sorted(encoder.glob("*.safetensors"))
    shapes = plain_names(part, _shapes(read_entries(files, key)))
    if shapes.get(embedding, (0,))[0] != vocabulary:
        raise wrong(
            key, f"no tokenizer lies in {beside} or in {beside.parent / name}", "Put its tokenizer folder there"
        )
    for path in sorted(volume.models.glob(f"*/*/{MANIFEST}")):
        manifest = Manifest.read(path.parent)
        config = path.parent / name / "tokenizer_config.json"
        if manifest and manifest.complete and not manifest.missing(path.parent) and config.is_file():
            return path.parent / name
    say(f"{encoder} brings no tokenizer: it is taken from {repo}")
    try:
        return fetch_repo(repo, "main", volume.models, token, say, choose=_tokenizer_files)[0]
    except AccessError as error:
        raise AccessError(f"{error} Or put the {name} folder of a downloaded FLUX.1-dev beside {beside}.") from None


def _tokenizer_files(repo: str, files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
    return tuple(file for file in files if file.path in TOKENIZER_FILES)
