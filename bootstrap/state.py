"""Reading, checking and thinning states; writing one needs the trainer (trainer/checkpoint.py).

``states/step-000500/`` holds ``model.safetensors``, ``optimizer.safetensors`` and ``state.json``, whose extents say how
long each run of bytes is and what it hashes to. A folder without a valid ``state.json`` is not a state. A state that
lost its optimizer to thinning is a checkpoint: it can be used and shared, not gone on from.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import TypeAdapter, ValidationError

from bootstrap.volume import write_atomically
from jobs.problem import Problem
from jobs.schema import Job, Lora

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST = "state.json"
VERSION = 1
BLOCK = 16 * 1024 * 1024  # bytes read at once while hashing


@dataclass(frozen=True)
class Extent:
    """A run of bytes of one file, written by one process."""

    file: str
    offset: int
    length: int
    sha256: str


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
    """Hashes every byte, sequentially. Raises StateError naming the first damaged run."""
    for name in state.manifest.files:
        extents = sorted((e for e in state.manifest.extents if e.file == name), key=lambda e: e.offset)
        try:
            with (state.path / name).open("rb") as file:
                for extent in extents:
                    if _hash(file, extent.length) != extent.sha256:
                        end = extent.offset + extent.length
                        raise StateError(f"{state.path.name}/{name} is damaged between bytes {extent.offset} and {end}")
        except OSError as error:  # a bad disk, or gone since it was listed
            raise StateError(f"{state.path.name}/{name} cannot be read: {error}") from error


def _hash(file: BinaryIO, length: int) -> str:
    """Of the next ``length`` bytes, or of what there is of them."""
    digest, left = hashlib.sha256(), length
    while left and (data := file.read(min(left, BLOCK))):
        digest.update(data)
        left -= len(data)
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


def prune(folder: Path, newest: int, keep_states: int, keep_weights: int | Literal["all"]) -> None:
    """Of the states up to step ``newest``, just saved, takes the optimizer from all but the last ``keep_states``, and
    removes all but the last ``keep_weights``.

    One beyond ``newest`` is not counted: the run went on from an older one, because this one is damaged. A kill in the
    middle leaves a valid checkpoint with a file too many, or a hidden folder, which the next call takes away.
    """
    remove_leftovers(folder)
    states = [state for state in list_states(folder)[0] if state.step <= newest]
    states.reverse()
    for place, state in enumerate(states):
        if place < keep_states:
            continue
        if keep_weights != "all" and place >= keep_weights:
            shutil.rmtree(state.path.rename(state.path.with_name(f".{state.path.name}.old")))
        else:
            thin(state)


def remove_leftovers(folder: Path) -> None:
    """Takes away what a kill left of a save or a removal: up to a whole state, on a volume that may have no room."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def thin(state: State) -> None:
    """Makes a state a checkpoint: the weights stay, the optimizer goes, the manifest's mention of it first."""
    kept = state.manifest
    files = {name: size for name, size in kept.files.items() if name != OPTIMIZER_FILE}
    extents = tuple(extent for extent in kept.extents if extent.file != OPTIMIZER_FILE)
    if state.resumable:
        write_manifest(state.path, replace(kept, files=files, extents=extents))
    state.optimizer.unlink(missing_ok=True)


def resume_problems(state: State, job: Job) -> list[Problem]:
    """What in the job would make the state meaningless. Everything else may change; the job's new value wins."""
    kept, state_of = state.manifest, f"the state of step {state.step} was trained with"
    pairs: list[tuple[str, object, object]] = [
        ("base", kept.base, job.base),
        ("method", kept.method, job.method),
        # A Paged optimizer keeps the same states elsewhere.
        ("optimizer", kept.optimizer.removeprefix("Paged"), job.optimizer.removeprefix("Paged")),
    ]
    if kept.lora and job.lora:
        pairs += [(f"lora.{key}", getattr(kept.lora, key), getattr(job.lora, key)) for key in Lora.model_fields]
    anew = f" from these weights (base: {state.model}, with vae and text_encoders)" if job.method == "full" else ""
    remedy = f"Put {{}} back, or give the job another name to start anew{anew}"
    return [
        Problem(f"{now} cannot go on: {state_of} {before}", remedy.format(before), key=key)
        for key, before, now in pairs
        if before != now
    ]
