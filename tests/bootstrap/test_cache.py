from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bootstrap import cache as module
from bootstrap.cache import Cache, ShardWriter


def tensors(seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "mean": torch.randn(16, 4, 6, generator=chance).to(torch.float16),
        "mask": torch.rand(7, generator=chance) > 0.5,
        "pooled": torch.randn(5, generator=chance).to(torch.bfloat16),
    }


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        for seed in range(5):
            writer.add(f"key{seed}", tensors(seed))
    cache = Cache(tmp_path)
    assert len(shards(tmp_path)) == 1
    for seed in range(5):
        read = cache.read(f"key{seed}")
        assert read.keys() == tensors(seed).keys()
        assert all(
            torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in tensors(seed).items()
        )
    assert cache.missing(["key1", "x", "key9", "x"]) == ["x", "key9"]
    assert "key1" in cache
    assert "x" not in cache
    with pytest.raises(KeyError):
        cache.read("x")


def test_a_cache_goes_to_another_process(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.add("k", tensors(1))
    assert torch.equal(pickle.loads(pickle.dumps(Cache(tmp_path))).read("k")["mean"], tensors(1)["mean"])


def test_shards_are_cut_by_number_and_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_ITEMS", 3)
    with ShardWriter(tmp_path / "number") as writer:
        for seed in range(7):
            writer.add(f"k{seed}", tensors(seed))
    assert len(shards(tmp_path / "number")) == 3
    monkeypatch.setattr(module, "SHARD_BYTES", 1)
    with ShardWriter(tmp_path / "size") as writer:
        for seed in range(2):
            writer.add(f"k{seed}", tensors(seed))
    assert len(shards(tmp_path / "size")) == 2


def test_an_error_keeps_whole_shards_and_drops_the_open_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_ITEMS", 2)

    def fail() -> None:
        with ShardWriter(tmp_path) as writer:
            for seed in range(3):
                writer.add(f"k{seed}", tensors(seed))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert Cache(tmp_path).missing(["k0", "k1", "k2"]) == ["k2"]


def test_a_view_does_not_keep_its_batch(tmp_path: Path) -> None:
    batch = torch.zeros(1000, 16)
    writer = ShardWriter(tmp_path)
    writer.add("k", {"row": batch[3]})
    kept = next(iter(writer._tensors.values()))
    assert kept.untyped_storage().nbytes() == 64


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage"])
def test_a_damaged_shard_is_ignored_with_a_note_and_made_again(tmp_path: Path, damage: str) -> None:
    for key in ("good", "bad"):
        with ShardWriter(tmp_path) as writer:
            writer.add(key, tensors(1))
    with ShardWriter(tmp_path) as writer:
        writer.add("bad", tensors(1))
    bad = next(path for path in shards(tmp_path) if b"bad.mean" in path.read_bytes())
    data = bad.read_bytes()
    bad.write_bytes({"cut": data[:-10], "empty": b"", "garbage": b"x" * len(data)}[damage])
    cache = Cache(tmp_path)
    assert cache.missing(["good", "bad"]) == ["bad"]
    assert str(bad) in cache.notes[0]
    cache.tidy()
    assert not bad.exists()
    with ShardWriter(tmp_path) as writer:
        writer.add("bad", tensors(1))
    again = Cache(tmp_path)
    assert again.missing(["good", "bad"]) == []
    assert again.notes == []


def test_a_full_disk_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", full)
    writer = ShardWriter(tmp_path)
    writer.add("k", tensors(1))
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """A child dies while it writes; this process writes too, and so does another machine, now and two hours ago."""
    script = (
        "import sys, os; from pathlib import Path; from bootstrap.cache import _writer\n"
        "(Path(sys.argv[1]) / f'.shard-ab.{_writer()}.part').write_bytes(b'x'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (dead,) = tmp_path.iterdir()
    mine = tmp_path / f".shard-cd.{module._writer()}.part"
    other, old = tmp_path / ".shard-ef.0123abcd.7-99.part", tmp_path / ".shard-ef.0123abcd.8-99.part"
    for path in (mine, other, old):
        path.write_bytes(b"x")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    Cache(tmp_path).tidy()
    assert not dead.exists()
    assert not old.exists()
    assert mine.exists()
    assert other.exists()
