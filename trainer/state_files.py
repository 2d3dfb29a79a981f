"""The bytes of a state's files: what each process has of them, and how they get to the disk.

Every process writes its own rows of the same two files, several runs of bytes at a time, each hashed by the thread that
writes it. On a volume that does not take several writers in one file the rows go to rank 0, which writes the same files
from their first byte to their last.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import numpy as np
import torch
import torch.distributed as dist

from bootstrap.layout import bfl_tensors
from bootstrap.lora_file import tensors_of
from bootstrap.run_file import RunFile
from bootstrap.state import Extent
from bootstrap.tensor_files import Header, bytes_of, make_header, write_from
from bootstrap.volume import own_parts
from trainer.adapter_files import adapter_in
from trainer.model import rows_in_bfl
from trainer.optimizer import Piece
from trainer.pinned import aligned_bytes
from trainer.trained import Trained
from trainer.world import World

RUN = 32 * 1024 * 1024  # bytes of one extent: written and hashed by one thread, held once more on their way from a GPU
COPIED = 8 * 1024 * 1024  # bytes that a thread copies at a time where a state is copied to the host
MOST_COPIERS = 16  # threads: one that touches fresh memory gets through 0.3 to 2 GB/s on a virtual machine
MOST_WRITERS = 8  # threads of one process; SHA-256 takes 0.5 to 2 GB/s of one core
TRIES = 3  # of one write: network volumes answer large ones with EIO now and then
PAUSE = 1.0  # seconds between them
PROBE_RUNS = 8  # of each process, in turn with the others'
PROBE_BYTES = 70_001  # of one: no page, no block, no round number
CANNOT = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EBUSY, errno.ETXTBSY})


class NonFiniteError(ValueError):
    """A tensor with NaN or infinity in it, which no state may hold."""


class DiscardedError(Exception):
    """A save was given up on the way."""


@dataclass(frozen=True)
class Span:
    """A run of bytes of a file, and the elements of a flat tensor that they are."""

    offset: int
    tensor: torch.Tensor  # one-dimensional

    @property
    def length(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class Layout:
    """One file of a state: the bytes it begins with, where each tensor lies, and what this process has of it."""

    name: str
    start: bytes
    header: Header
    pieces: tuple[Piece, ...]

    def spans(self) -> list[Span]:
        """This process's bytes in runs that one thread writes at a time, in the file's order."""
        spans = []
        for piece in self.pieces:
            entry = self.header.tensors[piece.name]
            offset = entry.offset + piece.first_row * (entry.row_bytes if entry.shape else 0)
            flat = piece.tensor.detach().reshape(-1)
            for part in flat.split(max(1, RUN // flat.element_size())):
                spans.append(Span(offset, part))
                offset += spans[-1].length
        return sorted(spans, key=lambda span: span.offset)

    @property
    def bytes(self) -> int:
        return sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.pieces)

    def copied(self, copiers: int) -> Layout:
        """The same with tensors in host memory of their own, which training does not change. Raises OSError where the
        host has not as much.

        The time goes into the first touch of that memory, so several threads touch it, in large pages.
        """
        slab, place, pieces = fresh_memory(sum(aligned_bytes(piece.tensor) for piece in self.pieces)), 0, []
        for piece in self.pieces:
            own = slab[place : place + piece.tensor.nbytes].view(piece.tensor.dtype).view(piece.tensor.shape)
            pieces.append(replace(piece, tensor=own))
            place += aligned_bytes(piece.tensor)
        runs = [
            (source, target)
            for old, new in zip(self.pieces, pieces, strict=True)
            for source, target in zip(*(_as_bytes(each.tensor).split(COPIED) for each in (old, new)), strict=True)
        ]
        staging = Staging((source for source, _ in runs), copiers)

        def copy(run: tuple[torch.Tensor, torch.Tensor]) -> None:
            with staging.on_host(run[0]) as data:
                np.copyto(run[1].numpy(), data.numpy())  # one thread's work; torch would start a pool in each

        with ThreadPoolExecutor(copiers) as pool:
            for _ in pool.map(copy, runs):
                pass
        return replace(self, pieces=tuple(pieces))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def fresh_memory(size: int) -> torch.Tensor:
    """``size`` bytes of the host that are given back with the last tensor that shares them. Raises OSError.

    In pages of 2 MiB, where the system has them: two threads fill them at 3 GB/s, pages of 4 KiB at 1 to 2.
    """
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Staging:
    """Pinned buffers, one for each thread: through them a GPU's bytes come to the host at the speed of the link, where
    a copy to other memory goes at that of one core. Torch keeps them for the next save."""

    def __init__(self, runs: Iterable[torch.Tensor], threads: int):
        size = max((run.nbytes for run in runs if run.is_cuda), default=0)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(threads if size else 0):
            self._free.put(torch.empty(size, dtype=torch.uint8, pin_memory=True))

    @contextmanager
    def on_host(self, run: torch.Tensor) -> Iterator[torch.Tensor]:
        """A flat tensor's bytes, where they are, or, until the end of the ``with``, in a buffer."""
        if not run.is_cuda:
            yield _as_bytes(run)
            return
        buffer = self._free.get()
        try:
            yield buffer[: run.nbytes].copy_(_as_bytes(run))
        finally:
            self._free.put(buffer)


def model_pieces(run: RunFile, tensors: Iterable[Trained], world: World) -> list[Piece]:
    """What this process has of ``model.safetensors``: its rows in BFL's layout, or (rank 0) the whole adapter."""
    if run.job.lora is not None:
        if not world.leads:
            return []
        adapter = adapter_in({t.name: t.weight for t in tensors}, run.job.lora)
        file = tensors_of(adapter, run.job.lora.layout)
        return [Piece(name, tensor, tuple(tensor.shape)) for name, tensor in file.items()]
    shape = run.weights.shape
    sizes = bfl_tensors(shape)
    return [
        Piece(file_name, tensor.weight[rows], sizes[file_name], file_row)
        for tensor in tensors
        for file_name, file_row, rows in rows_in_bfl(tensor.name, tensor.first_row, tensor.weight.shape[0], shape)
    ]


def lay_out(name: str, pieces: Iterable[Piece], metadata: Mapping[str, str], world: World) -> Layout:
    """Agrees on one file from what every process holds. Rows held twice (a scalar of each) are the lowest rank's."""
    own = [piece for piece in pieces if piece.tensor.numel()]
    everyone = world.gather([(p.name, p.tensor.dtype, p.shape, p.first_row) for p in own])
    shapes = {name: (dtype, shape) for some in everyone for name, dtype, shape, _ in some}
    taken = {(name, row) for some in everyone[: world.rank] for name, _, _, row in some}
    start, header = make_header(dict(sorted(shapes.items())), metadata)
    return Layout(name, start, header, tuple(p for p in own if (p.name, p.first_row) not in taken))


@torch.no_grad()
def refuse_non_finite(pieces: Iterable[Piece]) -> None:
    """Raises NonFiniteError naming a tensor of this process that is no number. Each device is asked once: some of a
    model's weights and states may lie on the host."""
    by_device: dict[torch.device, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.tensor.is_floating_point():
            by_device[piece.tensor.device].append(piece)
    for some in by_device.values():
        # A sum is one pass without a mask; only where it is no number is every one looked at.
        sums = torch.stack([piece.tensor.sum(dtype=torch.float32) for piece in some]).tolist()
        for piece, total in zip(some, sums, strict=True):
            if total - total != 0 and not bool(torch.isfinite(piece.tensor).all()):
                raise NonFiniteError(f"{piece.name} holds NaN or infinity: nothing is saved")


def begin_folder(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def create_files(part: Path, layouts: Iterable[Layout]) -> None:
    """The files at their full size, holes still, with their headers. Preallocating can hang on a network volume."""
    for layout in layouts:
        with (part / layout.name).open("wb") as file:
            file.write(layout.start)
            file.truncate(layout.header.size)
            file.flush()
            os.fsync(file.fileno())


# ---------------------------------------------------------------- every process its rows


def write_spans(path: Path, layout: Layout, writers: int, given_up: Event, wrote: Callable[[], None]) -> list[Extent]:
    """This process's bytes, hashed while they are written, and down when it returns. Raises OSError, and DiscardedError
    soon after ``given_up`` is set. ``wrote`` is told of each run, by the thread that wrote it."""
    spans = layout.spans()
    staging = Staging((span.tensor for span in spans), writers)
    descriptor = os.open(path, os.O_WRONLY)

    def write(span: Span) -> Extent:
        if given_up.is_set():
            raise DiscardedError
        with staging.on_host(span.tensor) as run:
            data = bytes_of(run)
            write_patiently(descriptor, data, span.offset)
            if len(data) == RUN:
                # To the disk now, while other threads hash: left to the end, the disk would idle till then.
                os.fdatasync(descriptor)
            wrote()
            return Extent(layout.name, span.offset, len(data), hashlib.sha256(data).hexdigest())

    try:
        with ThreadPoolExecutor(writers, thread_name_prefix="save") as pool:
            waiting = [pool.submit(write, span) for span in spans]
            try:
                extents = [each.result() for each in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return extents


def write_patiently(descriptor: int, data: memoryview, offset: int) -> None:
    """Like ``write_from``, and once more where the volume answers with EIO. Raises OSError."""
    for left in reversed(range(TRIES)):
        try:
            write_from(descriptor, data, offset)
            break
        except OSError as error:
            if error.errno != errno.EIO or left == 0:
                raise
            time.sleep(PAUSE)


# ---------------------------------------------------------------- rank 0 for all


def stream_to_lead(path: Path, layout: Layout, world: World) -> list[Extent]:
    """Sends the rows to rank 0, which writes the file from its first byte to its last; gives rank 0 all the extents.

    Raises OSError on rank 0, after everyone has sent everything: nobody is left waiting.
    """
    spans = layout.spans()
    told = world.gather([(span.offset, span.length) for span in spans])
    order = sorted((offset, length, rank) for rank, some in enumerate(told) for offset, length in some)
    arriving = _arriving(spans, order, world)
    try:
        return _write_in_order(path, layout, arriving) if world.leads else []
    finally:
        for _ in arriving:
            pass


def _arriving(
    spans: Sequence[Span], order: Sequence[tuple[int, int, int]], world: World
) -> Iterator[tuple[int, torch.Tensor]]:
    """On rank 0 every run of bytes of the file, in its order; elsewhere nothing, this process's runs being sent."""
    own = iter(spans)
    for offset, length, rank in order:
        world.place.move()
        if rank == world.rank:
            data = next(own).tensor.cpu().contiguous().view(torch.uint8)
            if world.leads:
                yield offset, data
            else:
                dist.send(data, 0, group=world.control)
        elif world.leads:
            data = torch.empty(length, dtype=torch.uint8)
            dist.recv(data, rank, group=world.control)
            yield offset, data


def _write_in_order(path: Path, layout: Layout, arriving: Iterable[tuple[int, torch.Tensor]]) -> list[Extent]:
    extents = []
    with path.open("wb") as file:
        file.write(layout.start)
        for offset, data in arriving:
            assert file.tell() == offset
            file.write(bytes_of(data))
            extents.append(Extent(layout.name, offset, data.numel(), hashlib.sha256(bytes_of(data)).hexdigest()))
        file.flush()
        os.fsync(file.fileno())
    return extents


def takes_many_writers(folder: Path, world: World) -> bool:
    """Tries whether the volume keeps what every process writes into one file at once; entered by all.

    Only bytes that came back wrong, or a volume that says it cannot, count: what else goes wrong here goes wrong in the
    save as well, which tells it.
    """
    path = folder / f".writers.{world.from_lead(own_parts())}.part"
    blocks = [(number, number % world.size) for number in range(PROBE_RUNS * world.size)]
    if world.leads:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(PROBE_BYTES * len(blocks))
    world.meet()
    able = True
    try:
        _write_probe(path, [number for number, rank in blocks if rank == world.rank])
    except OSError as error:
        able = error.errno not in CANNOT
    every = all(world.gather(able))
    if world.leads:
        with suppress(OSError):
            data = path.read_bytes()
            parts = [data[n * PROBE_BYTES : (n + 1) * PROBE_BYTES] for n, _ in blocks]
            every = every and all(part == _probe(n) for n, part in enumerate(parts))
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return world.from_lead(every)


def _write_probe(path: Path, numbers: Sequence[int]) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda n: os.pwrite(descriptor, _probe(n), n * PROBE_BYTES), numbers))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _probe(number: int) -> bytes:
    return bytes([1 + number % 250]) * PROBE_BYTES
