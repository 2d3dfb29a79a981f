from __future__ import annotations

import errno
from pathlib import Path

import pytest

from entrypoint import job_files
from entrypoint.job_files import JobFolder

JOB = "name: {}\nbase: flux-tiny\nmethod: lora\ndatasets:\n  - path: datasets/d\n"


def test_a_file_is_taken_when_it_stands_still(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    assert folder.look() == []
    (tmp_path / "b.yaml").write_text(JOB.format("b"))
    (tmp_path / ".c.yaml").write_text(JOB.format("c"))
    (tmp_path / "notes.txt").write_text("d")
    assert (folder.look(), folder.arriving) == ([], True)
    (tmp_path / "a.yml").write_text("name: [")
    assert ([file.name for file in folder.look()], folder.arriving) == (["b"], True)
    assert ([file.name for file in folder.look()], folder.arriving) == (["a", "b"], False)
    assert [bool(file.loaded) for file in folder.look()] == [False, True]
    (tmp_path / "b.yaml").unlink()
    assert ([file.name for file in folder.look()], folder.arriving) == (["a"], False)


def test_the_same_content_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = job_files.parse_job
    monkeypatch.setattr(job_files, "parse_job", lambda text, name: read.append(name) or real(text, name))
    (tmp_path / "a.yaml").write_text(JOB.format("a"))
    folder = JobFolder(tmp_path)
    for _ in range(5):
        folder.look()
    assert read == ["a.yaml"]


def test_a_volume_that_does_not_answer_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(JOB.format("a"))
    folder = JobFolder(tmp_path)
    folder.look()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            folder.look()
    assert set(folder.seen) == {file}
    assert [found.name for found in folder.look()] == ["a"]


def test_a_folder_in_place_of_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").mkdir()
    folder = JobFolder(tmp_path)
    assert (folder.look(), folder.look(), folder.arriving) == ([], [], False)
