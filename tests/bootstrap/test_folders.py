from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootstrap.folders import named_repeats, walk


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("10_cat", (10, "cat")),
        ("1_a_b", (1, "a_b")),
        ("0_no", (0, "no")),
        ("cat", None),
        ("10", None),
        ("20240801_holiday", None),
        ("x_1", None),
    ],
)
def test_named_repeats(name: str, expected: tuple[int, str] | None) -> None:
    assert named_repeats(name) == expected


def test_the_nearest_named_folder_counts(tmp_path: Path) -> None:
    touch(*(tmp_path / name for name in ("a", "img/3_cat/b", "img/3_cat/more/c", "img/3_cat/2_dog/d", "0_no/e")))
    tree = walk(tmp_path)
    found = {folder.name: (folder.repeats, folder.class_text, folder.files) for folder in tree.folders}
    assert found == {
        "": (1, "", ("a",)),
        "img": (1, "", ()),
        "img/3_cat": (3, "cat", ("b",)),
        "img/3_cat/2_dog": (2, "dog", ("d",)),
        "img/3_cat/more": (3, "cat", ("c",)),
    }
    assert tree.notes == ("0_no: 0 repeats by its name: left out",)


def test_two_folders_linked_into_each_other(tmp_path: Path) -> None:
    touch(tmp_path / "x" / "1", tmp_path / "y" / "2")
    (tmp_path / "x" / "y").symlink_to(tmp_path / "y")
    (tmp_path / "y" / "x").symlink_to(tmp_path / "x")
    tree = walk(tmp_path)
    assert [folder.name for folder in tree.folders] == ["", "x", "x/y", "y", "y/x"]
    assert len(tree.notes) == 2


def test_hidden_and_system_entries_are_counted_not_entered(tmp_path: Path) -> None:
    touch(*(tmp_path / name for name in ("a", ".git/b", "__MACOSX/c", "Thumbs.db", "@eaDir/d")))
    tree = walk(tmp_path)
    assert [folder.files for folder in tree.folders] == [("a",)]
    assert tree.ignored == 4


def test_an_unreadable_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert walk(tmp_path).notes == (f"{tmp_path}: cannot be read (Permission denied)",)
