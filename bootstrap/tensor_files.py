"""safetensors files read and written by byte range, in large sequential blocks and never by mmap.

On network volumes mmap is pathologically slow (15 minutes for what a sequential read takes in three), and a rank that
keeps a few rows of a tensor should read a few rows. The format is eight bytes of header length, a JSON header with each
tensor's dtype, shape and offsets, then the bytes: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # the format's own limit
BLOCK = 64 * 1024 * 1024  # bytes of one read or write call
READ = 32 * 1024 * 1024  # bytes read ahead at a time while a model is loaded
BUFFERS = 3  # of that size: one is copied from, two are read into
READERS = 2  # threads: one waits for the disk while the other one's bytes are copied out of the page cache
EIO_WAITS = (1.0, 5.0, 15.0)  # seconds before a read that failed is tried again: network volumes have such moments


class TensorFileError(ValueError):
    """A file that is not whole safetensors; the message names it and what is wrong."""


@dataclass(frozen=True)
class TensorEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    size: int  # of the whole file, bytes


def read_header(path: Path) -> Header:
    """What lies where in ``path``. Raises TensorFileError where it is cut, longer than it says, or another kind."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise TensorFileError(f"{path} is not a whole safetensors file ({size} bytes)")
        try:
            table = json.loads(file.read(length))
            metadata = table.pop("__metadata__", {})
            tensors = {name: _entry(entry, 8 + length) for name, entry in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise TensorFileError(f"{path} has a damaged safetensors header ({error!r})") from error
    end = max((entry.offset + entry.bytes for entry in tensors.values()), default=8 + length)
    if end != size:
        raise TensorFileError(f"{path} should be {end} bytes long and is {size}: it was cut or overwritten")
    return Header(tensors, metadata, size)


def _entry(entry: Mapping[str, Any], start: int) -> TensorEntry:
    """One tensor of a header whose data begins at byte ``start``. Raises ValueError where shape and bytes disagree."""
    begin, end = entry["data_offsets"]
    found = TensorEntry(DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin)
    if begin < 0 or end - begin != found.bytes or any(size < 0 for size in found.shape):
        raise ValueError(f"a tensor of shape {list(found.shape)} in bytes {begin} to {end}")
    return found


def make_header(
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """The first bytes of a file of these tensors, in this order, and where each will lie. Data is 8-byte aligned."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        end = position + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries, offset = {}, start
    for name, (dtype, shape) in shapes.items():
        entries[name] = TensorEntry(dtype, tuple(shape), offset)
        offset += entries[name].bytes
    return len(text).to_bytes(8, "little") + text, Header(entries, dict(metadata), offset)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it, not copied."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def read_into(descriptor: int, target: memoryview, offset: int) -> None:
    """Fills ``target`` from ``offset``. Raises OSError where the file ends before, or cannot be read after retries."""
    done, waits = 0, iter(EIO_WAITS)
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done : done + BLOCK]], offset + done)
        except OSError as error:
            if error.errno != errno.EIO or (wait := next(waits, None)) is None:
                raise
            time.sleep(wait)
            continue
        if count == 0:
            raise OSError(f"the file ends at byte {offset + done}, {len(target) - done} bytes too early")
        done += count


@dataclass(frozen=True)
class Rows:
    """Rows of ``name``, from row ``first`` on, for the contiguous tensor ``target`` on any device, of any dtype."""

    target: torch.Tensor
    name: str
    first: int = 0


@dataclass(frozen=True)
class _Block:
    """Neighbouring bytes of a file that are read in one go."""

    offset: int
    size: int
    parts: tuple[tuple[torch.Tensor, torch.dtype], ...]  # flat pieces of targets, in order, and the file's dtype

    @property
    def ready(self) -> bool:
        """Whether the bytes are the targets' as they lie in the file."""
        return all(target.device.type == "cpu" and target.dtype == dtype for target, dtype in self.parts)

    def read(self, descriptor: int, buffer: torch.Tensor) -> None:
        """Into the targets themselves where they can be read so, else into the buffer."""
        if not self.ready:
            read_into(descriptor, memoryview(buffer.numpy().data)[: self.size], self.offset)
            return
        place = self.offset
        for target, _ in self.parts:
            read_into(descriptor, bytes_of(target), place)
            place += target.nbytes


def load_rows(path: Path, wanted: Iterable[Rows], got_further: Callable[[], None] = lambda: None) -> None:
    """Fills every target from the file, about in the order of its bytes: others read ahead while this thread copies.

    Beside the targets it takes at most BUFFERS x READ bytes of host memory, and nothing is read that is not wanted.
    ``got_further`` is called after each block.
    """
    blocks = _blocks(read_header(path).tensors, wanted)
    on_gpu = any(target.is_cuda for block in blocks for target, _ in block.parts)
    size = min(READ, max((block.size for block in blocks), default=0))
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(BUFFERS)]
    reading: deque[tuple[_Block, torch.Tensor, Future[None]]] = deque()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for block, buffer in zip(blocks, cycle(buffers), strict=False):
            reading.append((block, buffer, pool.submit(block.read, file.fileno(), buffer)))
            if len(reading) == BUFFERS:
                _copy_next(reading)
                got_further()
        while reading:
            _copy_next(reading)
            got_further()


def _blocks(entries: Mapping[str, TensorEntry], wanted: Iterable[Rows]) -> list[_Block]:
    pieces = []
    for rows in wanted:
        entry, flat = entries[rows.name], rows.target.detach().view(-1)
        offset = entry.offset + rows.first * entry.row_bytes
        assert offset + flat.numel() * entry.dtype.itemsize <= entry.offset + entry.bytes, rows.name
        at_once = READ // entry.dtype.itemsize
        pieces += [
            (offset + start * entry.dtype.itemsize, flat[start : start + at_once], entry.dtype)
            for start in range(0, flat.numel(), at_once)
        ]
    blocks: list[_Block] = []
    for offset, target, dtype in sorted(pieces, key=lambda piece: piece[0]):
        last, size = blocks[-1] if blocks else None, target.numel() * dtype.itemsize
        if last and last.offset + last.size == offset and last.size + size <= READ:
            blocks[-1] = _Block(last.offset, last.size + size, (*last.parts, (target, dtype)))
        else:
            blocks.append(_Block(offset, size, ((target, dtype),)))
    return blocks


@torch.no_grad()
def _copy_next(reading: deque[tuple[_Block, torch.Tensor, Future[None]]]) -> None:
    block, buffer, read = reading.popleft()
    read.result()
    if block.ready:
        return
    position = 0
    for target, dtype in block.parts:
        data = buffer[position : position + target.numel() * dtype.itemsize]
        position += data.numel()
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()  # a view of numbers begins at a multiple of their size
        target.copy_(data.view(dtype))


def write_from(descriptor: int, source: memoryview, offset: int) -> None:
    done = 0
    while done < len(source):
        done += os.pwrite(descriptor, source[done : done + BLOCK], offset + done)


class TensorReader:
    """An open safetensors file. ``read`` gives a tensor, or some of its rows, in CPU memory of its own."""

    def __init__(self, path: Path):
        self.path = path
        self.header = read_header(path)
        self._descriptor = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (all by default; a scalar has none) of tensor ``name``."""
        entry = self.header.tensors[name]
        if not entry.shape:
            tensor = torch.empty((), dtype=entry.dtype)
            read_into(self._descriptor, bytes_of(tensor.reshape(1)), entry.offset)
            return tensor
        stop = entry.shape[0] if stop is None else stop
        assert 0 <= start <= stop <= entry.shape[0], (name, start, stop, entry.shape)
        tensor = torch.empty((stop - start, *entry.shape[1:]), dtype=entry.dtype)
        if tensor.numel():
            read_into(self._descriptor, bytes_of(tensor), entry.offset + start * entry.row_bytes)
        return tensor


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorReader]:
    reader = TensorReader(path)
    try:
        yield reader
    finally:
        reader.close()


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Every tensor of a file, in memory of its own on ``device``, in the order in which they lie there."""
    entries = read_header(path).tensors
    names = sorted(entries, key=lambda name: entries[name].offset)
    tensors = {name: torch.empty(entries[name].shape, dtype=entries[name].dtype, device=device) for name in names}
    load_rows(path, [Rows(tensor, name) for name, tensor in tensors.items()])
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes and flushes ``path`` itself, under a name that nobody trusts yet: the caller renames."""
    start, header = make_header({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, metadata or {})
    with path.open("wb") as file:
        file.write(start)
        for name, tensor in tensors.items():
            assert file.tell() == header.tensors[name].offset
            if tensor.numel():
                file.write(bytes_of(tensor.detach().cpu().contiguous()))
        file.flush()
        os.fsync(file.fileno())


def rename_tensors(
    source: Path, target: Path, shapes: Mapping[str, tuple[int, ...]], new_names: Mapping[str, str]
) -> None:
    """Writes and flushes the tensors of ``source`` once more, under new names and in the given shapes of the same size.

    ``shapes`` has the new names. The numbers are copied as they are.
    """
    header = read_header(source)
    order = sorted(header.tensors, key=lambda name: header.tensors[name].offset)
    named = {new_names.get(name, name): header.tensors[name] for name in order}
    start, made = make_header({name: (entry.dtype, shapes[name]) for name, entry in named.items()}, {})
    buffer = memoryview(bytearray(READ))
    with source.open("rb", buffering=0) as old, target.open("wb") as file:
        file.write(start)
        for name, entry in named.items():
            assert made.tensors[name].bytes == entry.bytes
            for done in range(0, entry.bytes, READ):
                piece = buffer[: min(READ, entry.bytes - done)]
                read_into(old.fileno(), piece, entry.offset + done)
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
