from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from bootstrap import inspection
from bootstrap.inspection import Found, Remembered, look_at_all


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were decoded, in the order of their end."""
    names: list[str] = []
    real = inspection.inspect

    def spy(path: Path) -> object:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(inspection, "inspect", spy)
    monkeypatch.setattr(inspection, "SETTLED", -60)  # whatever the test wrote counts as settled
    return names


def pictures(folder: Path, names: str = "abc") -> list[Path]:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", (32, 16 + number), (number, 2, 3)).save(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in names]


def look(root: Path, paths: list[Path], *, writes: bool = True) -> list[Found]:
    with Remembered(root.parent / "cache" / "known.json", root, writes=writes) as remembered:
        return list(look_at_all(paths, remembered))


def test_an_unchanged_picture_is_not_decoded_again(tmp_path: Path, decoded: list[str]) -> None:
    paths = pictures(tmp_path / "d")
    first = look(tmp_path / "d", paths)
    assert sorted(decoded) == ["a.png", "b.png", "c.png"]
    assert [(found.path, found.facts and found.facts.height) for found in first] == list(
        zip(paths, (16, 17, 18), strict=True)
    )
    decoded.clear()
    assert look(tmp_path / "d", paths) == first
    assert decoded == []


def test_what_changed_is_decoded_even_with_its_old_time(tmp_path: Path, decoded: list[str]) -> None:
    paths = pictures(tmp_path / "d")
    look(tmp_path / "d", paths)
    decoded.clear()
    before = paths[1].stat()
    while paths[1].stat().st_ctime_ns == before.st_ctime_ns:
        Image.new("RGB", (32, 17), (9, 9, 9)).save(paths[1])
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    look(tmp_path / "d", paths)
    assert decoded == ["b.png"]


def test_what_was_written_just_before_is_not_trusted(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written again within one tick of a clock that ticks in seconds."""
    paths = pictures(tmp_path / "d")
    monkeypatch.setattr(inspection, "SETTLED", 3600.0)
    look(tmp_path / "d", paths)
    decoded.clear()
    look(tmp_path / "d", paths)
    assert len(decoded) == 3


def test_damaged_and_foreign_files(tmp_path: Path, decoded: list[str]) -> None:
    paths = pictures(tmp_path / "d")
    paths[0].write_bytes(paths[0].read_bytes()[:40])
    paths[2].rename(tmp_path / "d" / "c.doc")
    (tmp_path / "d" / "d.doc").write_bytes(b"words")
    paths = [paths[0], paths[1], tmp_path / "d" / "c.doc", tmp_path / "d" / "d.doc", tmp_path / "d" / "gone.png"]
    for _ in range(2):
        found = look(tmp_path / "d", paths)
        assert [bool(each.facts) for each in found] == [False, True, True, False, False]
        assert ["damaged" in found[0].problem, found[3].problem, "cannot be read" in found[4].problem] == [
            True,
            "",
            True,
        ]


def test_nothing_is_written_unless_asked(tmp_path: Path, decoded: list[str]) -> None:
    look(tmp_path / "d", pictures(tmp_path / "d"), writes=False)
    assert not (tmp_path / "cache").exists()


def test_files_in_a_zip(tmp_path: Path, decoded: list[str]) -> None:
    pictures(tmp_path / "d")
    archive = tmp_path / "d.zip"

    def pack() -> list[Path]:
        with zipfile.ZipFile(archive, "w") as file:
            for path in sorted((tmp_path / "d").iterdir()):
                file.write(path, path.name)
        return [archive / path.name for path in sorted((tmp_path / "d").iterdir())]

    first = look(archive, pack())
    decoded.clear()
    pictures(tmp_path / "d", "d")
    again = look(archive, pack())
    assert decoded == ["d.png"]
    assert again[:3] == first


def test_a_stop_in_the_middle_keeps_what_was_seen(tmp_path: Path, decoded: list[str]) -> None:
    paths = pictures(tmp_path / "d", "abcdefgh")
    file, root = tmp_path / "known.json", tmp_path / "d"

    def stopped() -> None:
        with Remembered(file, root, writes=True) as remembered:
            for number, _ in enumerate(look_at_all(paths, remembered)):
                if number == 4:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    decoded.clear()
    with Remembered(file, root, writes=True) as remembered:
        list(look_at_all(paths, remembered))
    assert len(decoded) <= 3


def test_what_is_gone_is_forgotten_and_another_decoder_looks_anew(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = pictures(tmp_path / "d")
    look(tmp_path / "d", paths)
    look(tmp_path / "d", paths[:1])
    decoded.clear()
    look(tmp_path / "d", paths)
    assert sorted(decoded) == ["b.png", "c.png"]
    decoded.clear()
    monkeypatch.setattr(inspection, "WHAT_DECODES", "another")
    look(tmp_path / "d", paths)
    assert len(decoded) == 3


def test_a_damaged_file_of_what_is_known_is_no_news(tmp_path: Path, decoded: list[str]) -> None:
    paths = pictures(tmp_path / "d")
    look(tmp_path / "d", paths)
    (tmp_path / "cache" / "known.json").write_text("{")
    assert len(look(tmp_path / "d", paths)) == 3
    assert not list((tmp_path / "cache").glob(".*"))
