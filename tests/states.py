"""States made without a trainer, whole or to be spoiled."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

from bootstrap.state import MODEL_FILE, OPTIMIZER_FILE, VERSION, Extent, Manifest, folder_name, write_manifest


def make_manifest(files: dict[str, bytes], step: int, **keys: Any) -> Manifest:
    """As of three processes: every file in three runs of bytes."""
    extents = []
    for name, data in files.items():
        cuts = [0, len(data) // 3, len(data) // 2, len(data)]
        for first, last in pairwise(cuts):
            extents.append(Extent(name, first, last - first, hashlib.sha256(data[first:last]).hexdigest()))
    common: dict[str, Any] = {
        "version": VERSION,
        "method": "full",
        "base": "flux-tiny",
        "seed": 42,
        "images_per_step": 4,
        "processes": 3,
        "optimizer": "AdamW8bit",
        "optimizer_scalars": {},
        "lora": None,
        "job_digest": "",
        "versions": {"torch": "2"},
        "seconds": 1.5,
    }
    sizes = {name: len(data) for name, data in files.items()}
    return Manifest(**common | {"step": step, "files": sizes, "extents": tuple(extents)} | keys)


def make_state(folder: Path, step: int, name: str = "", *, whole: bool = True, **keys: Any) -> Path:
    path = folder / (name or folder_name(step))
    path.mkdir(parents=True)
    files = {MODEL_FILE: bytes(f"weights of {step} " * 50, "ascii")}
    if whole:
        files[OPTIMIZER_FILE] = bytes(f"optimizer of {step} " * 90, "ascii")
    for file, data in files.items():
        (path / file).write_bytes(data)
    write_manifest(path, make_manifest(files, step, **keys))
    return path


def flip_a_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
