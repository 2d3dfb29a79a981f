"""The volume probe: told apart from the container's disk, tried, measured, and nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap import volume_probe
from bootstrap.volume_probe import GB, find_mount, probe_volume, used_bytes

OVERLAY = "600 500 0:50 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/a,upperdir=/b"
PROC = "601 600 0:51 / /proc rw,nosuid - proc proc rw"


def table(folder: Path, *lines: str) -> Path:
    file = folder / "mountinfo"
    file.write_text("\n".join((OVERLAY, PROC, *lines)) + "\n")
    return file


def mounted(point: Path, kind: str = "fuse.mfs", options: str = "rw,relatime") -> str:
    escaped = str(point).replace(" ", "\\040")
    return f"602 600 0:52 /some/folder {escaped} {options} shared:7 - {kind} mfs:9421 rw,user_id=0"


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    root = tmp_path / "work space"  # a mount table writes the space as \040
    root.mkdir()
    return root


@pytest.mark.parametrize("kind", ["fuse.mfs", "ext4", "xfs", "nfs4", "virtiofs"])
def test_a_mounted_volume_is_fine(tmp_path: Path, volume: Path, kind: str) -> None:
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume, kind)), environment={})
    assert (facts.mounted, facts.persistent, facts.writable, facts.rename, facts.fsync) == (True,) * 5
    assert facts.kind == kind
    assert facts.free > 0
    assert facts.write_speed
    assert [note for note in facts.notes if "MB/s" not in note] == []  # this disk may be a slow one


def test_the_containers_disk_is_a_loud_warning(tmp_path: Path, volume: Path) -> None:
    facts = probe_volume(volume, mountinfo=table(tmp_path), environment={})
    assert not facts.mounted
    assert not facts.persistent
    assert facts.writable
    assert facts.notes[0].startswith("WARNING: nothing is mounted at")
    assert "LOST" in facts.notes[0]


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_a_mount_that_passes_with_the_container_is_a_warning(tmp_path: Path, volume: Path, kind: str) -> None:
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume, kind)), environment={})
    assert facts.mounted
    assert not facts.persistent
    assert kind in facts.notes[0]


def test_the_innermost_and_last_mount_counts(tmp_path: Path, volume: Path) -> None:
    parent, twin = mounted(tmp_path, "xfs"), mounted(volume.with_name("work"), "nfs")
    lines = (parent, mounted(volume, "ext4"), mounted(volume, "fuse.mfs"), twin)
    mount = find_mount(volume / "below", table(tmp_path, *lines))
    assert mount is not None
    assert (mount.point, mount.kind) == (volume, "fuse.mfs")


def test_a_link_to_the_container_disk_is_seen(tmp_path: Path, volume: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = volume / "link"
    link.symlink_to(tmp_path / "elsewhere")
    mount = find_mount(link, table(tmp_path, mounted(volume)))
    assert mount is not None
    assert mount.kind == "overlay"


def test_read_only_is_seen_in_the_table(tmp_path: Path, volume: Path) -> None:
    mount = find_mount(volume, table(tmp_path, mounted(volume, options="ro,relatime")))
    assert mount is not None
    assert mount.read_only


def test_without_a_mount_table_nothing_is_claimed(tmp_path: Path, volume: Path) -> None:
    facts = probe_volume(volume, mountinfo=tmp_path / "absent", environment={})
    assert not facts.mounted
    assert [note for note in facts.notes if "WARNING" in note] == []


def refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, name, refused)


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.EROFS, "read-only"), (errno.EACCES, "user"), (errno.EDQUOT, "full"), (errno.ENOSPC, "full")],
)
def test_a_volume_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, volume: Path, number: int, word: str
) -> None:
    refuse(monkeypatch, Path, "write_bytes", number)
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume)), environment={})
    assert (facts.writable, facts.rename, facts.fsync, facts.write_speed) == (False, False, False, None)
    assert "cannot be written" in facts.notes[0]
    assert word in facts.notes[0]


def test_a_file_in_the_volumes_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = probe_volume(tmp_path / "file", mountinfo=table(tmp_path), environment={})
    assert not facts.writable
    assert any("cannot be written" in note for note in facts.notes)


def test_a_rename_that_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, volume: Path) -> None:
    refuse(monkeypatch, Path, "replace", errno.EPERM)
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume)), environment={})
    assert facts.writable
    assert not facts.rename
    assert any("another's place" in note for note in facts.notes)
    assert list((volume / ".fluxpod" / "probe").iterdir()) == []


def test_a_flush_that_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, volume: Path) -> None:
    refuse(monkeypatch, os, "fsync", errno.EINVAL)
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume)), environment={})
    assert facts.writable
    assert facts.rename
    assert not facts.fsync
    assert any("fsync" in note for note in facts.notes)


def test_a_slow_volume_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, volume: Path) -> None:
    monkeypatch.setattr(volume_probe, "SLOW", 1e15)
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume)), environment={})
    assert any("MB/s" in note for note in facts.notes)


def test_probing_leaves_nothing_behind(tmp_path: Path, volume: Path) -> None:
    probe_volume(volume, mountinfo=table(tmp_path), environment={})
    folder = volume / ".fluxpod" / "probe"
    (folder / "of a probe that was killed").touch()
    os.utime(folder / "of a probe that was killed", (1, 1))
    (folder / "of a probe that runs").touch()
    probe_volume(volume, mountinfo=table(tmp_path), environment={})
    assert [path.name for path in folder.iterdir()] == ["of a probe that runs"]


# --- Room -------------------------------------------------------------------------------------------------------------


def test_a_stated_quota_bounds_what_is_free(tmp_path: Path, volume: Path) -> None:
    (volume / "models").mkdir()
    with (volume / "models" / "big").open("wb") as file:
        file.truncate(900_000_000)  # sparse
    where = table(tmp_path, mounted(volume))
    facts = probe_volume(volume, mountinfo=where, environment={"FLUXPOD_VOLUME_GB": "1"})
    assert facts.quota == GB
    assert facts.free <= 100_000_000
    assert probe_volume(volume, mountinfo=where, environment={"FLUXPOD_VOLUME_GB": "0.5"}).free == 0


@pytest.mark.parametrize("text", ["300", "300 GB", "300g", " 300.0 "])
def test_a_quota_as_people_write_it(tmp_path: Path, volume: Path, text: str) -> None:
    where = table(tmp_path, mounted(volume))
    assert probe_volume(volume, mountinfo=where, environment={"FLUXPOD_VOLUME_GB": text}).quota == 300 * GB


@pytest.mark.parametrize("text", ["0", "-3", "much", "1e9", "3 TB"])
def test_a_quota_that_is_none_is_told(tmp_path: Path, volume: Path, text: str) -> None:
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume)), environment={"FLUXPOD_VOLUME_GB": text})
    assert facts.quota is None
    assert any(text in note for note in facts.notes)


def test_a_cluster_is_no_volume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, volume: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10**9, f_frsize=1 << 20))
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume)), environment={})
    assert any("FLUXPOD_VOLUME_GB" in note for note in facts.notes)
    stated = {"FLUXPOD_VOLUME_GB": "300"}
    facts = probe_volume(volume, mountinfo=table(tmp_path, mounted(volume)), environment=stated)
    assert 299 * GB < facts.free <= 300 * GB


def test_adding_up_gives_up_in_time(volume: Path) -> None:
    (volume / "file").write_bytes(b"12345")
    (volume / "loop").symlink_to(volume)
    assert used_bytes(volume) == 5 + (volume / "loop").lstat().st_size
    assert used_bytes(volume, limit=0) is None
