"""Saving states and loading them.

A state comes to be in ``.step-000500.part``, is flushed, and is renamed when every process has said that its bytes are
down; only then older ones are pruned. Rank 0 makes the files and gives the verdict, all follow. Where host memory has
room for a copy, training goes on while threads write it, and the state is published between two later steps.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fcntl import ioctl
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import torch

from bootstrap.estimate import VOLUME_SPEED
from bootstrap.pod import read_free_memory
from bootstrap.run_file import RunFile
from bootstrap.state import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    VERSION,
    Extent,
    Manifest,
    State,
    StateError,
    Validated,
    folder_name,
    is_ours,
    prune,
    read_state,
    set_aside,
    write_manifest,
)
from bootstrap.tensor_files import Rows, load_rows, open_tensors
from bootstrap.volume import flush_folder
from trainer.adapter_files import KEPT, Expected, kept_pieces
from trainer.ema import PREFIX as EMA_PREFIX
from trainer.ema import Ema, load_ema
from trainer.file_hashes import fill_places
from trainer.optimizer import Optimizer, Piece, SavedOptimizer
from trainer.state_files import (
    MOST_COPIERS,
    MOST_WRITERS,
    DiscardedError,
    Layout,
    begin_folder,
    create_files,
    lay_out,
    model_pieces,
    refuse_non_finite,
    stream_to_lead,
    takes_many_writers,
    write_spans,
)
from trainer.trained import Trained
from trainer.world import World

log = logging.getLogger(__name__)
T = TypeVar("T")

MEMORY_LEFT = 4 << 30  # bytes of host memory that a copy must leave free: samples, compiling, page cache
COPY_SPEED = 10e9  # bytes/s from the devices to host memory that is not pinned
FICLONE = 0x40049409  # ioctl of Linux: one file shares the other's blocks
COPIED_AT_ONCE = 16 << 20  # bytes


@dataclass
class Writing:
    """A state on its way to the disk."""

    step: int
    part: Path
    layouts: list[Layout]
    scalars: dict[str, object]
    begun: float
    wrote: Callable[[], None]  # told of each run of bytes that is on the disk
    validated: Validated | None = None
    expected: Expected | None = None  # what the file of an adapter must hold
    ema: dict[str, object] | None = None  # what the manifest says of the average
    copying: float = 0.0  # seconds that its copy to the host took
    stood_still: float = 0.0  # seconds that training waited for it
    ended: float | None = None  # when this process's last byte was on the disk; None where process 0 writes for all
    extents: list[Extent] = field(default_factory=list)
    failure: Exception | None = None
    given_up: Event = field(default_factory=Event)
    thread: Thread | None = None  # None: nothing goes on in the background

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def finish_adapter(self) -> None:
        """Once all of an adapter's file is there, which one process writes: puts its hashes into its header, and reads
        it back. Raises OSError where it is not what was trained."""
        if self.expected:
            model, *others = self.layouts
            self.layouts = [replace(model, start=fill_places(self.part / model.name)), *others]
            self.wrote()
            self.expected.check(self.part / model.name)
            self.wrote()

    def write(self, writers: int) -> None:
        """This process's bytes; what goes wrong is kept for ``publish``."""
        try:
            for layout in self.layouts:
                self.extents += write_spans(self.part / layout.name, layout, writers, self.given_up, self.wrote)
            self.finish_adapter()
        except (OSError, ValueError, DiscardedError) as failure:
            self.failure = failure
        self.ended = time.monotonic()


class Saver:
    """Saves one state at a time. Every method is entered by all processes together."""

    def __init__(self, run: RunFile, world: World, free_memory: Callable[[], int] = read_free_memory):
        self.run, self.world, self.free_memory = run, world, free_memory
        self.writing: Writing | None = None
        self.writers = min(MOST_WRITERS, 2 * run.plan.threads + 1)  # more than CPUs: half of them wait for the disk
        self.copiers = min(MOST_COPIERS, max(2, run.plan.threads))  # training stands still: the CPUs are free
        self.copy_pays = True  # whether the last state was not written faster than it was copied
        self.stood_still = 0.0  # seconds that training waited for the last state
        self.many_writers: bool | None = None  # whether the volume takes them; not tried yet

    @property
    def busy(self) -> bool:
        """Whether this process is still writing; no process need be asked to know it."""
        return self.writing is not None and self.writing.busy

    def begin(
        self,
        step: int,
        tensors: list[Trained],
        optimizer: Optimizer,
        metadata: Mapping[str, str],
        validated: Validated | None = None,
        ema: Ema | None = None,
    ) -> None:
        """Takes the state after ``step`` updates: copied, and being written, or written when it returns. With ``ema``
        its weights are the average.

        Raises, on all processes alike, NonFiniteError where a weight is no number, and OSError; nothing half-written is
        left then.
        """
        assert self.writing is None
        if ema is None:
            self._begin(step, tensors, optimizer.pieces, optimizer.scalars(), metadata, validated)
            return
        # The live weights first: those bits that go into the state beside the average are no numbers to look at.
        live = [Piece(t.name, t.weight, t.shape, t.first_row) for t in tensors]
        together(self.world, lambda: refuse_non_finite(live))

        def pieces() -> list[Piece]:
            return [*optimizer.pieces(), *ema.pieces()]

        with ema.shown():
            self._begin(step, tensors, pieces, optimizer.scalars(), metadata, validated, ema.record())

    def _begin(
        self,
        step: int,
        tensors: list[Trained],
        pieces: Callable[[], list[Piece]],
        scalars: dict[str, object],
        metadata: Mapping[str, str],
        validated: Validated | None,
        ema: dict[str, object] | None = None,
    ) -> None:
        begun, world = time.monotonic(), self.world
        sharded = any(tensor.sharded for tensor in tensors)
        optimizers = pieces() if world.leads or sharded else []  # what all have, rank 0 writes
        lora = self.run.job.lora if world.leads else None
        kept = kept_pieces(tensors, lora) if lora else []
        layouts = [
            lay_out(MODEL_FILE, model_pieces(self.run, tensors, world), metadata, world),
            lay_out(OPTIMIZER_FILE, [*optimizers, *kept], {}, world),
        ]
        together(world, lambda: refuse_non_finite(piece for layout in layouts for piece in layout.pieces))
        part = self.run.folder.states / f".{folder_name(step)}.part"
        self.writing = writing = Writing(step, part, layouts, scalars, begun, world.place.move, validated, ema=ema)
        writing.expected = Expected.of(tensors, lora) if lora else None
        with self._discarding():
            together(world, lambda: begin_folder(part) if world.leads else None)
            if self.many_writers is None:
                self.many_writers = takes_many_writers(part.parent, world)
                if not self.many_writers and world.leads:
                    log.info("this volume does not take several writers in one file: process 0 writes for all")
            if not self.many_writers:
                for each in layouts:
                    writing.extents += together(world, partial(stream_to_lead, part / each.name, each, world))
                together(world, writing.finish_adapter)
            else:
                together(world, lambda: create_files(part, layouts) if world.leads else None)
                self._write(writing)
        writing.stood_still = time.monotonic() - begun

    def _write(self, writing: Writing) -> None:
        """In the background where there is room for a copy, else now. A copy that took longer than writing leaves the
        next state to be written at once; the one after that tries again, on memory that may be had faster then."""
        if not self._can_copy(writing.layouts):
            writing.write(self.writers)
            return
        begun = time.monotonic()
        writing.layouts = together(self.world, lambda: [each.copied(self.copiers) for each in writing.layouts])
        writing.copying = time.monotonic() - begun
        writing.thread = Thread(target=writing.write, args=(self.writers,), name="save", daemon=True)
        writing.thread.start()

    def _can_copy(self, layouts: Iterable[Layout]) -> bool:
        need = sum(self.world.gather(sum(layout.bytes for layout in layouts)))
        return self.world.from_lead(self.copy_pays and need + MEMORY_LEFT <= self.free_memory())

    def guess(self) -> float:
        """Seconds that training will wait for a state, before any was saved: while it is copied to the host, or, where
        there is no room for it, while it is written."""
        size = self.run.plan.state_bytes
        room = size + MEMORY_LEFT <= self.free_memory()
        return size / (COPY_SPEED if room else VOLUME_SPEED)

    def publish(self) -> State:
        """Waits for what is being written and makes it a state. Raises as ``begin`` does."""
        assert self.writing is not None
        writing, world, begun = self.writing, self.world, time.monotonic()
        if writing.thread:
            writing.thread.join()
        with self._discarding():
            together(world, lambda: _raise(writing.failure))
            every = [extent for some in world.gather(writing.extents) for extent in some]
            manifest = self._manifest(writing, every)
            final = self.run.folder.states / folder_name(writing.step)
            together(world, lambda: _publish(writing.part, final, manifest, self.run) if world.leads else None)
        self.writing = None
        self.copy_pays = 2 * writing.copying <= manifest.seconds
        self.stood_still = stood_still = writing.stood_still + time.monotonic() - begun
        size = sum(manifest.files.values()) / 1e9
        log.info(
            "saved the state of step %d in %.1f s (%.2f GB); training stood still for %.1f s%s",
            writing.step,
            manifest.seconds,
            size,
            stood_still,
            ""
            if self.copy_pays
            else "; copying it took longer than writing, so the next is written while training waits",
        )
        return State(final, manifest)

    def discard(self) -> None:
        """Gives up what is being written."""
        if self.writing is None:
            return
        self.writing.given_up.set()
        if self.writing.thread:
            self.writing.thread.join()
        self.world.meet()  # nobody writes any more
        if self.world.leads:
            shutil.rmtree(self.writing.part, ignore_errors=True)
        self.writing = None

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """What fails, fails on all processes alike, and leaves nothing half-written."""
        try:
            yield
        except (OSError, ValueError, DiscardedError):
            self.discard()
            raise

    def _manifest(self, writing: Writing, extents: list[Extent]) -> Manifest:
        job, layouts = self.run.job, writing.layouts
        heads = [Extent(each.name, 0, len(each.start), hashlib.sha256(each.start).hexdigest()) for each in layouts]
        return Manifest(
            version=VERSION,
            step=writing.step,
            method=job.method,
            base=job.base,
            seed=job.seed,
            images_per_step=job.images_per_step,
            processes=self.run.plan.processes,
            optimizer=job.optimizer,
            optimizer_scalars=writing.scalars,
            lora=job.lora,
            job_digest=job_digest(self.run),
            versions={name: version(name) for name in ("torch", "diffusers", "peft", "bitsandbytes")},
            seconds=round((writing.ended or time.monotonic()) - writing.begun, 3),
            files={layout.name: layout.header.size for layout in layouts},
            extents=tuple(sorted(heads + extents, key=lambda e: (e.file, e.offset))),
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizer_args=job.optimizer_args,
            validation=writing.validated,
            assistant_lora=job.assistant_lora,
            resume_from=job.resume_from,
            ema=writing.ema,
        )


def job_digest(run: RunFile) -> str:
    return hashlib.sha256(run.job.model_dump_json().encode()).hexdigest()


def together(world: World, work: Callable[[], T]) -> T:
    """Does a part of the work on every process; raises on all when it failed on one."""
    error: Exception | None = None
    result = None
    try:
        result = work()
    except (OSError, ValueError, DiscardedError) as failure:
        error = failure
    world.agree(error)
    return result  # type: ignore[return-value]  # set, or agree has raised


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _publish(part: Path, final: Path, manifest: Manifest, run: RunFile) -> None:
    write_manifest(part, manifest)
    flush_folder(part)
    _must_be_whole(part)
    if is_ours(final):  # damaged, or the run would have gone on from it
        final.rename(final.with_name(f".{final.name}.old"))
    elif moved := set_aside([final], run.folder.root):
        log.warning("something that is no state was in the place of %s: it lies in %s now", final.name, moved)
    _rename(part, final)
    flush_folder(final.parent)
    try:
        keep_best = run.job.validation is not None and run.job.validation.keeps_best
        prune(final.parent, manifest.step, run.job.save, keep_best)
    except OSError as error:
        log.warning("older states could not be removed: %s. The new one stands; the next save tries again.", error)


def _rename(part: Path, final: Path) -> None:
    """Raises OSError where the state is not in its place afterwards, whatever the volume says: network volumes have
    lost a rename that they said was done, and have done one that they said had failed."""
    try:
        part.rename(final)
    except OSError:
        with suppress(StateError):
            read_state(final)
            return
        raise
    _must_be_whole(final)


def _must_be_whole(folder: Path) -> None:
    """Every byte accounted for, sizes right. Raises OSError: what was just written is not there, which is the volume's
    doing."""
    try:
        read_state(folder)
    except StateError as error:
        raise OSError(errno.EIO, f"the volume has lost what was written: {error}") from error


# ---------------------------------------------------------------- going on from one


def load_optimizer(state: State, optimizer: Optimizer, got_further: Callable[[], None] = lambda: None) -> None:
    """This process's rows of a state's optimizer. Raises OptimizerStateError where it is another optimizer's.

    ``got_further`` is called for each run of rows: 90 GB from a slow volume take more than half an hour.
    """
    with open_tensors(state.optimizer) as reader:
        entries = {n: e for n, e in reader.header.tensors.items() if not n.startswith((KEPT, EMA_PREFIX))}

        def read(name: str, start: int, stop: int | None) -> torch.Tensor:
            got_further()
            return reader.read(name, start, stop)

        def fill(rows: Iterable[Rows]) -> None:
            load_rows(state.optimizer, rows, got_further)

        shapes = {name: entry.shape for name, entry in entries.items()}
        dtypes = {name: entry.dtype for name, entry in entries.items()}
        optimizer.load(SavedOptimizer(shapes, dtypes, read, fill, state.manifest.optimizer_scalars))


def load_average(state: State, tensors: list[Trained], ema: Ema | None) -> None:
    """Gives the weights, which are the average where the state has one, back their live values, and ``ema`` its
    average; without one in the state it begins with these weights."""
    if state.manifest.ema is None:
        return
    with open_tensors(state.optimizer) as reader:
        load_ema(reader.read, tensors, ema)
    if ema:
        ema.begun = int(state.manifest.ema["begun"])


# ---------------------------------------------------------------- the finished file


def publish_output(state: State, target: Path, progressed: Callable[[], None] = lambda: None) -> None:
    """The finished file: the state's own weights under the job's name, a link or shared blocks where the volume allows
    either, else a copy, which tells after each block that it gets further."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with suppress(FileNotFoundError):
        part.unlink()
    try:
        os.link(state.model, part)
    except OSError:
        with state.model.open("rb") as source, part.open("wb") as copy:
            try:
                ioctl(copy.fileno(), FICLONE, source.fileno())
            except OSError:
                while block := source.read(COPIED_AT_ONCE):
                    copy.write(block)
                    progressed()
            copy.flush()
            os.fsync(copy.fileno())
    part.replace(target)
    part.unlink(missing_ok=True)  # rename does nothing where both are links to the same file
    flush_folder(target.parent)
