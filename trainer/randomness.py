"""Keys of tensors for random numbers that are hashed on the device (rounding.py) or drawn by name (adapter.py)."""

from __future__ import annotations

import hashlib


def hash_keys(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two signed 32-bit keys for hashing the indices of one tensor at one step (see rounding.py)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def name_key(name: str) -> int:
    """A tensor's name as a counter word (63 bits)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
