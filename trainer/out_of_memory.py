"""A GPU's memory that ran out: how it is told from other errors, measured, and, where less would do, gone around."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from diffusers import AutoencoderKL

from bootstrap.estimate import TILE
from bootstrap.gpus import GIB
from bootstrap.shortage import Shortage

log = logging.getLogger(__name__)

# Torch's allocator raises an error of its own; libraries that allocate beside it, and compilers, have their words.
_WORDS = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|"
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED|Cuda failure 2 'out of memory'"
)
_SIZE = r"([\d.]+) (KiB|MiB|GiB|TiB|bytes)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40}

T = TypeVar("T")
R = TypeVar("R")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or one that led to it, says that a GPU's memory ran out."""
    return any(isinstance(each, torch.OutOfMemoryError) or _WORDS.search(str(each)) for each in _led_to(error))


def _led_to(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def measure(error: BaseException, during: str, process: int) -> Shortage:
    """What ran out and how far it went: by torch's words, which tell of the moment, else by the allocator now."""
    text = next((str(each) for each in _led_to(error) if _WORDS.search(str(each))), str(error))
    free = total = allocated = reserved = 0
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # of a card that answers nothing any more: the error itself must still be told
            free, total = torch.cuda.mem_get_info()
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    outside = max(0, total - free - reserved)  # what lies outside the allocator does not change while it unwinds
    allowed = _bytes(rf"{_SIZE} allowed", text)
    return Shortage(
        during,
        process,
        asked=_bytes(rf"Tried to allocate {_SIZE}", text) or 0,
        held=_bytes(rf"{_SIZE} is allocated by PyTorch", text) or allocated,
        spare=_bytes(rf"{_SIZE} is reserved by PyTorch", text) or reserved - allocated,
        outside=outside,
        total=min(total, allowed + outside) if allowed else total,
    )


def _bytes(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def in_parts_that_fit(work: Callable[[Sequence[T]], list[R]], things: Sequence[T]) -> list[R]:
    """``work`` of all things at once, or of halves of them, and halves of these, where the GPU's memory does not do.

    Raises what ``work`` does for a single one.
    """
    try:
        return work(things)
    except torch.OutOfMemoryError:
        if len(things) == 1:
            raise
    # Not within the handler: what the attempt held lives as long as its error.
    torch.cuda.empty_cache()
    half = len(things) // 2
    return in_parts_that_fit(work, things[:half]) + in_parts_that_fit(work, things[half:])


def decode_in_tiles(vae: AutoencoderKL) -> None:
    """Tiles of TILE pixels from now on: the memory of one, and colours that may differ a little from tile to tile."""
    vae.enable_tiling()
    vae.tile_sample_min_size = TILE
    vae.tile_latent_min_size = TILE // 2 ** (len(vae.config.block_out_channels) - 1)


def decode_patiently(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """The pixels of latents: whole as long as that fits; the first time it does not, and from then on, in tiles."""
    try:
        return vae.decode(latents, return_dict=False)[0]
    except torch.OutOfMemoryError as error:
        if vae.use_tiling or min(latents.shape[-2:]) * 8 <= TILE:
            raise
        log.warning("out of GPU memory while decoding a sample: it is decoded in tiles (%s)", error)
    torch.cuda.empty_cache()
    decode_in_tiles(vae)
    return vae.decode(latents, return_dict=False)[0]
