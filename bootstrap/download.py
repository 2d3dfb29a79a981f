"""Repositories of the hub and files of any address on the volume: whole, verified, fetched once, shared by all jobs.

``models/<owner>--<name>/<commit>/`` holds the files of one commit under their names and ``manifest.json``, which says
what they must be (size, sha256). It is written before the first file, so that a fetch that was broken off is gone on
with, and a file has its name only once its every byte is there and verified; until then it is a hidden ``.part`` beside
it, which the next start goes on with. A folder that is whole is used without one request.

One process of one pod at a time fetches a repository: it holds a lease beside it, and the others wait for its files.
"""

from __future__ import annotations

import glob
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from bootstrap import hub
from bootstrap.hub import RemoteFile
from bootstrap.lease import STALE, HeldLease, LeaseTakenError, LeaseWatch
from bootstrap.manifest import MANIFEST, KnownFile, Manifest, find_fetched, modified, repo_folder, size_of, whole
from bootstrap.outcome import AccessError, PodError
from bootstrap.receive import XET, Order, VolumeError, hash_file
from bootstrap.transfers import MAKE_ROOM, Attend, Patience, Say, Transfers
from bootstrap.volume import flush_folder
from bootstrap.volume_probe import room

T = TypeVar("T")
Choose = Callable[[str, tuple[RemoteFile, ...]], tuple[RemoteFile, ...]]

LEASE = ".fetch.lease"
FOLDERS = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
SPARE = 1 << 30  # bytes that a fetch leaves free on the volume
LOOK_EVERY = 0.2  # seconds between two looks at a lease that another holds
TELL_EVERY = 30.0  # seconds between two lines about waiting for it


def flux_files(repo: str, files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
    """What training needs of a FLUX repository: its diffusers folders, in safetensors, in their main precision.

    One copy of the transformer: the single file beside the folders holds the same numbers once more, and of three
    shards a broken transfer loses less. Raises AccessError where the repository has another layout.
    """
    chosen = []
    for file in files:
        folder, _, name = file.path.rpartition("/")
        in_folder = folder in FOLDERS and name.endswith((".safetensors", ".json", ".txt", ".model"))
        variant = any(f".{kind}" in name for kind in ("fp16", "bf16", "fp8", "fp32"))
        if file.path == "model_index.json" or (in_folder and not variant):
            chosen.append(file)
    folders = {file.path.partition("/")[0] for file in chosen}
    if absent := [folder for folder in FOLDERS if folder not in folders]:
        raise AccessError(
            f"{repo} is not in the layout of diffusers: it has no {', '.join(absent)} folder. Choose a repository that "
            "has, e.g. black-forest-labs/FLUX.1-dev, or download its single file and give its path as base."
        )
    return tuple(chosen)


def fetch_repo(
    repo: str,
    revision: str,
    models: Path,
    token: str | None,
    say: Say,
    patience: Patience | None = None,
    *,
    kind: str = "model",
    choose: Choose = flux_files,
) -> tuple[Path, Manifest]:
    """The folder of ``repo`` at ``revision`` below ``models``, with the files that ``choose`` takes of all there are.

    Fetched if need be; not one request where it is there and whole. ``models`` is a folder of the volume's root,
    ``kind`` is model or dataset. A signal handler may raise at any point: what has arrived stays, and nothing runs on.
    Raises AccessError (with everything that is missing where a part is there), PodError.
    """
    token = hub.clean_token(token)
    home = repo_folder(models, repo)

    def there() -> tuple[Path, Manifest] | None:
        return whole(models, repo, revision)

    def fetch(owner: str, attend: Attend) -> tuple[Path, Manifest]:
        found = _looked_through(find_fetched(models, repo, revision), say, attend)
        if found and found[1].complete and not found[1].missing(found[0]):
            return found
        missing = found[1].missing(found[0]) if found else []
        pinned = found[1].commit if found and found[1].complete else revision
        try:
            with Transfers(token, say, attend, patience) as transfers:
                say(f"{repo}: asking the hub for revision '{revision}'")
                commit, files = transfers.list_files(repo, pinned, kind)
                folder, manifest = _prepare(home / commit, repo, revision, choose(repo, files))
                _carry(transfers, folder, manifest, files, kind, owner)
        except (AccessError, PodError) as error:
            lost = f" Missing on the volume: {', '.join(missing)}." if missing else ""
            raise type(error)(f"{error}{lost}") from None
        return folder, _complete(folder, manifest)

    return _alone(home / LEASE, repo, there, fetch, say)


def refuse_unreadable(repo: str, revision: str, token: str | None, say: Say) -> None:
    """Raises AccessError, in words, where this token may not read the repository; nothing is fetched."""
    with Transfers(hub.clean_token(token), say, lambda: None) as transfers:
        transfers.list_files(repo, revision)


def fetch_url(
    url: str,
    target: Path,
    root: Path,
    say: Say,
    patience: Patience | None = None,
    *,
    sha256: str | None = None,
    most: int | None = None,
    kept: Callable[[], Path | None] = lambda: None,
) -> Path:
    """The file at ``url``, as ``target`` on the volume with mount point ``root``; no request where it is there.

    Verified by ``sha256`` where that is known, else by the size that the server gives. Raises AccessError, also for a
    file of more than ``most`` bytes, and PodError. ``kept`` gives the file where it is kept under another name by now.
    """
    shown = hub.shown_address(url)

    def there() -> Path | None:
        return kept() or (target if target.is_file() else None)

    def fetch(owner: str, attend: Attend) -> Path:
        part = _own_part(target, owner)
        with Transfers(None, say, attend, patience) as transfers:
            transfers.carry(
                [Order(str(part), sha256=sha256, url=url, most=most)],
                lambda order, _: Path(order.part).replace(target),
                shown,
                lambda coming: _need_room(root, shown, coming),
            )
        flush_folder(target.parent)
        return target

    return _alone(target.with_name(f".{target.name}.lease"), shown, there, fetch, say)


# ---- one at a time


class _LeaseLostError(Exception):
    """Another pod took this fetch over, believing this one dead."""


def _alone(path: Path, name: str, there: Callable[[], T | None], fetch: Callable[[str, Attend], T], say: Say) -> T:
    """What ``there`` gives, as soon as it gives something; else what ``fetch`` gives while this process alone fetches.

    flock over a network volume is not to be trusted, so the lease is a file with a counter (see ``bootstrap.lease``).
    """
    while True:
        lost = threading.Event()
        lease = HeldLease(path, os.environ.get("RUNPOD_POD_ID", ""), lost.set)
        if (found := _wait_for(lease, name, there, say)) is not None:
            return found

        def attend(lost: threading.Event = lost) -> None:
            if lost.is_set():
                raise _LeaseLostError

        with lease:
            try:
                return there() or fetch(lease.lease.owner, attend)
            except _LeaseLostError:
                say(f"another pod took over fetching {name}")


def _wait_for(lease: HeldLease, name: str, there: Callable[[], T | None], say: Say) -> T | None:
    """Takes the lease and gives None, or gives what is there before it is free."""
    watch, told = LeaseWatch(lease.lease.pod), -TELL_EVERY
    while (found := there()) is None:
        try:
            lease.take(watch)
            return None
        except LeaseTakenError:
            pass
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            say(
                f"waiting for another process or pod that fetches {name}; it is taken for dead {STALE:.0f} s after its "
                "last sign of life"
            )
        time.sleep(LOOK_EVERY)
    return found


# ---- the files of a commit


def _looked_through(found: tuple[Path, Manifest] | None, say: Say, attend: Attend) -> tuple[Path, Manifest] | None:
    """The same with every file looked at whose time has changed; what is no longer right is removed."""
    if not found or not (changed := found[1].changed(found[0])):
        return found
    folder, manifest = found
    say(f"{manifest.repo}: {', '.join(changed)} changed since they were verified: reading them")
    files = dict(manifest.files)
    for path in changed:
        known = files[path]
        order = Order(str(folder / path), known.size, known.sha256)
        try:
            right = hash_file(folder / path, order, lambda **_: attend()) is not None
        except VolumeError as error:
            say(f"{folder / path} cannot be read: {error.strerror}")
            right = False
        if right:
            files[path] = replace(known, modified=modified(folder / path))
        else:
            say(f"{manifest.repo}: {path} is damaged")
            (folder / path).unlink(missing_ok=True)
    manifest = replace(manifest, files=files)
    manifest.write(folder)
    return folder, manifest


def _prepare(folder: Path, repo: str, revision: str, chosen: tuple[RemoteFile, ...]) -> tuple[Path, Manifest]:
    """The folder of a commit with its manifest, files that other commits have brought already, and no leftovers."""
    before = Manifest.read(folder)
    known = before.files if before else {}
    files = {
        file.path: known.get(file.path) or KnownFile(file.size, file.sha256)
        for file in chosen
        if _stays_inside(file.path)
    }
    revisions = tuple(dict.fromkeys((*(before.revisions if before else ()), revision)))
    manifest = Manifest(repo, folder.name, revisions, files, complete=bool(before and before.complete))
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write(folder)
    for other in folder.parent.iterdir():
        theirs = Manifest.read(other) if other != folder and other.is_dir() else None
        if theirs is None:
            continue
        _link_known(other, theirs, folder, manifest)
        if not theirs.complete and theirs.means(revision):  # begun when the revision was another commit
            shutil.rmtree(other)
    return folder, manifest


def _stays_inside(path: str) -> bool:
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and path != MANIFEST


def _link_known(other: Path, theirs: Manifest, folder: Path, manifest: Manifest) -> None:
    """Files that another commit has verified and this one needs too. A volume without hard links fetches them."""
    for path in manifest.missing(folder):
        file, same = manifest.files[path], theirs.files.get(path)
        if file.sha256 and same and same.sha256 == file.sha256 and size_of(other / path) == file.size:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                (folder / path).unlink(missing_ok=True)
                os.link(other / path, folder / path)


def _carry(
    transfers: Transfers, folder: Path, manifest: Manifest, files: tuple[RemoteFile, ...], kind: str, owner: str
) -> None:
    """Brings what is missing, each file to its name as soon as it is verified."""
    missing = set(manifest.missing(folder))
    orders = [
        Order(
            part=str(_own_part(folder / file.path, owner)), size=file.size, sha256=file.sha256, blob=file.blob,
            repo=manifest.repo, kind=kind, commit=manifest.commit, path=file.path,
        )
        for file in files
        if file.path in missing
    ]  # fmt: skip
    to_come = sum((order.size or 0) - max(0, size_of(Path(order.part))) for order in orders)
    _need_room(folder.parents[2], manifest.repo, to_come)
    # A rename is flushed with the manifest: one that a power cut takes back is done again.
    transfers.carry(orders, lambda order, _: Path(order.part).replace(folder / order.path), manifest.repo)


def _complete(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest with everything that only whole files tell; what transfers left is taken away."""
    for left in folder.rglob(".*.part*"):
        left.unlink(missing_ok=True)
    for inner in {(folder / path).parent for path in manifest.files}:
        flush_folder(inner)
    files = {
        path: KnownFile(
            file.size,
            file.sha256 or hash_file(folder / path, Order("", file.size), lambda **_: None),
            modified(folder / path),
        )
        for path, file in manifest.files.items()
    }
    manifest = replace(manifest, files=files, complete=True)
    manifest.write(folder)
    return manifest


def _own_part(target: Path, owner: str) -> Path:
    """Where the bytes of ``target`` go until they are whole: a name that no other process writes to.

    What an earlier owner of the lease left there, the longest of it, is taken over under that name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{owner[:8]}.part")
    left = sorted(target.parent.glob(f".{glob.escape(target.name)}.*.part"), key=size_of)
    for path in (*left[:-1], *target.parent.glob(f".{glob.escape(target.name)}.*.part{XET}")):
        path.unlink(missing_ok=True)
    if left and left[-1] != part:
        with suppress(FileNotFoundError):
            left[-1].with_name(f"{left[-1].name}.tag").replace(f"{part}.tag")
        left[-1].replace(part)
    return part


def _need_room(root: Path, name: str, coming: int) -> None:
    """Raises PodError where the volume at ``root`` has no room for ``coming`` bytes more."""
    if (free := room(root)) < coming + SPARE:
        raise PodError(
            f"{name} needs {(coming + SPARE) / 1e9:.1f} GB more on the volume and {free / 1e9:.1f} GB are free. "
            f"{MAKE_ROOM}"
        )
