"""From a job's ``base`` to weights on the volume that were looked through: names, shapes, and parts that fit together.

Two kinds of base end the same way, in ``Weights``: a diffusers folder (given, fetched from the hub, or flux-tiny made
here), and a single file in BFL's or diffusers' names, with VAE and encoders as files or folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bootstrap.base_files import (
    check_parts,
    compare,
    is_readable,
    layout_of,
    model_folder,
    needed_file,
    read_entries,
    shape_of_config,
    shape_of_file,
    shards_of,
    without_prefix,
)
from bootstrap.bases import EMBEDDED, HUB, Base, parse_base, scheduler_settings, wrong
from bootstrap.download import fetch_repo
from bootstrap.flux_shape import FluxShape
from bootstrap.manifest import Manifest, find_fetched
from bootstrap.parts import Part
from bootstrap.single_files import part_folder, tokenizer_for
from bootstrap.transfers import Say
from bootstrap.volume import Volume, read_json, write_json
from jobs.problem import JobError, Problem
from jobs.schema import Job
from jobs.secret import is_secret

TEXT_TOKENS = {True: 512, False: 256}  # by guidance: what FLUX.1-dev and -schnell were trained with
ENDS = 1 << 20  # bytes at each end of a file that its fingerprint covers
PARTS = ("vae", "clip", "t5", "tokenizer", "tokenizer_2")  # what latents and text outputs are computed with
MEANINGFUL = (".json", ".safetensors", ".txt", ".model")  # endings of the files that a part consists of
BLOCK = 16 * 1024 * 1024


@dataclass(frozen=True)
class Weights:
    """A base that was found whole. Paths are absolute; every part is a folder as its library's class loads it."""

    transformer: tuple[Path, ...]  # the file, or the shards
    layout: Literal["bfl", "diffusers"]
    config: Path  # config.json of the transformer
    shape: FluxShape
    vae: Path
    clip: Path
    t5: Path
    tokenizer: Path
    tokenizer_2: Path
    scheduler: Path
    text_tokens: int  # how many T5 tokens a caption takes
    revision: str  # the hub's commit, or a fingerprint of local files
    digest: str  # of VAE, encoders and tokenizers: what was computed with them is keyed by it
    prefix: str = ""  # what stands before every name in the transformer's file


def peek_shape(base: str, volume: Volume) -> FluxShape | None:
    """The dimensions of ``base`` as far as they are known without network; None of a hub model never fetched here.

    Raises JobError where ``base`` names nothing, or a folder or file that is no FLUX.
    """
    found = parse_base(base, volume)
    if found.kind == "embedded":
        return EMBEDDED[base]
    if found.kind == "hub":
        if fetched := find_fetched(volume.models, found.repo, found.revision):
            config = fetched[0] / "transformer" / "config.json"
            return shape_of_config(config) if config.is_file() else None
        return HUB.get(found.repo)
    assert found.path is not None
    if found.kind == "file":
        return shape_of_file(found.path, without_prefix(read_entries([found.path]))[1])
    return shape_of_config(needed_file(found.path / "transformer" / "config.json", "base"))


def fetch_weights(job: Job, volume: Volume, token: str | None, progress: Say) -> Weights:
    """Everything the job's base consists of, fetched or made if need be, and checked.

    ``token`` is HF_TOKEN as it stands in the environment. Raises JobError (base not found, no FLUX, parts that do not
    fit), AccessError (the hub refuses), PodError (the volume is full).
    """
    base = parse_base(job.base, volume)
    if base.kind == "file":
        return _of_single_file(base, job, volume, token, progress)
    if job.vae or job.text_encoders:
        key = "vae" if job.vae else "text_encoders"
        raise wrong(key, f"has no effect: {job.base} brings its own", f"Delete {key}")
    if base.kind == "hub":
        return _of_hub(base, volume, token, progress)
    assert base.path is not None
    if base.kind == "embedded" and not base.path.is_dir():
        _make_embedded(base, progress)
    return _of_folder(base.path, "", {}, volume, progress)


def _of_hub(base: Base, volume: Volume, token: str | None, progress: Say) -> Weights:
    """Of a fetched folder; files in it that were damaged since are fetched anew."""
    folder, manifest = fetch_repo(base.repo, base.revision, volume.models, token, progress)
    try:
        return _of_fetched(folder, manifest, volume, progress)
    except JobError:
        damaged = [path for path in manifest.files if not is_readable(folder / path)]
        if not damaged:
            raise
    manifest.doubt(folder, damaged)
    folder, manifest = fetch_repo(base.repo, base.revision, volume.models, token, progress)
    return _of_fetched(folder, manifest, volume, progress)


def _of_fetched(folder: Path, manifest: Manifest, volume: Volume, progress: Say) -> Weights:
    sums = {path: file.sha256 for path, file in manifest.files.items() if file.sha256}
    return _of_folder(folder, manifest.commit, sums, volume, progress)


def _make_embedded(base: Base, progress: Say) -> None:
    """In a process of its own: torch and diffusers stay out of the one that runs the pod."""
    progress(f"making {base.name}")
    command = [sys.executable, "-m", "bootstrap.flux_tiny", str(base.path)]
    if not EMBEDDED[base.name].guidance:
        command.append("--schnell")
    environment = {name: value for name, value in os.environ.items() if not is_secret(name)}
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if made.returncode and not (base.path and base.path.is_dir()):  # another process may have been first
        raise RuntimeError(f"{base.name} was not made: {made.stderr.strip()[-500:]}")


# ---- the two layouts ----


def _of_folder(folder: Path, commit: str, sums: Mapping[str, str], volume: Volume, progress: Say) -> Weights:
    folder = folder.absolute()
    config = needed_file(folder / "transformer" / "config.json", "base")
    shape = shape_of_config(config)
    shards = shards_of(folder / "transformer")
    compare(folder / "transformer", read_entries(shards), shape.tensors())
    tokenizers = (folder / "tokenizer", folder / "tokenizer_2")
    parts = (folder / "vae", folder / "text_encoder", folder / "text_encoder_2", *tokenizers)
    return _assemble(
        parts, shape, volume, progress,
        transformer=shards, layout="diffusers", config=config, scheduler=folder / "scheduler",
        revision=commit or _fingerprint(shards), sums={folder / path: sha for path, sha in sums.items()},
    )  # fmt: skip


def _of_single_file(base: Base, job: Job, volume: Volume, token: str | None, progress: Say) -> Weights:
    assert base.path is not None
    path = base.path.absolute()
    missing = [key for key, value in (("vae", job.vae), ("text_encoders", job.text_encoders)) if not value]
    if missing or not job.vae or not job.text_encoders:
        remedy = "Give vae: and text_encoders: {clip, t5}, as files or folders, e.g. those of a downloaded FLUX.1-dev"
        raise JobError([Problem(f"is needed: the single file {path.name} brings none", remedy, key=k) for k in missing])
    prefix, entries = without_prefix(read_entries([path]))
    shape, layout = shape_of_file(path, entries), layout_of(entries)
    from bootstrap.layout import bfl_tensors

    compare(path, entries, bfl_tensors(shape) if layout == "bfl" else shape.tensors())
    progress(f"{path.name}: {describe(shape)}")
    given = {
        "vae": ("vae", "vae", job.vae),
        "clip": ("text_encoder", "text_encoders.clip", job.text_encoders.clip),
        "t5": ("text_encoder_2", "text_encoders.t5", job.text_encoders.t5),
    }
    folders = {
        part: _part(part, volume.resolve(where), inside, key, volume, progress)  # type: ignore[arg-type]
        for part, (inside, key, where) in given.items()
    }

    def tokenizer(part: Part, name: str) -> Path:
        inside, key, where = given[part]
        there = volume.resolve(where)
        encoder = there if there.is_file() else model_folder(there, inside, key)
        return tokenizer_for(encoder, part, name, key, volume, token, progress)

    parts = (
        folders["vae"], folders["clip"], folders["t5"], tokenizer("clip", "tokenizer"), tokenizer("t5", "tokenizer_2"),
    )  # fmt: skip
    config, scheduler = _write_configs(shape, volume)
    return _assemble(
        parts, shape, volume, progress, prefix=prefix,
        transformer=(path,), layout=layout, config=config, scheduler=scheduler, revision=_fingerprint([path]), sums={},
    )  # fmt: skip


def _part(part: Part, path: Path, inside: str, key: str, volume: Volume, progress: Say) -> Path:
    """The folder of a VAE or an encoder that the job names as a file or as a folder."""
    return part_folder(path, part, key, volume, progress) if path.is_file() else model_folder(path, inside, key)


def describe(shape: FluxShape) -> str:
    """Which FLUX.1 it is, told from its tensors. dev and Krea-dev have the same ones, with other numbers in them."""
    kind = "with guidance, as dev and Krea-dev" if shape.guidance else "without guidance, as schnell"
    whole = FluxShape()
    pruned = shape.double_blocks < whole.double_blocks or shape.single_blocks < whole.single_blocks
    blocks = f"{shape.double_blocks} + {shape.single_blocks} blocks" + (
        " (fewer than FLUX.1-dev has)" if pruned else ""
    )
    return f"a FLUX.1 {kind}, {blocks}, {shape.parameters() / 1e9:.2f} billion parameters"


def _assemble(
    parts: tuple[Path, Path, Path, Path, Path],
    shape: FluxShape,
    volume: Volume,
    progress: Say,
    *,
    sums: Mapping[Path, str],
    **rest: Any,
) -> Weights:
    vae, clip, t5, tokenizer, tokenizer_2 = parts
    check_parts(vae, clip, t5, shape)
    tokenizer_config = read_json(needed_file(tokenizer_2 / "tokenizer_config.json", "base")) or {}
    needed_file(tokenizer / "tokenizer_config.json", "base")
    needed_file(rest["scheduler"] / "scheduler_config.json", "base")
    return Weights(
        shape=shape, vae=vae, clip=clip, t5=t5, tokenizer=tokenizer, tokenizer_2=tokenizer_2,
        text_tokens=int(min(TEXT_TOKENS[shape.guidance], tokenizer_config.get("model_max_length", 512))),
        digest=_digest(parts, sums, volume, progress), **rest,
    )  # fmt: skip


def _write_configs(shape: FluxShape, volume: Volume) -> tuple[Path, Path]:
    """``config.json`` of the transformer and the scheduler's folder for a file that brings neither."""
    transformer = {"_class_name": "FluxTransformer2DModel", **shape.config()}
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **scheduler_settings(shape.guidance)}
    name = hashlib.sha256(json.dumps([transformer, scheduler]).encode()).hexdigest()[:16]
    folder = (volume.cache / "configs" / name).absolute()
    write_json(folder / "transformer" / "config.json", transformer)
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    return folder / "transformer" / "config.json", folder / "scheduler"


# ---- telling one base from another ----


def _fingerprint(paths: Iterable[Path]) -> str:
    """Tells weights apart without reading gigabytes: size and both ends of every file, the header among them."""
    sha = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            sha.update(size.to_bytes(8, "little") + file.read(ENDS))
            file.seek(max(0, size - ENDS))
            sha.update(file.read(ENDS))
    return sha.hexdigest()[:40]


def _digest(parts: tuple[Path, ...], sums: Mapping[Path, str], volume: Volume, progress: Say) -> str:
    """Over the content of every file of the parts. ``sums`` are those known from the hub; the others are read once and
    remembered, by path, size and time, in the cache."""
    memory = volume.cache / "digests.json"
    known: dict[str, str] = read_json(memory) or {}
    new: dict[str, str] = {}

    def digest_of(path: Path) -> str:
        if path in sums:
            return sums[path]
        stat = path.stat()
        key = f"{path} {stat.st_size} {stat.st_mtime_ns}"
        if key not in known:
            if stat.st_size > 1e9:
                progress(f"reading {path} once, to know it again")
            new[key] = _sha256(path)
        return known.get(key) or new[key]

    lines = [
        f"{name}/{path.name} {digest_of(path)}"
        for name, folder in zip(PARTS, parts, strict=True)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in MEANINGFUL and not path.name.startswith(".")
    ]
    if new:
        write_json(memory, known | new)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            sha.update(block)
    return sha.hexdigest()
