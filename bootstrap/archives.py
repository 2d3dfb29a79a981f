"""Zips as folders: the files of a dataset are read where they lie, on the disk or inside a zip.

A file inside a zip has a path too, ``datasets/flowers.zip/inner/a.jpg``. Nothing is ever unpacked: a volume is spared
the small files, and an archive has no way to write anywhere.
"""

from __future__ import annotations

import os
import stat
import zipfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

# Of zip's many methods what zipfile decompresses. Windows' own packer takes Deflate64 (9) beyond 2 GB.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
# Pictures hardly shrink, drawings as BMP may by 100; bombs promise a thousandfold and more. Small ones do no harm.
MOST_SHRUNK = 200
HARMLESS = 1_000_000_000  # bytes, unpacked
_UTF8_NAME = 0x800
_ENCRYPTED = 0x1


class ArchiveError(Exception):
    """A zip that cannot be used; the message says why, without the zip's name."""


class Archive:
    """The files in a zip, by their path there with ``/``. Raises ArchiveError with all that speaks against it."""

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise ArchiveError(f"cannot be read as a zip ({error}): pack or copy it again") from error
        self.members: dict[str, zipfile.ZipInfo] = {}
        self.notes: list[str] = []
        wrong: list[str] = []
        for info in self._zip.infolist():
            name = _name(info)
            if name.endswith("/"):
                continue
            parts = [part for part in name.split("/") if part not in ("", ".")]
            if name.startswith("/") or ".." in parts or not parts or name[1:3] == ":/":
                wrong.append(f"{name!r} leads out of the archive")
            elif info.flag_bits & _ENCRYPTED:
                wrong.append(f"{name!r} is encrypted")
            elif info.compress_type not in _METHODS:
                wrong.append(f"{name!r} is compressed by a method (no. {info.compress_type}) that is not read here")
            elif stat.S_ISLNK(info.external_attr >> 16):
                self.notes.append(f"{name}: a link inside a zip: left out")
            else:
                if (path_in_zip := "/".join(parts)) in self.members:
                    self.notes.append(f"{path_in_zip}: twice in the zip, the later one counts")
                self.members[path_in_zip] = info
        unpacked, packed = sum(info.file_size for info in self.members.values()), path.stat().st_size
        if unpacked > max(HARMLESS, MOST_SHRUNK * packed):
            wrong.append(f"its {packed / 1e6:.0f} MB claim to unpack to {unpacked / 1e9:.0f} GB, as a zip bomb does")
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ArchiveError(f"{'; '.join(wrong[:3])}{more}: pack it again, without a password, as plain zip")

    def open(self, name: str) -> IO[bytes]:
        """Raises FileNotFoundError; OSError where the member is damaged (on reading, too: ``read``)."""
        if name not in self.members:
            raise FileNotFoundError(2, "not in the zip", name)
        try:
            return self._zip.open(self.members[name])
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise OSError(5, f"damaged in the zip: {error}", name) from error


def _name(info: zipfile.ZipInfo) -> str:
    """A member's name as meant: packers on Windows may write backslashes, on Macs UTF-8 without saying so."""
    name = info.filename
    if not info.flag_bits & _UTF8_NAME:
        with suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return name.replace("\\", "/")


def open_archive(path: Path) -> Archive:
    """The zip at ``path``, read once while it stays as it is. Raises ArchiveError, OSError."""
    found = path.stat()
    return _opened(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=8)
def _opened(path: Path, size: int, modified: int) -> Archive:
    return Archive(path)


def is_zip(path: Path) -> bool:
    """Whether ``path`` is a file that is, or by its name means to be, a zip."""
    return path.is_file() and (path.suffix.lower() == ".zip" or zipfile.is_zipfile(path))


def split(path: Path) -> tuple[Path, str] | None:
    """The zip that ``path`` leads into, and the path within; None for a path that leads into none."""
    for above in path.parents:
        if above.is_file():
            return above, path.relative_to(above).as_posix()
        if above.is_dir():
            return None
    return None


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except NotADirectoryError:
        inside = split(path)
        if inside is None:
            raise
    try:
        return open_archive(inside[0]).open(inside[1])
    except ArchiveError as error:
        raise OSError(5, str(error), str(inside[0])) from error


def read_file(path: Path, most: int = -1) -> bytes:
    """The bytes, or the first ``most`` of them, of a file of a dataset, also of one inside a zip.

    Raises OSError, also for a file that is damaged in its zip.
    """
    try:
        with _open(path) as file:
            return file.read(most)
    except OSError:
        raise
    except Exception as error:  # BadZipFile, EOFError, and each decompressor's own: zlib.error, lzma.LZMAError
        raise OSError(5, f"damaged in the zip: {error}", str(path)) from error


class Stamp(NamedTuple):
    """What changes when a file does, without reading it."""

    size: int  # bytes
    marks: tuple[int, int, int]  # size and times, or size and checksum of a file inside a zip
    written: int  # ns since 1970; 0 where the marks do not hang on a clock


def stamp(path: Path) -> Stamp:
    """Raises OSError."""
    try:
        found = os.stat(path)
    except NotADirectoryError:
        inside = split(path)
        if inside is None:
            raise
        try:
            info = open_archive(inside[0]).members[inside[1]]
        except (KeyError, ArchiveError) as error:
            raise FileNotFoundError(2, "not in the zip", str(path)) from error
        return Stamp(info.file_size, (info.file_size, info.CRC, info.compress_size), 0)
    # The time of the last change of the inode tells of files that were replaced with their old time and size.
    marks = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return Stamp(found.st_size, marks, max(found.st_mtime_ns, found.st_ctime_ns))
