"""What a job's ``base`` may name, and the bases known with their dimensions: what ``check`` says before any fetch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bootstrap.flux_shape import FluxShape
from bootstrap.volume import Volume
from jobs.problem import JobError, Problem
from jobs.schema import is_single_file

FLUX_TINY = FluxShape(
    double_blocks=2,
    single_blocks=3,
    heads=4,
    head_size=64,  # width 256: a row is one whole block of an 8-bit optimizer state, as in the real model
    text_size=128,
    pooled_size=64,
    guidance=True,
    rope_axes=(8, 28, 28),
)
FLUX_TINY_SCHNELL = FluxShape(
    double_blocks=2,
    single_blocks=3,
    heads=4,
    head_size=64,
    text_size=128,
    pooled_size=64,
    guidance=False,
    rope_axes=(8, 28, 28),
)

# Made on the volume by fluxpod itself, without network.
EMBEDDED: dict[str, FluxShape] = {"flux-tiny": FLUX_TINY, "flux-tiny-schnell": FLUX_TINY_SCHNELL}

# On the hub, with the dimensions that their published config.json gives.
HUB: dict[str, FluxShape] = {
    "black-forest-labs/FLUX.1-dev": FluxShape(),
    "black-forest-labs/FLUX.1-Krea-dev": FluxShape(),
    "black-forest-labs/FLUX.1-schnell": FluxShape(guidance=False),
}

KNOWN: dict[str, FluxShape] = EMBEDDED | HUB


def scheduler_settings(guidance: bool) -> dict[str, Any]:
    """The published arguments of ``FlowMatchEulerDiscreteScheduler`` of FLUX.1-dev, or (no guidance) of -schnell."""
    return {
        "num_train_timesteps": 1000,
        "shift": 3.0 if guidance else 1.0,
        "use_dynamic_shifting": guidance,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    }


@dataclass(frozen=True)
class Base:
    """What a job's ``base`` names. ``path`` is set for a folder or a file, ``repo`` and ``revision`` for the hub."""

    kind: Literal["embedded", "folder", "file", "hub"]
    name: str
    path: Path | None = None
    repo: str = ""
    revision: str = ""


def parse_base(base: str, volume: Volume) -> Base:
    """What ``base`` names, looking only at the disk. Raises JobError: not found, no weights, or no such name."""
    if base in EMBEDDED:
        return Base("embedded", base, path=volume.models / base)
    path = volume.resolve(base)
    if path.is_dir():
        return Base("folder", base, path=path)
    if path.is_file():
        if not is_single_file(base):
            raise wrong("base", f"{path} is not a .safetensors file", "Give one, a diffusers folder, or a hub id")
        return Base("file", base, path=path)
    repo, _, revision = base.partition("@")
    if _looks_like_path(base, volume):
        raise wrong("base", f"{path} is not there", _near_paths(path))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise wrong("base", f"'{base}' is no base that fluxpod knows", _near_names(base))
    return Base("hub", base, repo=repo, revision=revision or "main")


def wrong(key: str, message: str, remedy: str) -> JobError:
    return JobError([Problem(message, remedy, key=key)])


def _looks_like_path(base: str, volume: Volume) -> bool:
    """A hub id is owner/name and nothing else; and no owner is called as a folder of the volume is."""
    first = base.partition("/")[0]
    return (
        base.startswith(("/", ".", "~"))
        or base.endswith("/")
        or "\\" in base
        or base.partition("@")[0].count("/") > 1
        or is_single_file(base)
        or ("/" in base and (first == volume.root.name or (volume.root / first).is_dir()))
    )


def _near_paths(path: Path) -> str:
    """Names like the one that is absent, in the nearest folder that exists; else what lies there."""
    parent, absent = path.parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, absent = parent.parent, parent.name
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    if near := difflib.get_close_matches(absent, names, n=3, cutoff=0.5):
        return f"{parent} has {', '.join(near)}: is it that?"
    return f"{parent} has {', '.join(names[:8])}" if names else f"{parent} is empty"


def _near_names(base: str) -> str:
    ends = {known.rpartition("/")[2].lower(): known for known in KNOWN}
    near = difflib.get_close_matches(base.rpartition("/")[2].lower(), ends, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {ends[near[0]]}?"
    return "Write a hub id (black-forest-labs/FLUX.1-dev), a folder, a .safetensors file, or flux-tiny"
