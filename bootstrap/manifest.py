"""What a fetched folder of the hub consists of: ``manifest.json``, and what can be told of the folder by it alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bootstrap.volume import read_json, write_json

MANIFEST = "manifest.json"
DOUBTED = -1  # a time that no file has


@dataclass(frozen=True)
class KnownFile:
    """What a file of the hub must be. ``modified`` is its time when it was verified, in seconds: see ``changed``."""

    size: int  # bytes
    sha256: str | None  # of small files known only once they are here
    modified: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What a fetched folder consists of."""

    repo: str
    commit: str
    revisions: tuple[str, ...]  # as jobs asked for them: "main", a tag, a commit
    files: dict[str, KnownFile]  # by path
    complete: bool  # whether every file was there once; then the commit stays, whatever a revision means by now

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        value: Any = read_json(folder / MANIFEST)
        try:
            files = {
                path: KnownFile(int(file["size"]), file["sha256"], file["modified"])
                for path, file in value["files"].items()
            }
            return cls(value["repo"], value["commit"], tuple(value["revisions"]), files, bool(value["complete"]))
        except (TypeError, KeyError, ValueError, AttributeError):
            return None

    def missing(self, folder: Path) -> list[str]:
        """Files that are absent or have another size."""
        return [path for path, file in self.files.items() if size_of(folder / path) != file.size]

    def changed(self, folder: Path) -> list[str]:
        """Files of the right size with another time than when they were verified: somebody wrote to them, or copied
        the volume. Their contents must be looked at before they are used."""
        return [
            path
            for path, file in self.files.items()
            if file.modified and size_of(folder / path) == file.size and modified(folder / path) != file.modified
        ]

    def doubt(self, folder: Path, paths: Iterable[str]) -> None:
        """Notes that these files must be read and compared before they are used again, whatever their times say."""
        files = {path: replace(file, modified=DOUBTED) if path in paths else file for path, file in self.files.items()}
        replace(self, files=files).write(folder)

    def means(self, revision: str) -> bool:
        return revision in self.revisions or revision == self.commit


def repo_folder(models: Path, repo: str) -> Path:
    return models / repo.replace("/", "--")


def find_fetched(models: Path, repo: str, revision: str) -> tuple[Path, Manifest] | None:
    """The folder of that revision: the newest that was complete once, else the newest that was begun."""
    found = []
    for path in repo_folder(models, repo).glob(f"*/{MANIFEST}"):
        manifest = Manifest.read(path.parent)
        if manifest and manifest.means(revision):
            found.append((manifest.complete, path.stat().st_mtime, path.parent, manifest))
    return max(found, key=lambda entry: entry[:2])[2:] if found else None


def whole(models: Path, repo: str, revision: str) -> tuple[Path, Manifest] | None:
    """The folder of that revision where it can be used as it is; sizes and times are looked at, no content."""
    found = find_fetched(models, repo, revision)
    if found and found[1].complete and not found[1].missing(found[0]) and not found[1].changed(found[0]):
        return found
    return None


def size_of(path: Path) -> int:
    """Bytes of the file; -1 where there is none."""
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:  # gone between the two looks
        return -1


def modified(path: Path) -> int:
    """When the file was written, in whole seconds: some network volumes keep no more."""
    return int(path.stat().st_mtime)
