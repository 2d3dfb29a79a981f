"""``python -m trainer.export STATE``: a state's weights as a file for another tool; started by ``fluxpod export``.

A full state's own file is BFL's layout in bf16 already, and an adapter's is kohya's: those need no export but for the
dtype. Tensors pass one by one, so that memory holds one of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bootstrap.flux_shape import FluxShape
from bootstrap.layout import placements, shape_of_bfl
from bootstrap.lora_file import LAYOUTS as LORA_LAYOUTS
from bootstrap.lora_file import read_lora, tensors_of
from bootstrap.outcome import DONE, JOB_WRONG
from bootstrap.state import State, StateError, read_state
from bootstrap.tensor_files import TensorReader, bytes_of, make_header, open_tensors, read_tensors
from bootstrap.volume import flush_folder, write_json

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
FULL_LAYOUTS = ("bfl", "diffusers")
DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"


class ExportError(ValueError):
    """What cannot be written as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    """A tensor of the file to be: how it looks, and how to get it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def export(state: State, target: Path | None, layout: str | None, dtype: str | None, saturate: bool) -> Path:
    """Writes ``target`` (a file; a folder for a full model in diffusers' layout) and gives it. Raises ExportError."""
    lora = state.manifest.lora
    known = LORA_LAYOUTS if lora else FULL_LAYOUTS
    layout = layout or known[0]
    if layout not in known:
        raise ExportError(f"{state.manifest.method} is exported as {' or '.join(known)}, not as {layout}")
    kind = DTYPES[dtype or ("fp32" if lora else "bf16")]
    folder = layout == "diffusers" and lora is None
    target = target or _default_target(state, layout, dtype, folder)
    if os.path.lexists(target):
        raise ExportError(f"{target} is there already: name another place with --to")
    with open_tensors(state.model) as reader:
        metadata = reader.header.metadata | {"fluxpod.layout": layout, "modelspec.date": state.manifest.saved}
        sources = _adapter(state, layout) if lora else _full(reader, layout)
        if folder:
            write(target / DIFFUSERS_FILE, sources, kind, metadata, saturate)
            write_json(target / "config.json", {"_class_name": "FluxTransformer2DModel", **_shape(reader).config()})
        else:
            write(target, sources, kind, metadata, saturate)
    return target


def _default_target(state: State, layout: str, dtype: str | None, folder: bool) -> Path:
    run = state.path.parent.parent
    parts = [run.name, f"step-{state.step:06d}", layout, dtype or ""]
    return run / "output" / ("-".join(filter(None, parts)) + ("" if folder else ".safetensors"))


# ---------------------------------------------------------------- what there is to write


def _shape(reader: TensorReader) -> FluxShape:
    return shape_of_bfl({name: entry.shape for name, entry in reader.header.tensors.items()})


def _full(reader: TensorReader, layout: str) -> dict[str, Source]:
    entries = reader.header.tensors
    if layout == "bfl":
        return {n: Source(e.dtype, e.shape, lambda n=n: reader.read(n)) for n, e in entries.items()}  # type: ignore[misc]
    shape = _shape(reader)
    sizes = shape.tensors()

    def read(name: str) -> torch.Tensor:
        parts = sorted(placements(shape)[name], key=lambda part: part.first)
        return torch.cat([reader.read(p.file_name, p.file_first, p.file_first + p.count) for p in parts])

    some = next(iter(entries.values()))
    return {name: Source(some.dtype, size, lambda name=name: read(name)) for name, size in sizes.items()}  # type: ignore[misc]


def _adapter(state: State, layout: str) -> dict[str, Source]:
    lora, tensors = state.manifest.lora, read_tensors(state.model)
    assert lora is not None
    if layout != lora.layout:
        tensors = tensors_of(read_lora(state.model), "kohya" if layout == "kohya" else "diffusers")
    return {name: Source(t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()}  # type: ignore[misc]


# ---------------------------------------------------------------- writing it


def write(
    target: Path, sources: Mapping[str, Source], dtype: torch.dtype, metadata: Mapping[str, str], saturate: bool
) -> None:
    """One safetensors file, whole or not at all. Raises ExportError where numbers are beyond the dtype's range, unless
    they may ``saturate``."""
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
            raise ExportError(
                f"{sum(beyond.values())} numbers in {len(beyond)} tensors are beyond the range of {dtype}: {some}. "
                "Nothing was written. Take bf16, or --saturate to put the largest number in their place"
            )
    if beyond:
        print(f"{sum(beyond.values())} numbers in {len(beyond)} tensors were put to the largest of {dtype}")


def _kept_as(source: Source, dtype: torch.dtype) -> torch.dtype:
    """8 bits are for matrices alone: norms and biases are few, and their error would count."""
    if not source.dtype.is_floating_point:
        return source.dtype
    return source.dtype if dtype == torch.float8_e4m3fn and len(source.shape) < 2 else dtype


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fluxpod export")
    parser.add_argument("state", type=Path)
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        state = read_state(options.state)
        target = export(state, options.to, options.layout, options.dtype, options.saturate)
    except (StateError, ExportError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return JOB_WRONG
    print(f"wrote {target}")
    return DONE


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=("bfl", "diffusers", "kohya"), help="bfl or kohya by default")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16, and fp32 for an adapter, by default")
    parser.add_argument("--to", type=Path, metavar="PATH", help="a file, or a folder for a full model of diffusers")
    parser.add_argument("--saturate", action="store_true", help="put the largest number for what is beyond the range")


if __name__ == "__main__":
    sys.exit(main())
