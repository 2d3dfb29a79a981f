"""The volume's folders, and files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootstrap.volume import Volume, flush_folder, own_parts, read_json, remove_parts, write_atomically, write_json


def test_the_folders_of_a_volume(tmp_path: Path) -> None:
    volume = Volume(tmp_path / "workspace")
    volume.create()
    volume.create()
    assert sorted(p.name for p in volume.root.iterdir()) == ["cache", "datasets", "jobs", "models", "runs"]


def test_the_files_of_a_run() -> None:
    run = Volume(Path("/v")).run("flowers")
    assert run.root == Path("/v/runs/flowers")
    names = {"job.yaml": run.job, "run.json": run.run_file, "status.json": run.status, "outcome.json": run.outcome}
    names |= {"metrics.jsonl": run.metrics, "log.txt": run.log, "items.jsonl": run.items, "states": run.states}
    names |= {"output": run.output, "samples": run.samples, "tensorboard": run.tensorboard, "processes": run.processes}
    assert {name: path.relative_to(run.root) for name, path in names.items()} == {n: Path(n) for n in names}


def test_a_jobs_paths_are_relative_to_the_volume_or_absolute(tmp_path: Path, home: Path) -> None:
    volume = Volume(tmp_path)
    assert volume.resolve("datasets/x") == tmp_path / "datasets" / "x"
    assert volume.resolve("/elsewhere/x") == Path("/elsewhere/x")
    assert volume.resolve("~/x") == home / "x"


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, b"new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_flushed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    flush_folder(tmp_path)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True]}, [], "Blüte \u2028 🌼", {"file": "caf\udce9.png"}])
def test_json_comes_back(value: object, tmp_path: Path) -> None:
    """The last is a file name that is not UTF-8, as Python has it."""
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1'])
def test_a_damaged_file_is_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) is None
    path.write_bytes(content)
    assert read_json(path) is None


def test_what_a_killed_write_left_goes_and_nothing_else(tmp_path: Path) -> None:
    stays = [tmp_path / "status.json", tmp_path / "a.part", tmp_path / f".lease.json.{own_parts()}-7.part"]
    for path in (*stays, tmp_path / ".status.json.0.part", tmp_path / ".step-000005-00.png.part"):
        path.write_text("half")
    (tmp_path / ".folder.part").mkdir()
    remove_parts(tmp_path, tmp_path / "not there")
    assert sorted(tmp_path.iterdir()) == sorted([*stays, tmp_path / ".folder.part"])
