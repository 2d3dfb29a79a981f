"""The files of a dataset folder or zip, with what the folders' names say: kohya-style ``N_class text`` is N repeats.

Folders may be flat, kohya-style or nested to any depth, with symbolic links; where links lead back to a folder that is
being walked, the walk ends there. Hidden and system files are counted and passed over. A zip is walked as the folder it
would unpack to.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bootstrap.archives import ArchiveError, is_zip, open_archive, read_file

SYSTEM_NAMES = frozenset(
    {
        *("__macosx", "icon\r"),  # Mac
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),  # Windows
        *("@eadir", "lost+found"),  # network drives, ext4
    }
)
# Four digits at most: a folder named 20240801_holiday is a date, not twenty million repeats.
_REPEATS = re.compile(r"(-?\d{1,4})_(.*)", re.DOTALL)


@dataclass(frozen=True)
class Folder:
    path: Path  # for people and for read_file: it may lead into a zip
    name: str  # relative to the dataset, "" for the dataset itself
    files: tuple[str, ...]  # names, sorted, without hidden and system ones
    repeats: int  # from the nearest folder above (or this one) named N_text, else 1
    class_text: str  # of that folder, else ""

    def read(self, name: str) -> bytes:
        """A file of this folder. Raises OSError."""
        return read_file(self.path / name)


@dataclass(frozen=True)
class Tree:
    folders: tuple[Folder, ...]  # sorted by name
    ignored: int  # hidden and system files and folders
    notes: tuple[str, ...]


def named_repeats(name: str) -> tuple[int, str] | None:
    """(N, text) of a folder named ``N_text``; N may be below 1, which means: leave it out."""
    match = _REPEATS.fullmatch(name)
    return (int(match[1]), match[2].strip()) if match else None


def is_system(name: str) -> bool:
    """Whether a file or folder of that name is hidden, or an operating system's own."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def walk(root: Path) -> Tree:
    """Everything below the folder or in the zip ``root``. What cannot be read is told in the notes, not passed over in
    silence.

    Raises ArchiveError for a zip that must not be used.
    """
    return _walk_zip(root) if is_zip(root) else _walk_folder(root)


def _walk_zip(path: Path) -> Tree:
    try:
        archive = open_archive(path)
    except OSError as error:
        raise ArchiveError(f"cannot be read ({error.strerror})") from error
    by_folder: dict[tuple[str, ...], list[str]] = defaultdict(list, {(): []})
    notes = set(archive.notes)
    ignored = 0
    for member in archive.members:
        *above, name = member.split("/")
        if any(is_system(part) for part in (*above, name)):
            ignored += 1
        else:
            by_folder[tuple(above)].append(name)
    folders = []
    for parts, names in by_folder.items():
        repeats, class_text = 1, ""
        for depth, part in enumerate(parts, start=1):
            repeats, class_text = named_repeats(part) or (repeats, class_text)
            if repeats < 1:
                notes.add(f"{'/'.join(parts[:depth])}: {repeats} repeats by its name: left out")
                break
        else:
            folders.append(Folder(path.joinpath(*parts), "/".join(parts), tuple(sorted(names)), repeats, class_text))
    return Tree(tuple(sorted(folders, key=lambda folder: folder.name)), ignored, tuple(sorted(notes)))


def _walk_folder(root: Path) -> Tree:
    folders: list[Folder] = []
    notes: list[str] = []
    ignored = 0
    waiting: list[tuple[Path, str, int, str, tuple[str, ...]]] = [(root, "", 1, "", (os.path.realpath(root),))]
    while waiting:
        path, name, repeats, class_text, above = waiting.pop()
        files: list[str] = []
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            notes.append(f"{name or path}: cannot be read ({error.strerror})")
            continue
        for entry in entries:
            below = f"{name}/{entry.name}" if name else entry.name
            if is_system(entry.name):
                ignored += 1
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in above:
                    notes.append(f"{below}: a link back to a folder above it, not followed")
                    continue
                number, text = named_repeats(entry.name) or (repeats, class_text)
                if number < 1:
                    notes.append(f"{below}: {number} repeats by its name: left out")
                    continue
                waiting.append((Path(entry.path), below, number, text, (*above, real)))
            elif entry.is_file():
                files.append(entry.name)
            else:
                notes.append(f"{below}: a link to nothing, or no regular file: left out")
        folders.append(Folder(path, name, tuple(files), repeats, class_text))
    return Tree(tuple(sorted(folders, key=lambda folder: folder.name)), ignored, tuple(sorted(notes)))
