"""Keys of tensors: another for every seed, step and name."""

from __future__ import annotations

import pytest

from trainer.randomness import hash_keys, name_key


@pytest.mark.parametrize("name", ["", "a", "transformer_blocks.0.attn.to_q.weight", "ü"])
def test_keys_of_tensors(name: str) -> None:
    one, two = hash_keys(42, 7, name)
    assert -(2**31) <= one < 2**31
    assert -(2**31) <= two < 2**31
    assert (one, two) == hash_keys(42, 7, name)
    others = [hash_keys(43, 7, name), hash_keys(42, 8, name), hash_keys(42, 7, name + "x")]
    assert (one, two) not in others
    assert 0 <= name_key(name) < 2**63
    assert name_key(name) != name_key(name + "x")
