"""What the volume really is: mounted or just the container's disk, writable or not, and how much it takes.

Read from the mount table and tried with one small file. Nothing here raises for what a volume can be like: what is
wrong stands in ``VolumeFacts.notes``, in words for people, the worst first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GB = 10**9
BLOCK = 1 << 20  # bytes
PROBE_BLOCKS = 64  # written at most
PROBE_SECONDS = 5.0  # within
COUNT_SECONDS = 10.0  # for adding up what lies on the volume; a network volume answers about a thousand files a second
CLUSTER = 50_000 * GB  # no rented volume is this large: a network volume that shows its whole cluster
SLOW = 50e6  # bytes/s; a network volume is sold with 200 to 400 MB/s
ABANDONED = 3600.0  # seconds: a probe that was killed left its file
PASSING = frozenset({"overlay", "aufs", "tmpfs", "ramfs", "rootfs", "devtmpfs", "squashfs", "proc", "sysfs"})


@dataclass(frozen=True)
class Mount:
    point: Path
    kind: str  # ext4, overlay, fuse.mfs, ...
    read_only: bool


@dataclass(frozen=True)
class VolumeFacts:
    mounted: bool  # a mount of its own, not a folder of the container's disk
    persistent: bool  # as far as the mount table tells: survives the container
    writable: bool
    rename: bool  # a file can replace another
    fsync: bool
    free: int  # bytes that may be written: what the file system says, and what the stated quota leaves
    quota: int | None  # bytes, as stated by FLUXPOD_VOLUME_GB
    write_speed: float | None  # bytes/s, flushed; None where nothing could be written
    read_speed: float | None = None  # bytes/s, of what was just written: as far as the system lets go of it
    kind: str = ""  # the file system's
    notes: tuple[str, ...] = ()


def probe_volume(
    root: Path, *, mountinfo: Path = Path("/proc/self/mountinfo"), environment: Mapping[str, str] = os.environ
) -> VolumeFacts:
    """Facts of the volume at ``root``, which is made if it is not there. Takes about a second on a healthy volume."""
    mount = find_mount(root, mountinfo)
    notes = [warning] if (warning := disk_warning(root, mount)) else []
    trial = _try_writing(root, notes)
    free = _free(root)
    quota = _stated_quota(environment, notes)
    if quota is not None:
        used = used_bytes(root)
        if used is None:
            notes.append(
                f"what lies on {root} could not be added up in {COUNT_SECONDS:g} s, so how much of FLUXPOD_VOLUME_GB "
                "is left is not known"
            )
        free = min(free, max(0, quota - (used or 0)))
    elif free > CLUSTER:
        notes.append(
            f"{root} shows {free / 1e12:.0f} TB free: the whole storage cluster, not what this volume may take. Set "
            "FLUXPOD_VOLUME_GB to the size you rent, so that a run which cannot fit is refused before it starts."
        )
    return VolumeFacts(
        mounted=mount is not None and mount.point != Path("/"),
        persistent=mount is not None and mount.point != Path("/") and mount.kind not in PASSING,
        writable=trial.writable,
        rename=trial.rename,
        fsync=trial.fsync,
        free=free,
        quota=quota,
        write_speed=trial.speed,
        read_speed=trial.read_speed,
        kind=mount.kind if mount else "",
        notes=tuple(notes),
    )


# --- The mount table --------------------------------------------------------------------------------------------------


def find_mount(root: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount that holds ``root``; None where there is no mount table to read."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = root.resolve()
    best: Mount | None = None
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 6:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        # Of several at one place the last one hides the others.
        if place.is_relative_to(point) and (best is None or len(point.parts) >= len(best.point.parts)):
            options = {*fields[5].split(","), *after.split(" ")[-1].split(",")}
            best = Mount(point, after.split(" ")[0], "ro" in options)
    return best


def disk_warning(root: Path, mount: Mount | None) -> str:
    """The loudest of the warnings, "" where the volume outlives the container."""
    if mount is None:
        return ""
    if mount.point == Path("/"):
        what = f"nothing is mounted at {root}: it is a folder of the container's own disk ({mount.kind})"
    elif mount.kind in PASSING:
        what = f"{root} is on {mount.kind}, mounted at {mount.point}, which does not outlive this container"
    else:
        return ""
    return (
        f"WARNING: {what}. EVERYTHING HERE IS LOST WHEN THE POD STOPS: models, states and results. Attach a volume "
        f"with {root} as its mount path, or set FLUXPOD_VOLUME to where it is mounted."
    )


# --- Trying -----------------------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    writable: bool = False
    rename: bool = False
    fsync: bool = False
    speed: float | None = None
    read_speed: float | None = None


def _try_writing(root: Path, notes: list[str]) -> _Trial:
    """Writes a file, flushes it, puts it in another's place, reads it back, removes it."""
    trial = _Trial()
    folder = root / ".fluxpod" / "probe"
    name = secrets.token_hex(6)
    first, second = folder / f"{name}.part", folder / f"{name}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        second.write_bytes(b"old")
        trial.writable = True
        written = _write(first, trial, notes)
        trial.read_speed = _read(first)
        _rename(first, second, written, trial, notes)
    except OSError as error:
        notes.insert(0, f"{root} cannot be written: {error.strerror}. {_remedy(root, error)}")
    for path in (first, second):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    _remove_abandoned(folder)
    if trial.speed is not None and trial.speed < SLOW:
        minutes = 24 * GB / trial.speed / 60
        notes.append(
            f"{root} takes {trial.speed / 1e6:.0f} MB/s: a checkpoint of 24 GB is {minutes:.0f} minutes of writing. "
            "Save less often (save.every), or deploy elsewhere"
        )
    return trial


def _write(path: Path, trial: _Trial, notes: list[str]) -> int:
    """Bytes written, until there are enough or it took long enough."""
    block = os.urandom(BLOCK)  # nothing that a file system could compress away
    start, written = time.monotonic(), 0
    with path.open("wb", buffering=0) as file:
        while written < PROBE_BLOCKS * BLOCK and time.monotonic() - start < PROBE_SECONDS:
            written += file.write(block)
        try:
            os.fsync(file.fileno())
            trial.fsync = True
        except OSError as error:
            notes.append(
                f"fsync does not work on this volume ({error.strerror}): what is saved may be lost when the pod is "
                "killed"
            )
    trial.speed = written / max(time.monotonic() - start, 1e-6)
    return written


def _read(path: Path) -> float:
    """Bytes/s of reading the file again, without what the system still holds of it, where it gives that up."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, size = time.monotonic(), 0
        while block := file.read(BLOCK):
            size += len(block)
    return size / max(time.monotonic() - start, 1e-6)


def _rename(first: Path, second: Path, size: int, trial: _Trial, notes: list[str]) -> None:
    try:
        first.replace(second)
        trial.rename = second.stat().st_size == size and not first.exists()
    except OSError as error:
        notes.append(f"renaming fails on this volume: {error.strerror}")
    if not trial.rename:
        notes.append("a file cannot take another's place here, so no state can be saved: use another volume")


def _remedy(root: Path, error: OSError) -> str:
    if error.errno in (errno.EDQUOT, errno.ENOSPC):
        return "It is full: delete models, runs or data that are no longer needed, or make the volume larger."
    if error.errno == errno.EROFS:
        return "It is mounted read-only: deploy the pod with a writable volume."
    try:
        owner = root.stat()
        return (
            f"This program is user {os.getuid()}; the folder is user {owner.st_uid}'s, mode {owner.st_mode & 0o7777:o}."
        )
    except OSError:
        return f"This program is user {os.getuid()}."


def _remove_abandoned(folder: Path) -> None:
    """Files of probes that were killed. Their age is taken against a file made now on the same volume."""
    with contextlib.suppress(OSError):
        now = folder.stat().st_mtime
        for path in folder.iterdir():
            if now - path.stat().st_mtime > ABANDONED:
                path.unlink()


# --- Room -------------------------------------------------------------------------------------------------------------


def used_bytes(root: Path, limit: float = COUNT_SECONDS) -> int | None:
    """Bytes of all files below ``root``; None where adding up takes longer than ``limit`` seconds."""
    end, total, folders = time.monotonic() + limit, 0, [str(root)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if time.monotonic() > end:
                    return None
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def room(root: Path, environment: Mapping[str, str] = os.environ) -> int:
    """Bytes that may still be written below ``root``: what the file system says, and what the stated quota leaves."""
    quota = _stated_quota(environment, [])
    return _free(root) if quota is None else min(_free(root), max(0, quota - (used_bytes(root) or 0)))


def _free(root: Path) -> int:
    try:
        room = os.statvfs(root)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


def _stated_quota(environment: Mapping[str, str], notes: list[str]) -> int | None:
    text = environment.get("FLUXPOD_VOLUME_GB", "").strip()
    if not text:
        return None
    number = re.fullmatch(r"(\d{1,7}(?:\.\d+)?)\s*(?:GB?)?", text, re.IGNORECASE)
    if not number or not float(number[1]):
        notes.append(f"FLUXPOD_VOLUME_GB={text} is no size; write the gigabytes you rent as a number, such as 300")
        return None
    return int(float(number[1]) * GB)
