"""Reading, checking and thinning states; writing one needs the trainer (trainer/checkpoint.py).

``states/step-000500/`` holds ``model.safetensors``, ``optimizer.safetensors`` and ``state.json``, whose extents say how
long each run of bytes is and what it hashes to. A folder without a valid ``state.json`` is not a state. A state that
lost its optimizer to thinning is a checkpoint: it can be used and shared, not gone on from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bootstrap.volume import remove_parts, write_atomically
from jobs.schema import Lora, Save

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST = "state.json"
VERSION = 1
BLOCK = 8 * 1024 * 1024  # bytes read at once while hashing
MOST_READERS = 8  # threads that hash: SHA-256 takes 0.5 to 2 GB/s of one core, and a good disk gives more
SET_ASIDE = "set-aside"  # below the run's folder: what a run that went back had made beyond there


@dataclass(frozen=True)
class Extent:
    """A run of bytes of one file, written by one process."""

    file: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True)
class Validated:
    """What validation found of a state's weights; comparable between those of the same ``pictures``."""

    loss: float
    pictures: str


@dataclass(frozen=True)
class Manifest:
    """``state.json``."""

    version: int
    step: int  # optimizer updates done
    method: str
    base: str
    seed: int
    images_per_step: int
    processes: int
    optimizer: str
    optimizer_scalars: dict[str, Any]
    lora: Lora | None
    job_digest: str
    versions: dict[str, str]
    seconds: float  # that writing it took
    files: dict[str, int]  # name to bytes
    extents: tuple[Extent, ...] = field(default=())
    saved: str = ""  # when, UTC
    optimizer_args: dict[str, Any] | None = None
    validation: Validated | None = None
    assistant_lora: str | None = None
    ema: dict[str, Any] | None = None  # of the average that the weights are, if they are one
    resume_from: int | None = None  # of the job that made it: the step that this line of states branches off at


@dataclass(frozen=True)
class State:
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def resumable(self) -> bool:
        return OPTIMIZER_FILE in self.manifest.files

    @property
    def model(self) -> Path:
        return self.path / MODEL_FILE

    @property
    def optimizer(self) -> Path:
        return self.path / OPTIMIZER_FILE

    @property
    def bytes(self) -> int:
        return sum(self.manifest.files.values())


class StateError(ValueError):
    """A folder that is not a whole state; the message says why."""


_MANIFEST = TypeAdapter(Manifest)


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomically(folder / MANIFEST, _MANIFEST.dump_json(manifest, indent=1))


def read_state(folder: Path) -> State:
    """The state in ``folder``, its files' sizes checked. Raises StateError."""
    try:
        manifest = _MANIFEST.validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise StateError(f"{folder.name} has no {MANIFEST}: it was not finished, or is not a state") from None
    except OSError as error:
        raise StateError(f"{folder.name}/{MANIFEST} cannot be read: {error}") from error
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, each["loc"])) or "all of it" for each in error.errors())
        raise StateError(f"{folder.name}/{MANIFEST} is of another version, or damaged: {wrong}") from error
    if manifest.version != VERSION:
        raise StateError(f"{folder.name} is of format {manifest.version}; this program reads {VERSION}")
    if MODEL_FILE not in manifest.files:
        raise StateError(f"{folder.name}/{MANIFEST} names no {MODEL_FILE}")
    for name, size in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes"
            raise StateError(f"{folder.name}/{name} {has}, not {size}: it is damaged")
        _check_cover(folder.name, name, size, [e for e in manifest.extents if e.file == name])
    return State(folder, manifest)


def _check_cover(state: str, file: str, size: int, extents: Iterable[Extent]) -> None:
    position = 0
    for extent in sorted(extents, key=lambda e: e.offset):
        if extent.offset != position:
            raise StateError(f"{state}/{MANIFEST} says nothing about byte {position} of {file}")
        position += extent.length
    if position != size:
        raise StateError(f"{state}/{MANIFEST} says nothing about byte {position} of {file}")


def verify(state: State) -> None:
    """Hashes every byte, several extents at a time. Raises StateError naming the first damaged run."""
    extents = sorted(state.manifest.extents, key=lambda e: (e.file, e.offset))
    descriptors: dict[str, int] = {}
    try:
        for name in state.manifest.files:
            descriptors[name] = os.open(state.path / name, os.O_RDONLY)
        with ThreadPoolExecutor(min(MOST_READERS, len(os.sched_getaffinity(0)))) as pool:
            hashes = pool.map(lambda extent: _hash(descriptors[extent.file], extent), extents)
            for extent, found in zip(extents, hashes, strict=True):
                if found != extent.sha256:
                    pool.shutdown(wait=False, cancel_futures=True)
                    place = f"bytes {extent.offset} and {extent.offset + extent.length}"
                    raise StateError(f"{state.path.name}/{extent.file} is damaged between {place}")
    except OSError as error:  # a bad disk, or gone since it was listed
        raise StateError(f"{state.path.name} cannot be read: {error}") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _hash(descriptor: int, extent: Extent) -> str:
    """Of an extent's bytes, or of what there is of them."""
    digest, block, done = hashlib.sha256(), memoryview(bytearray(min(BLOCK, extent.length))), 0
    while done < extent.length:
        count = os.preadv(descriptor, [block[: extent.length - done]], extent.offset + done)
        if count == 0:
            break
        digest.update(block[:count])
        done += count
    return digest.hexdigest()


def list_states(folder: Path) -> tuple[list[State], list[str]]:
    """The states in ``folder`` by step, oldest first, and a line for each folder that is none.

    The step is the manifest's number, never the order of names.
    """
    states, notes = [], []
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        try:
            states.append(read_state(path))
        except StateError as error:
            notes.append(str(error))
    return sorted(states, key=lambda state: state.step), notes


def newest_whole(folder: Path) -> tuple[State | None, list[str]]:
    """The newest state that can be gone on from, every byte verified, and a line for each newer one that cannot."""
    states, notes = list_states(folder)
    for state in reversed(states):
        if not state.resumable:
            continue
        try:
            verify(state)
            return state, notes
        except StateError as error:
            notes.append(f"{error}; the one before it is used")
    return None, notes


def best_of(states: Iterable[State]) -> State | None:
    """The state of the lowest validation loss, the first of several, among those that were tried on the pictures that
    the newest was; None where none was tried."""
    tried = [(state.manifest.validation, state) for state in sorted(states, key=lambda state: state.step)]
    found = [(validated, state) for validated, state in tried if validated is not None]
    alike = [(v.loss, state.step, state) for v, state in found if v.pictures == found[-1][0].pictures]
    return min(alike, key=lambda each: each[:2])[2] if alike else None


def prune(folder: Path, newest: int, save: Save, keep_best: bool = False) -> None:
    """Of the states up to step ``newest``, just saved, takes the optimizer from all but the last ``save.states``, and
    removes all but the last ``save.weights``, those at multiples of ``save.keep_every`` and, with ``keep_best``, the
    one of the lowest validation loss.

    One beyond ``newest`` is not counted: the run went on from an older one, because this one is damaged. A kill in the
    middle leaves a valid checkpoint with a file too many, or a hidden folder, which the next call takes away.
    """
    remove_leftovers(folder)
    states = [state for state in list_states(folder)[0] if state.step <= newest]
    best = best_of(states) if keep_best else None
    states.reverse()
    for place, state in enumerate(states):
        if place < save.states:
            continue
        stays = save.weights == "all" or place < save.weights or state is best
        stays = stays or bool(save.keep_every and state.step % save.keep_every == 0)
        if stays:
            thin(state)
        else:
            shutil.rmtree(state.path.rename(state.path.with_name(f".{state.path.name}.old")))


def remove_leftovers(folder: Path) -> None:
    """Takes away what a kill left of a save, of a removal (up to a whole state, on a volume that may have no room) or
    of thinning."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    remove_parts(*(path for path in folder.glob("step-*") if path.is_dir()))


def is_ours(path: Path) -> bool:
    """Whether a folder, damaged or not, was made by a save; anything else in its place is somebody's."""
    try:
        _MANIFEST.validate_json((path / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return False
    return not path.is_symlink()


def set_aside(paths: Iterable[Path], run: Path) -> Path | None:
    """Moves what must not be written over into a new folder below ``run``; gives that folder, None for nothing."""
    there = [path for path in paths if os.path.lexists(path)]
    if not there:
        return None
    number = 1 + max((int(p.name) for p in (run / SET_ASIDE).glob("*") if p.name.isdecimal()), default=0)
    target = run / SET_ASIDE / str(number)
    target.mkdir(parents=True)
    for path in there:
        path.rename(target / path.name)
    return target


def thin(state: State) -> None:
    """Makes a state a checkpoint: the weights stay, the optimizer goes, the manifest's mention of it first."""
    kept = state.manifest
    files = {name: size for name, size in kept.files.items() if name != OPTIMIZER_FILE}
    extents = tuple(extent for extent in kept.extents if extent.file != OPTIMIZER_FILE)
    if state.resumable:
        write_manifest(state.path, replace(kept, files=files, extents=extents))
    state.optimizer.unlink(missing_ok=True)
