"""The files of a dataset folder, with what the folders' names say: kohya-style ``N_class text`` means N repeats.

Folders may be flat, kohya-style or nested to any depth, with symbolic links; where links lead back to a folder that is
being walked, the walk ends there. Hidden and system files are counted and passed over.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
    path: Path
    name: str  # relative to the dataset, "" for the dataset itself
    files: tuple[str, ...]  # names, sorted, without hidden and system ones
    repeats: int  # from the nearest folder above (or this one) named N_text, else 1
    class_text: str  # of that folder, else ""


@dataclass(frozen=True)
class Tree:
    folders: tuple[Folder, ...]  # sorted by name
    ignored: int  # hidden and system files and folders
    notes: tuple[str, ...]


def named_repeats(name: str) -> tuple[int, str] | None:
    """(N, text) of a folder named ``N_text``; N may be below 1, which means: leave it out."""
    match = _REPEATS.fullmatch(name)
    return (int(match[1]), match[2].strip()) if match else None


def walk(root: Path) -> Tree:
    """Everything below the folder ``root``. What cannot be read is told in the notes, not passed over in silence."""
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
            if entry.name.startswith(".") or entry.name.lower() in SYSTEM_NAMES:
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
