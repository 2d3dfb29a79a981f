"""Writing a safetensors file for another tool: tensor by tensor, so that memory holds one of them, in a number format
of choice, whole or not at all."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from tqdm import tqdm

from bootstrap.tensor_files import bytes_of, make_header
from bootstrap.volume import flush_folder
from trainer.file_hashes import fill_places

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}

FIRST_LINE = 5.0  # seconds until the first line of progress, which has the whole time
LINES_EVERY = 30.0


class ExportError(ValueError):
    """What cannot be written as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    """A tensor of the file to be: how it looks, and how to get it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class Progress:
    """How far a long work is, and how long it still takes: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done = what, total, 0
        self.bar = tqdm(desc=what, total=total, unit=" weights", unit_scale=True, disable=None)
        self.begun = time.monotonic()
        self.next = self.begun + FIRST_LINE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def add(self, count: int) -> None:
        self.done += count
        self.bar.update(count)
        now = time.monotonic()
        if self.bar.disable and now >= self.next and self.done < self.total:
            left = (now - self.begun) * (self.total - self.done) / self.done
            print(f"{self.what}: {100 * self.done / self.total:.0f} %, {left / 60:.1f} min left", flush=True)
            self.next = now + LINES_EVERY


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ExportError(f"{target} is there already: name another place with --to")


def held(tensors: Mapping[str, torch.Tensor]) -> dict[str, Source]:
    """Tensors that are in memory."""
    return {name: Source(t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()}  # type: ignore[misc]


def write(
    target: Path, sources: Mapping[str, Source], dtype: torch.dtype | None, metadata: Mapping[str, str], saturate: bool
) -> None:
    """One safetensors file, whole or not at all; without a ``dtype`` each tensor keeps its source's. Raises ExportError
    where numbers are beyond the dtype's range, unless they may ``saturate``."""
    kinds = {name: _kept_as(source, dtype) for name, source in sources.items()}
    start, header = make_header({n: (kinds[n], sources[n].shape) for n in sorted(sources)}, metadata)
    beyond: dict[str, int] = {}
    with _part_of(target) as part, part.open("wb") as file:
        file.write(start)
        for name in header.tensors:
            tensor, count = cast(sources[name].read(), kinds[name])
            if count:
                beyond[name] = count
            file.write(bytes_of(tensor.contiguous()) if tensor.numel() else b"")
        file.flush()
        os.fsync(file.fileno())
        if beyond and not saturate:
            some = ", ".join(f"{name} ({count})" for name, count in list(beyond.items())[:5])
            kind = " and ".join(sorted({str(kinds[name]) for name in beyond}))
            raise ExportError(
                f"{sum(beyond.values())} numbers in {len(beyond)} tensors are beyond the range of {kind}: {some}. "
                "Nothing was written. Take bf16, or --saturate to put the largest number in their place"
            )
        fill_places(part)
    if beyond:
        print(f"{sum(beyond.values())} numbers in {len(beyond)} tensors were put to the largest of their format")


def _kept_as(source: Source, dtype: torch.dtype | None) -> torch.dtype:
    """8 bits are for matrices alone: norms, biases and a DoRA's lengths (in one column) are few, and their error would
    count. A LoRA's alpha, the only scalar, keeps all its bits: it multiplies a whole layer."""
    if dtype is None or not source.dtype.is_floating_point or not source.shape:
        return source.dtype
    column = math.prod(source.shape) == max(source.shape)
    return source.dtype if dtype == torch.float8_e4m3fn and column else dtype


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """The tensor in another dtype, and how many of its numbers are beyond that one's range; they become the largest."""
    if dtype == tensor.dtype or not dtype.is_floating_point:
        return tensor, 0
    most = torch.finfo(dtype).max
    if most >= torch.finfo(tensor.dtype).max:
        return tensor.to(dtype), 0
    tensor = tensor.float()  # 65504, the largest of float16, would be 65536 in bfloat16
    beyond = int((tensor.abs() > most).sum())
    return tensor.clamp(-most, most).to(dtype), beyond


@contextmanager
def _part_of(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        yield part
        part.replace(target)
        flush_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)
