"""What the encoders made of pictures and captions, kept on the volume by content.

What a key stands for is no matter here (bootstrap/wanted.py makes them). The tensors lie in few large shards
(safetensors; network volumes hate small files), named ``<key>.<tensor>``. A shard is written under a temporary name,
flushed, then renamed: a kill loses one of each process at most. The shards' headers are the only index.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from bootstrap.processes import boot_id, pid_space, start_time
from bootstrap.tensor_files import TensorFileError, bytes_of, read_header, read_into, write_tensors
from bootstrap.volume import flush_folder

SHARD_ITEMS = 256
SHARD_BYTES = 256 * 1024 * 1024  # 1000 latents at 512 px, 60 captions of 512 T5 tokens
ABANDONED = 3600.0  # seconds after which another machine's temporary file is taken for a dead process's
_PART = re.compile(r"\.shard-\w+\.(?P<machine>\w+)\.(?P<process>\d+)-(?P<start>\d+)\.part")


# Of a key: name, dtype and shape of each tensor, and its place behind the first.
_Layout = tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]


class Cache:
    """The shards in ``root`` as they are now. Reads are plain reads of a byte range, never mmap.

    Holds no open file: it can be sent to worker processes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: list[Path] = []
        self.notes: list[str] = []  # lines for people
        # Compact, since there may be hundreds of thousands: 300 bytes a key, where entries of their own take 800.
        self._places: dict[str, tuple[Path, int, _Layout]] = {}  # shard, first byte there, what follows it
        self._layouts: dict[_Layout, _Layout] = {}
        for path in sorted(root.glob("shard-*.safetensors")):
            self._index(path)

    def _index(self, path: Path) -> None:
        try:
            header = read_header(path)
        except (TensorFileError, OSError) as error:
            self.damaged.append(path)
            self.notes.append(f"a damaged cache file is ignored, what it held is encoded anew: {error}")
            return
        for key, of_key in groupby(header.tensors.items(), lambda named: named[0].rpartition(".")[0]):
            entries = [(name.rpartition(".")[2], entry) for name, entry in of_key]
            start = min(entry.offset for _, entry in entries)
            layout = tuple((name, entry.dtype, entry.shape, entry.offset - start) for name, entry in entries)
            # In two shards: the later one holds the same.
            self._places[key] = (path, start, self._layouts.setdefault(layout, layout))

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those of ``keys`` that are not here, each once, in their order."""
        return [key for key in dict.fromkeys(keys) if key not in self._places]

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of ``key``, in CPU memory of their own. Raises KeyError for one that is missing."""
        path, start, layout = self._places[key]
        descriptor = os.open(path, os.O_RDONLY)
        try:
            tensors = {}
            for name, dtype, shape, offset in layout:
                tensors[name] = torch.empty(shape, dtype=dtype)
                if tensors[name].numel():
                    read_into(descriptor, bytes_of(tensors[name]), start + offset)
            return tensors
        finally:
            os.close(descriptor)

    def tidy(self) -> None:
        """Deletes damaged shards and what processes that are gone had begun to write."""
        for path in [*self.damaged, *_abandoned(self.root)]:
            path.unlink(missing_ok=True)
        self.damaged.clear()


class ShardWriter:
    """Collects tensors and writes them as shards; use as a context manager.

    On leaving in peace the last, smaller shard is written; on leaving by an exception what was collected is dropped.
    A full shard is written before anything more is collected, so that a kill loses one at most: 67 MB for 256 pictures
    of 512 px, a few percent of the time in which a fast GPU encodes them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tensors: dict[str, torch.Tensor] = {}
        self._keys: list[str] = []
        self._bytes = 0

    def add(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        """Takes CPU or GPU tensors; names must hold no dot. Writes a shard when enough has come together. Raises
        OSError."""
        assert not any("." in name for name in tensors)
        for name, tensor in tensors.items():
            # A copy: a view would keep the whole batch it was cut from.
            self._tensors[f"{key}.{name}"] = tensor.detach().to("cpu", copy=True).contiguous()
            self._bytes += tensor.nbytes
        self._keys.append(key)
        if len(self._keys) >= SHARD_ITEMS or self._bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was collected as one shard, on disk when it returns. Raises OSError."""
        if not self._keys:
            return
        name = f"shard-{hashlib.sha256(' '.join(self._keys).encode()).hexdigest()[:32]}"
        tensors = self._tensors
        self._tensors, self._keys, self._bytes = {}, [], 0
        _write_shard(self.root, name, tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.flush()


def _write_shard(root: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Raises OSError, leaving no temporary file."""
    root.mkdir(parents=True, exist_ok=True)
    part = root / f".{name}.{_writer()}.part"
    try:
        write_tensors(part, tensors)
        part.replace(root / f"{name}.safetensors")
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(root)


def _machine() -> str:
    """This container of this boot: the space in which a process id and its start time mean something."""
    return hashlib.sha256(f"{boot_id()} {pid_space()}".encode()).hexdigest()[:16]


def _writer() -> str:
    return f"{_machine()}.{os.getpid()}-{start_time(os.getpid())}"


def _abandoned(root: Path) -> Sequence[Path]:
    """Temporary files whose writer is gone; another machine's writer is known only by the age of its file."""
    found = []
    for path in root.glob(".shard-*.part"):
        match = _PART.fullmatch(path.name)
        if match is None:
            continue
        if match["machine"] == _machine():
            gone = str(start_time(int(match["process"]))) != match["start"]
        else:
            try:
                gone = time.time() - path.stat().st_mtime > ABANDONED
            except FileNotFoundError:
                continue
        if gone:
            found.append(path)
    return found
