"""Looking a base through: which files it consists of, which FLUX they hold, and whether they fit together.

Only headers and configurations are read. Whatever does not fit is a JobError that names the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootstrap.bases import wrong
from bootstrap.flux_shape import FluxShape
from bootstrap.volume import read_json
from jobs.problem import JobError, Problem

if TYPE_CHECKING:
    from bootstrap.tensor_files import TensorEntry

TRANSFORMER_FILE = "diffusion_pytorch_model.safetensors"
LISTED = 6  # names in a message; the rest is counted


def needed_file(path: Path, key: str) -> Path:
    if not path.is_file():
        remedy = "Give a whole diffusers folder: model_index.json and the folders transformer, vae, text_encoder, ..."
        raise wrong(key, f"{path} is not there", remedy)
    return path


def shape_of_config(path: Path) -> FluxShape:
    config: Any = read_json(path)
    name = config.get("_class_name") if isinstance(config, dict) else None
    if name != "FluxTransformer2DModel":
        raise wrong("base", f"{path} describes {name or 'nothing'}, not a FluxTransformer2DModel", "Give a FLUX.1 base")
    return _trainable(FluxShape.from_config(config), path)


def shape_of_file(path: Path, entries: Mapping[str, TensorEntry]) -> FluxShape:
    from bootstrap.layout import shape_of_bfl

    try:
        shape = shape_of_bfl({name: entry.shape for name, entry in entries.items()})
    except (KeyError, ValueError, IndexError):
        raise wrong("base", f"{path} holds no FLUX transformer in BFL layout", _what_it_is(entries)) from None
    return _trainable(shape, path)


def _what_it_is(entries: Iterable[str]) -> str:
    names = list(entries)
    if any("lora" in name.lower() for name in names):
        return "It is a LoRA: give the model that it was made for"
    if any(name.startswith("model.diffusion_model.") for name in names):
        return "It is a checkpoint with everything in one: give the transformer alone, as flux1-dev.safetensors is"
    if any(name.startswith("transformer_blocks.") for name in names):
        return "It is in diffusers layout: give the folder that its transformer/ folder lies in"
    shown = ", ".join(sorted(names)[:3])
    return f"Its first tensors are {shown}. Give a file such as flux1-dev.safetensors" if names else "It is empty"


def _trainable(shape: FluxShape, path: Path) -> FluxShape:
    if shape.channels != 64:
        raise wrong(
            "base",
            f"{path} takes {shape.channels} channels: it is made for filling, depth or edges, with a picture as input",
            "Give a text-to-image FLUX.1, which takes 64",
        )
    return shape


def shards_of(folder: Path) -> tuple[Path, ...]:
    """The weight files of a diffusers folder: the one, or those that its index names."""
    index = read_json(folder / f"{TRANSFORMER_FILE}.index.json")
    if not isinstance(index, dict):
        return (needed_file(folder / TRANSFORMER_FILE, "base"),)
    paths = tuple(folder / name for name in sorted(set(index.get("weight_map", {}).values())))
    if absent := [path.name for path in paths if not path.is_file()]:
        raise wrong("base", f"{folder} lacks {_some(absent)}", "Download the folder again")
    return paths


def read_entries(paths: Iterable[Path]) -> dict[str, TensorEntry]:
    from bootstrap.tensor_files import TensorFileError, read_header

    entries: dict[str, TensorEntry] = {}
    for path in paths:
        try:
            entries |= read_header(path).tensors
        except TensorFileError as error:
            raise wrong("base", str(error), "Download it again") from None
    return entries


def compare(path: Path, entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises JobError with every tensor that is missing, unknown, misshapen, or of a type that cannot be trained."""
    common = entries.keys() & shapes.keys()
    misshapen = [
        f"{name} is {entries[name].shape}, not {shapes[name]}" for name in common if entries[name].shape != shapes[name]
    ]
    odd = {str(entries[name].dtype).removeprefix("torch.") for name in common}
    odd -= {"bfloat16", "float16", "float32"}
    found = {
        "lacks": sorted(shapes.keys() - entries.keys()),
        "has tensors that FLUX does not": sorted(entries.keys() - shapes.keys()),
        "has tensors of another shape": sorted(misshapen),
        "holds numbers too coarse to train on": sorted(odd),
    }
    remedy = "Give the original weights, in bfloat16, float16 or float32"
    problems = [Problem(f"{path} {what}: {_some(names)}", remedy, key="base") for what, names in found.items() if names]
    if problems:
        raise JobError(problems)


def _some(names: list[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def check_parts(vae: Path, clip: Path, t5: Path, shape: FluxShape) -> None:
    """That VAE and encoders are whole files and of the sizes that this transformer takes."""
    problems = []
    for folder, key, meaning, needed in (
        (vae, "latent_channels", "the transformer takes latents of", shape.channels // 4),
        (clip, "hidden_size", "the transformer takes pooled text of", shape.pooled_size),
        (t5, "d_model", "the transformer takes text tokens of", shape.text_size),
    ):
        config = read_json(needed_file(folder / "config.json", "base")) or {}
        size = config.get(key, config.get("text_config", {}).get(key))
        if size != needed:
            remedy = "Give the VAE and encoders of the same FLUX"
            problems.append(Problem(f"{folder}: {key} is {size}, {meaning} {needed}", remedy, key="base"))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            problems.append(Problem(f"{folder} has no .safetensors file", "Convert or download it again", key="base"))
        try:
            read_entries(files)
        except JobError as error:
            problems.extend(error.problems)
    if problems:
        raise JobError(problems)


def model_folder(path: Path, inside: str, key: str) -> Path:
    """The folder of one model: ``path``, or the one of that name in it where ``path`` is a whole diffusers folder."""
    if path.is_file():
        raise wrong(
            key,
            f"{path} is a single file, which fluxpod cannot read yet for this part",
            f"Give a folder with config.json and its .safetensors, e.g. {inside} of a downloaded FLUX.1-dev",
        )
    for folder in (path, path / inside):
        if (folder / "config.json").is_file():
            return folder.absolute()
    raise wrong(key, f"{path} is not there, or has no config.json", f"Give e.g. {inside} of a downloaded FLUX.1-dev")


def tokenizer_beside(encoder: Path, name: str, key: str) -> Path:
    for folder in (encoder, encoder.parent / name):
        if (folder / "tokenizer_config.json").is_file():
            return folder
    raise wrong(key, f"no tokenizer lies in {encoder} or in {encoder.parent / name}", "Put its tokenizer folder there")
