"""Datasets that lie elsewhere: a zip behind a link, or a repository of the hub. Fetched once, shared by all jobs.

``fetched/`` on the volume holds them: ``links/<hash of the address>.json`` says which zip a link has brought, and
``links/<sha256>.zip`` is that zip, so that two links to the same bytes keep one; ``<owner>--<name>/<commit>/`` holds
the files of a repository (``bootstrap.download``), and ``<owner>--<name>/<commit>.zip`` the pictures of its parquet
tables.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bootstrap.hub import RemoteFile, shown_address
from bootstrap.images import IMAGE_ENDINGS
from bootstrap.links import LinkError, direct
from bootstrap.manifest import whole
from bootstrap.volume import Volume, read_json, write_json
from jobs.problem import JobError, Problem
from jobs.schema import Job

Say = Callable[[str], None]

MOST_BYTES = 200_000_000_000  # of a linked zip: 100,000 pictures of 2 MB
HUB = "hf://datasets/"
TEXT_ENDINGS = frozenset((".txt", ".caption", ".jsonl", ".csv"))
PASSED_OVER = frozenset(("readme.txt", "license.txt"))


@dataclass(frozen=True)
class HubDataset:
    repo: str
    revision: str
    below: str  # a folder or file in it, "" for all


def is_remote(path: str) -> bool:
    """Whether a dataset's path leads away from the volume."""
    return "://" in path


def shown_path(path: str) -> str:
    """A dataset's path fit for a log: a link can be as good as a password."""
    return shown_address(path) if is_remote(path) else path


def parse_hub(path: str) -> HubDataset | None:
    """``hf://datasets/owner/name[@revision][/folder or file]``; None for what is not that."""
    found = re.fullmatch(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/\s]+))?(?:/(.*))?", path)
    if found and ".." in (found[3] or "").split("/"):
        return None
    return HubDataset(found[1], found[2] or "main", (found[3] or "").strip("/")) if found else None


def address_of(path: str) -> str:
    """Where the bytes of a linked dataset are; "" for one of the hub. Raises LinkError for what can be neither."""
    if parse_hub(path):
        return ""
    if not re.match(r"https?://[^/\s]", path):
        raise LinkError("is no address of a dataset: write https://... or hf://datasets/owner/name")
    return direct(path)


def find_fetched(path: str, volume: Volume) -> Path | None:
    """The folder or zip that a remote dataset has become on the volume; None while it is not there."""
    if hub := parse_hub(path):
        found = whole(volume.fetched, hub.repo, hub.revision)
        return _root(found[0], hub) if found else None
    record = read_json(_record(path, volume))
    if not isinstance(record, dict) or not re.fullmatch(r"[0-9a-f]{64}", str(record.get("sha256"))):
        return None
    file = volume.fetched / "links" / f"{record['sha256']}.zip"
    return file if file.is_file() else None


def fetch_datasets(job: Job, volume: Volume, token: str | None, say: Say) -> None:
    """Brings every remote dataset of the job to the volume; nothing is asked of any network for those there already.

    Raises JobError for an address that can never give a dataset, AccessError, PodError.
    """
    for index, entry in enumerate(job.datasets):
        if is_remote(entry.path) and find_fetched(entry.path, volume) is None:
            _fetch(entry.path, f"datasets[{index}].path", volume, token, say)


def _fetch(path: str, key: str, volume: Volume, token: str | None, say: Say) -> None:
    if hub := parse_hub(path):
        _fetch_hub(hub, key, volume, token, say)
        return
    try:
        _fetch_link(path, volume, say)
    except LinkError as error:
        raise JobError([Problem(f"{shown_address(path)} {error}", key=key)]) from None


# ---- links


def _record(link: str, volume: Volume) -> Path:
    # Its hash: a link can be as good as a password.
    return volume.fetched / "links" / f"{hashlib.sha256(link.encode()).hexdigest()[:32]}.json"


def _fetch_link(link: str, volume: Volume, say: Say) -> None:
    from bootstrap.download import fetch_url

    record = _record(link, volume)
    address = address_of(link)
    say(f"data: fetching {shown_address(link)}")

    def kept() -> Path | None:
        return find_fetched(link, volume)

    arrived = fetch_url(address, record.with_suffix(".arrived"), volume.root, say, most=MOST_BYTES, kept=kept)
    if kept():
        return
    try:
        if not zipfile.is_zipfile(arrived):
            told = _what_came(arrived)
            arrived.unlink()
            raise LinkError(told)
        with arrived.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = arrived.stat().st_size
        # The record first: whoever finds the file renamed finds the record, too.
        write_json(record, {"from": shown_address(link), "sha256": sha256, "size": size})
        arrived.replace(record.with_name(f"{sha256}.zip"))
    except FileNotFoundError:  # another pod that waited for the same link was faster
        if not kept():
            raise
        return
    say(f"data: {shown_address(link)} is {size / 1e6:.0f} MB, sha256 {sha256[:12]}")


def _what_came(file: Path) -> str:
    with file.open("rb") as content:
        start = content.read(512).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return (
            "gives a web page, not a zip: share the file so that anyone with the link may download it, and give the "
            "address that downloads it"
        )
    return f"gives {file.stat().st_size / 1e6:.1f} MB that are no zip: pack the pictures as .zip"


# ---- the hub


def _fetch_hub(hub: HubDataset, key: str, volume: Volume, token: str | None, say: Say) -> None:
    from bootstrap.download import fetch_repo
    from bootstrap.parquet import ParquetError, to_zip

    def choose(repo: str, files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
        return wanted(repo, files, key)

    folder, _ = fetch_repo(hub.repo, hub.revision, volume.fetched, token, say, kind="dataset", choose=choose)
    if hub.below and not (folder / hub.below).exists():
        names = sorted({PurePosixPath(path.relative_to(folder).as_posix()).parts[0] for path in folder.rglob("*.*")})
        raise JobError([Problem(f"{hub.repo} has no {hub.below!r}; it has {', '.join(names[:10])}", key=key)])
    if _root(folder, hub) is None:
        target = _zip_of_tables(folder, hub)
        try:
            to_zip(_tables(folder, hub), target, lambda line: say(f"data: {hub.repo}: {line}"))
        except ParquetError as error:
            raise JobError([Problem(f"{HUB}{hub.repo}: its parquet {error}", key=key)]) from None


def wanted(repo: str, files: tuple[RemoteFile, ...], key: str) -> tuple[RemoteFile, ...]:
    """Of a repository's files the pictures with what may be captions; without pictures its tables, else its zips.

    Raises JobError where there is nothing of the kind.
    """

    def ending(file: RemoteFile) -> str:
        return PurePosixPath(file.path).suffix.lower()

    if any(ending(file) in IMAGE_ENDINGS for file in files):
        return tuple(
            file
            for file in files
            if ending(file) in IMAGE_ENDINGS | TEXT_ENDINGS and file.path.lower() not in PASSED_OVER
        )
    for kind in (".parquet", ".zip"):
        if chosen := tuple(file for file in files if ending(file) == kind):
            return chosen
    there = ", ".join(sorted({ending(file) or file.path for file in files})[:10]) or "nothing"
    message = f"{HUB}{repo} holds neither pictures nor parquet tables nor zips, but {there}"
    raise JobError([Problem(message, "Choose a dataset of pictures", key)])


def _root(folder: Path, hub: HubDataset) -> Path | None:
    """What a fetched repository is walked as: a folder, a zip of its own, or the zip of its tables; None where that is
    not there, or not made yet."""
    root = folder / hub.below if hub.below else folder
    if not root.exists():
        return None
    if _tables(folder, hub):
        made = _zip_of_tables(folder, hub)
        return made if made.is_file() else None
    zips = sorted(root.rglob("*.zip")) if root.is_dir() else []
    return zips[0] if len(zips) == 1 and not _has_pictures(root) else root


def _has_pictures(root: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_ENDINGS for path in root.rglob("*"))


def _tables(folder: Path, hub: HubDataset) -> Sequence[Path]:
    """The parquet files to take: those of the split for training where splits are named."""
    root = folder / hub.below if hub.below else folder
    tables = [root] if root.suffix == ".parquet" else sorted(root.rglob("*.parquet"))
    return [path for path in tables if "train" in path.relative_to(folder).as_posix()] or tables


def _zip_of_tables(folder: Path, hub: HubDataset) -> Path:
    below = f"-{hashlib.sha256(hub.below.encode()).hexdigest()[:8]}" if hub.below else ""
    return folder.with_name(f"{folder.name}{below}.zip")
