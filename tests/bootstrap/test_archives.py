from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from bootstrap.archives import ArchiveError, is_zip, open_archive, read_file, split, stamp
from bootstrap.folders import walk


def packed(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return path


def test_a_zip_is_walked_as_the_folder_it_would_unpack_to(tmp_path: Path) -> None:
    files = ("set/5_sks cat/a.jpg", "set/5_sks cat/a.txt", "set/b.png", "set/0_no/c.png", "set/deep/er/d.png")
    system = ("__MACOSX/set/._b.png", "set/.DS_Store", "set/Thumbs.db")
    tree = walk(packed(tmp_path / "set.zip", dict.fromkeys((*files, *system), b"x") | {"set/empty/": b""}))
    found = {folder.name: (folder.files, folder.repeats, folder.class_text) for folder in tree.folders}
    assert found == {
        "": ((), 1, ""),
        "set": (("b.png",), 1, ""),
        "set/5_sks cat": (("a.jpg", "a.txt"), 5, "sks cat"),
        "set/deep/er": (("d.png",), 1, ""),
    }
    assert tree.ignored == 3
    assert tree.notes == ("set/0_no: 0 repeats by its name: left out",)


def test_files_in_a_zip_are_read_by_path(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"in/é.txt": b"one", "in\\b.txt": b"two", "./c.txt": b"three"})
    assert [read_file(path / name) for name in ("in/é.txt", "in/b.txt", "c.txt")] == [b"one", b"two", b"three"]
    assert read_file(path / "c.txt", 2) == b"th"
    assert split(path / "in" / "b.txt") == (path, "in/b.txt")
    (tmp_path / "plain.txt").write_bytes(b"four")
    assert read_file(tmp_path / "plain.txt") == b"four"
    assert split(tmp_path / "plain.txt") is None
    for missing in (path / "in" / "none.txt", tmp_path / "none.txt", tmp_path / "plain.txt" / "a.txt"):
        with pytest.raises(OSError, match="txt"):
            read_file(missing)


def test_names_in_utf8_that_do_not_say_so(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"\u00e9\u6f22.txt": b"x"})
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + flags + 1] &= ~0x08
    path.write_bytes(bytes(data))
    assert list(open_archive(path).members) == ["\u00e9\u6f22.txt"]
    assert read_file(path / "\u00e9\u6f22.txt") == b"x"


@pytest.mark.parametrize("name", ["../evil.txt", "a/../../evil.txt", "/etc/evil", "..\\evil.txt", "C:\\evil.txt"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArchiveError, match="leads out of the archive"):
        walk(packed(tmp_path / "a.zip", {"good.txt": b"x", name: b"x"}))


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"a.jpg": b"x"})
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + flags] |= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArchiveError, match=r"'a\.jpg' is encrypted: pack it again, without a password"):
        walk(path)


def test_a_foreign_compression_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"a.jpg": b"x"})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = 9  # Deflate64
    path.write_bytes(bytes(data))
    with pytest.raises(ArchiveError, match=r"method \(no\. 9\)"):
        walk(path)


def test_a_bomb_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"a.bmp": b"\0" * 100_000})
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02") + 24
    data[place : place + 4] = (4_100_000_000).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(ArchiveError, match="as a zip bomb does"):
        walk(path)


def test_files_that_share_their_bytes_are_not_read(tmp_path: Path) -> None:
    """The bomb that no ratio shows: many names for one run of bytes."""
    path = packed(tmp_path / "a.zip", {"a.txt": b"x" * 1000, "b.txt": b"x" * 1000}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = (0).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(OSError, match="damaged in the zip"):
        read_file(path / "b.txt")


@pytest.mark.parametrize("spoil", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"<html>"])
def test_what_is_no_zip(tmp_path: Path, spoil: object) -> None:
    path = packed(tmp_path / "a.zip", {"a.txt": os.urandom(5000)})
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    assert is_zip(path)  # by its name
    with pytest.raises(ArchiveError, match="cannot be read as a zip"):
        walk(path)


def test_a_damaged_file_in_a_zip_is_an_error_of_reading(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"a.txt": os.urandom(5000), "b.txt": b"fine"})
    data = bytearray(path.read_bytes())
    data[2000] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(OSError, match="damaged in the zip"):
        read_file(path / "a.txt")
    assert read_file(path / "b.txt") == b"fine"


def test_links_are_left_out(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a.jpg")
    link.external_attr = 0o120777 << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    (tmp_path / "a.zip").write_bytes(buffer.getvalue())
    tree = walk(tmp_path / "a.zip")
    assert tree.folders[0].files == ()
    assert tree.notes == ("a.jpg: a link inside a zip: left out",)


def test_a_stamp_changes_with_the_file(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"one")
    before = stamp(plain)
    times = plain.stat()
    while plain.stat().st_ctime_ns == times.st_ctime_ns:  # a tick of the file system's clock takes milliseconds
        plain.write_bytes(b"two")
    os.utime(plain, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time
    assert stamp(plain) != before
    path = packed(tmp_path / "a.zip", {"a.txt": b"one", "b.txt": b"b"})
    a, b = stamp(path / "a.txt"), stamp(path / "b.txt")
    packed(path, {"a.txt": b"two", "b.txt": b"b", "c.txt": b"c"})
    assert stamp(path / "a.txt") != a
    assert stamp(path / "b.txt") == b
    with pytest.raises(FileNotFoundError):
        stamp(path / "d.txt")
