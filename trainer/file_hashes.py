"""The hashes by which LoRA tools know a file, in its header.

They are of the tensors' bytes, which are known when the file is written: places of the same length are left in the
header and filled then. ``sshs_model_hash`` and ``sshs_legacy_hash`` are as kohya's trainer writes and the web UIs look
them up; ``modelspec.hash_sha256`` is modelspec's, https://github.com/Stability-AI/ModelSpec.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from bootstrap.tensor_files import make_header, read_header

PLACES = {
    "modelspec.hash_sha256": "0x" + 64 * "0",
    "sshs_model_hash": 64 * "0",
    "sshs_legacy_hash": 8 * "0",
}
_LEGACY = (0x100000, 0x10000)  # first byte and number of bytes that the old hash is of
_BLOCK = 16 * 1024 * 1024


def fill_places(path: Path) -> bytes:
    """Puts the hashes into a file's header, where it has places for them; gives the bytes that it now begins with."""
    header = read_header(path)
    start = min((entry.offset for entry in header.tensors.values()), default=header.size)
    with path.open("r+b") as file:
        head = file.read(start)
        if not all(f'"{name}":"{place}"'.encode() in head for name, place in PLACES.items()):
            return head
        whole = hashlib.sha256()
        while block := file.read(_BLOCK):
            whole.update(block)
        # The old hash is of a file that says of itself nothing but what kohya's trainer does.
        shapes = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
        lean, _ = make_header(shapes, {k: v for k, v in header.metadata.items() if k.startswith("ss_")})
        skipped = _LEGACY[0] - len(lean)
        file.seek(start + max(0, skipped))
        legacy = (lean[_LEGACY[0] :] + file.read(_LEGACY[1]))[: _LEGACY[1]]
        found = {
            "modelspec.hash_sha256": f"0x{whole.hexdigest()}",
            "sshs_model_hash": whole.hexdigest(),
            "sshs_legacy_hash": hashlib.sha256(legacy).hexdigest()[:8],
        }
        for name, text in found.items():
            head = head.replace(f'"{name}":"{PLACES[name]}"'.encode(), f'"{name}":"{text}"'.encode())
        file.seek(0)
        file.write(head)
        file.flush()
        os.fsync(file.fileno())
    return head


def with_places(metadata: Mapping[str, str]) -> dict[str, str]:
    """A LoRA's metadata with places for its hashes, instead of those of the file that it was."""
    return dict(metadata) | PLACES
