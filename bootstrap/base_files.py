"""Looking a base through: which files it consists of, which FLUX they hold, and whether they fit together.

Only headers and configurations are read. Whatever does not fit is a JobError that names the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bootstrap.bases import wrong
from bootstrap.flux_shape import FluxShape
from bootstrap.parts import Part, plain_names, tensors_of
from bootstrap.volume import read_json
from jobs.problem import JobError, Problem

if TYPE_CHECKING:
    from bootstrap.tensor_files import TensorEntry

TRANSFORMER_FILE = "diffusion_pytorch_model.safetensors"
PART_FILES: dict[Part, str] = {"clip": "model.safetensors", "t5": "model.safetensors", "vae": TRANSFORMER_FILE}
PREFIX = "model.diffusion_model."  # what some tools put before every name of a transformer
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


def without_prefix(entries: Mapping[str, TensorEntry]) -> tuple[str, dict[str, TensorEntry]]:
    """What stands before every name, and the tensors under their plain names."""
    prefix = PREFIX if entries and all(name.startswith(PREFIX) for name in entries) else ""
    return prefix, {name.removeprefix(prefix): entry for name, entry in entries.items()}


def layout_of(entries: Mapping[str, TensorEntry]) -> Literal["bfl", "diffusers"]:
    return "diffusers" if any(name.startswith("transformer_blocks.") for name in entries) else "bfl"


def shape_of_file(path: Path, entries: Mapping[str, TensorEntry]) -> FluxShape:
    """Told from the tensors alone, whatever the file is called; ``entries`` have plain names."""
    from bootstrap.layout import shape_of_bfl, shape_of_diffusers

    told = shape_of_diffusers if layout_of(entries) == "diffusers" else shape_of_bfl
    try:
        shape = told({name: entry.shape for name, entry in entries.items()})
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        raise wrong("base", f"{path} holds no FLUX transformer", _what_it_is(entries)) from None
    return _trainable(shape, path)


def _what_it_is(entries: Iterable[str]) -> str:
    names = list(entries)
    if any("lora" in name.lower() for name in names):
        return "It is a LoRA: give the model that it was made for"
    if any(name.startswith(PREFIX) for name in names):
        return "It is a checkpoint with everything in one: give the transformer alone, as flux1-dev.safetensors is"
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


def shards_of(folder: Path, name: str = TRANSFORMER_FILE, key: str = "base") -> tuple[Path, ...]:
    """The weight files of a model's folder: the one, or those that its index names."""
    index = read_json(folder / f"{name}.index.json")
    if not isinstance(index, dict):
        return (needed_file(folder / name, key),)
    paths = tuple(folder / name for name in sorted(set(index.get("weight_map", {}).values())))
    if absent := [path.name for path in paths if not path.is_file()]:
        raise wrong(key, f"{folder} lacks {_some(absent)}", "Download the folder again")
    return paths


def read_entries(paths: Iterable[Path], key: str = "base") -> dict[str, TensorEntry]:
    from bootstrap.tensor_files import TensorFileError, read_header

    entries: dict[str, TensorEntry] = {}
    for path in paths:
        try:
            entries |= read_header(path).tensors
        except TensorFileError as error:
            raise wrong(key, str(error), "Download it again") from None
    return entries


def is_readable(path: Path) -> bool:
    """Whether a file is what its ending says, as far as that shows without reading it all."""
    if path.suffix == ".json":
        return read_json(path) is not None
    if path.suffix != ".safetensors":
        return path.is_file()
    try:
        read_entries([path])
    except JobError:
        return False
    return True


def compare(
    path: Path,
    entries: Mapping[str, TensorEntry],
    shapes: Mapping[str, tuple[int, ...]],
    key: str = "base",
    what: str = "FLUX",
    types: Iterable[str] = ("bfloat16", "float16", "float32"),
) -> None:
    """Raises JobError with every tensor that is missing, unknown, misshapen, or of a type that cannot be used."""
    common = entries.keys() & shapes.keys()
    misshapen = [
        f"{name} is {entries[name].shape}, not {shapes[name]}" for name in common if entries[name].shape != shapes[name]
    ]
    odd = {str(entries[name].dtype).removeprefix("torch.") for name in common} - set(types)
    found = {
        "lacks": sorted(shapes.keys() - entries.keys()),
        f"has tensors that {what} does not": sorted(entries.keys() - shapes.keys()),
        "has tensors of another shape": sorted(misshapen),
        "holds numbers too coarse to train on": sorted(odd),
    }
    remedy = "Give the original weights, in bfloat16, float16 or float32"
    problems = [Problem(f"{path} {told}: {_some(names)}", remedy, key=key) for told, names in found.items() if names]
    if problems:
        raise JobError(problems)


def check_tensors(
    path: Path, entries: Mapping[str, TensorEntry], part: Part, config: Mapping[str, Any], key: str = "base"
) -> None:
    """That the files of a VAE or an encoder hold just what its configuration says. Raises JobError."""
    try:
        shapes = tensors_of(part, config)
    except KeyError as error:
        raise wrong(key, f"the config.json of {path} does not say {error}", "Download the folder again") from None
    plain = plain_names(part, {name: entry.shape for name, entry in entries.items()})
    by_plain_name = {next(iter(plain_names(part, {name: ()})), ""): entry for name, entry in entries.items()}
    types = ("bfloat16", "float16", "float32", *(("float8_e4m3fn", "float8_e5m2") if part == "t5" else ()))
    compare(path, {name: by_plain_name[name] for name in plain}, shapes, key, f"this {part.upper()}", types)


def _some(names: list[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def check_parts(vae: Path, clip: Path, t5: Path, shape: FluxShape) -> None:
    """That VAE and encoders are whole, and of the sizes that this transformer takes."""
    problems: list[Problem] = []
    parts: tuple[tuple[Part, Path, str, str, int], ...] = (
        ("vae", vae, "latent_channels", "the transformer takes latents of", shape.channels // 4),
        ("clip", clip, "hidden_size", "the transformer takes pooled text of", shape.pooled_size),
        ("t5", t5, "d_model", "the transformer takes text tokens of", shape.text_size),
    )
    for part, folder, key, meaning, needed in parts:
        try:
            config: Any = read_json(needed_file(folder / "config.json", "base")) or {}
            size = config.get(key, config.get("text_config", {}).get(key))
            if size != needed:
                remedy = "Give the VAE and encoders of the same FLUX"
                raise wrong("base", f"{folder}: {key} is {size}, {meaning} {needed}", remedy)
            check_tensors(folder, read_entries(shards_of(folder, PART_FILES[part])), part, config)
        except JobError as error:
            problems.extend(error.problems)
    if problems:
        raise JobError(problems)


def model_folder(path: Path, inside: str, key: str) -> Path:
    """The folder of one model: ``path``, or the one of that name in it where ``path`` is a whole diffusers folder."""
    for folder in (path, path / inside):
        if (folder / "config.json").is_file():
            return folder.absolute()
    remedy = f"Give a .safetensors file, or a folder such as {inside} of a downloaded FLUX.1-dev"
    raise wrong(key, f"{path} is not there, or has no config.json", remedy)


def tokenizer_beside(encoder: Path, name: str) -> Path | None:
    """The tokenizer's folder, where it is the encoder's or lies beside it."""
    for folder in (encoder, encoder.parent / name):
        if (folder / "tokenizer_config.json").is_file():
            return folder.absolute()
    return None
