"""Writing and loading states: every process its own rows of the same two files.

A state comes to be in ``.step-000500.part``, is flushed, and is renamed when every process has said that its bytes are
down; only then older ones are pruned. Rank 0 makes the files and gives the verdict, all follow.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from bootstrap.layout import bfl_tensors
from bootstrap.run_file import RunFile
from bootstrap.state import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    VERSION,
    Extent,
    Manifest,
    State,
    folder_name,
    prune,
    read_state,
    write_manifest,
)
from bootstrap.tensor_files import Header, TensorReader, bytes_of, make_header, read_tensors, write_from
from bootstrap.volume import flush_folder
from trainer.adapter import from_kohya, to_kohya
from trainer.model import rows_in_bfl
from trainer.optimizer import Optimizer, Piece, SavedOptimizer
from trainer.trained import Trained
from trainer.world import World

T = TypeVar("T")


class NonFiniteError(ValueError):
    """A tensor with NaN or infinity in it, which no state may hold."""


@dataclass(frozen=True)
class Layout:
    """One file of a state: the bytes it begins with, where each tensor lies, and what this process writes there."""

    name: str
    start: bytes
    header: Header
    pieces: tuple[Piece, ...]


def save_state(
    run: RunFile, world: World, step: int, tensors: list[Trained], optimizer: Optimizer, metadata: Mapping[str, str]
) -> State:
    """Publishes the state after ``step`` updates; entered by every process.

    Raises, on all of them alike, OSError where the disk does not take it and NonFiniteError where a weight is not a
    number; older states are untouched then and nothing half-written is left.
    """
    begun = time.monotonic()
    final = run.folder.states / folder_name(step)
    part = final.with_name(f".{final.name}.part")
    scalars = optimizer.scalars()
    layouts = [
        _lay_out(MODEL_FILE, model_pieces(run, tensors, world), metadata, world),
        _lay_out(OPTIMIZER_FILE, _own(optimizer.pieces(), tensors, world), {}, world),
    ]
    try:
        together(world, lambda: _create(part, layouts) if world.leads else None)
        extents = together(world, lambda: [e for layout in layouts for e in _write_pieces(part / layout.name, layout)])
        every = [extent for some in world.gather(extents) for extent in some]
        manifest = _manifest(run, step, scalars, layouts, every, time.monotonic() - begun)
        together(world, lambda: _publish(part, final, manifest, run) if world.leads else None)
    except BaseException:
        if world.leads:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return State(final, manifest)


def together(world: World, work: Callable[[], T]) -> T:
    """Does a part of the work on every process; raises on all when it failed on one."""
    error: Exception | None = None
    result = None
    try:
        result = work()
    except (OSError, ValueError) as failure:
        error = failure
    world.agree(error)
    return result  # type: ignore[return-value]  # set, or agree has raised


def model_pieces(run: RunFile, tensors: Iterable[Trained], world: World) -> list[Piece]:
    """What this process has of ``model.safetensors``: its rows in BFL's layout, or (rank 0) the whole adapter."""
    if run.job.lora is not None:
        if not world.leads:
            return []
        adapter = to_kohya({t.name: t.weight for t in tensors}, run.job.lora.alpha)
        return [Piece(name, tensor, tuple(tensor.shape)) for name, tensor in adapter.items()]
    shape = run.weights.shape
    sizes = bfl_tensors(shape)
    return [
        Piece(file_name, tensor.weight[rows], sizes[file_name], file_row)
        for tensor in tensors
        for file_name, file_row, rows in rows_in_bfl(tensor.name, tensor.first_row, tensor.weight.shape[0], shape)
    ]


def _own(pieces: list[Piece], tensors: list[Trained], world: World) -> list[Piece]:
    """What a replica has, rank 0 writes alone; of shards each writes its own."""
    return pieces if world.leads or any(tensor.sharded for tensor in tensors) else []


def _lay_out(name: str, pieces: list[Piece], metadata: Mapping[str, str], world: World) -> Layout:
    """Agrees on one file from what every process holds. Rows held twice (a scalar of each) are the lowest rank's."""
    everyone = world.gather([(p.name, p.tensor.dtype, p.shape, p.first_row) for p in pieces if p.tensor.numel()])
    shapes = {name: (dtype, shape) for some in everyone for name, dtype, shape, _ in some}
    taken = {(name, row) for some in everyone[: world.rank] for name, _, _, row in some}
    start, header = make_header(dict(sorted(shapes.items())), metadata)
    mine = tuple(p for p in pieces if p.tensor.numel() and (p.name, p.first_row) not in taken)
    return Layout(name, start, header, mine)


def _create(part: Path, layouts: list[Layout]) -> None:
    """The files at their full size, holes still, with their headers. Preallocating can hang on a network volume."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for layout in layouts:
        with (part / layout.name).open("wb") as file:
            file.write(layout.start)
            file.truncate(layout.header.size)
            file.flush()
            os.fsync(file.fileno())


def _write_pieces(path: Path, layout: Layout) -> list[Extent]:
    """This process's bytes, hashed while they are written, and down when it returns. Rank 0's include the header."""
    extents = []
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for piece in layout.pieces:
            if piece.tensor.is_floating_point() and not bool(torch.isfinite(piece.tensor).all()):
                raise NonFiniteError(f"{piece.name} holds NaN or infinity: nothing is saved")
            entry = layout.header.tensors[piece.name]
            data = bytes_of(piece.tensor.detach().cpu().contiguous().reshape(-1))
            offset = entry.offset + piece.first_row * (entry.row_bytes if entry.shape else 0)
            write_from(descriptor, data, offset)
            extents.append(Extent(layout.name, offset, len(data), hashlib.sha256(data).hexdigest()))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return extents


def _manifest(
    run: RunFile, step: int, scalars: dict[str, object], layouts: list[Layout], extents: list[Extent], seconds: float
) -> Manifest:
    job = run.job
    heads = [Extent(layout.name, 0, len(layout.start), hashlib.sha256(layout.start).hexdigest()) for layout in layouts]
    return Manifest(
        version=VERSION,
        step=step,
        method=job.method,
        base=job.base,
        seed=job.seed,
        images_per_step=job.images_per_step,
        processes=run.plan.processes,
        optimizer=job.optimizer,
        optimizer_scalars=scalars,
        lora=job.lora,
        job_digest=hashlib.sha256(job.model_dump_json().encode()).hexdigest(),
        versions={name: version(name) for name in ("torch", "diffusers", "peft", "bitsandbytes")},
        seconds=round(seconds, 3),
        files={layout.name: layout.header.size for layout in layouts},
        extents=tuple(sorted(heads + extents, key=lambda e: (e.file, e.offset))),
    )


def _publish(part: Path, final: Path, manifest: Manifest, run: RunFile) -> None:
    write_manifest(part, manifest)
    flush_folder(part)
    read_state(part)  # every byte accounted for, sizes right
    if final.exists():  # a leftover that was no valid state, or the run would have gone on from it
        shutil.rmtree(final)
    part.rename(final)
    flush_folder(final.parent)
    prune(final.parent, manifest.step, run.job.save.states, run.job.save.weights)


def load_optimizer(state: State, optimizer: Optimizer) -> None:
    """This process's rows of a state's optimizer. Raises OptimizerStateError where it is another optimizer's."""
    reader = TensorReader(state.optimizer)
    try:
        shapes = {name: entry.shape for name, entry in reader.header.tensors.items()}
        read: Callable[[str, int, int | None], torch.Tensor] = reader.read
        optimizer.load(SavedOptimizer(shapes, read, state.manifest.optimizer_scalars))
    finally:
        reader.close()


@torch.no_grad()
def load_adapter(state: State, tensors: list[Trained], rank: int) -> None:
    """The adapter's weights from a state. Raises AdapterError where it is another adapter."""
    saved = from_kohya(read_tensors(state.model), [tensor.name for tensor in tensors], rank)
    for tensor in tensors:
        tensor.weight.copy_(saved[tensor.name])


def publish_output(state: State, target: Path) -> None:
    """The finished file: the state's own weights under the job's name, a link where the volume allows one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with suppress(FileNotFoundError):
        part.unlink()
    try:
        os.link(state.model, part)
    except OSError:
        with state.model.open("rb") as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy, 16 * 1024 * 1024)
            copy.flush()
            os.fsync(copy.fileno())
    part.replace(target)
    part.unlink(missing_ok=True)  # rename does nothing where both are links to the same file
    flush_folder(target.parent)
