"""A whole transformer on the disk, in any layout, tensor by tensor: what exporting, merging and extracting read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bootstrap.base_files import compare, layout_of, read_entries, shape_of_file, shards_of, without_prefix
from bootstrap.flux_shape import FluxShape
from bootstrap.layout import Rows, bfl_tensors, placements
from bootstrap.state import MODEL_FILE
from bootstrap.tensor_files import TensorReader, open_tensors
from bootstrap.volume import write_json
from trainer.tensor_output import Source, write

ModelLayout = Literal["bfl", "diffusers"]
MODEL_LAYOUTS: tuple[ModelLayout, ...] = ("bfl", "diffusers")
DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"
# 8 bits are enough to merge into and to compare with, if they are all that there is.
TYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")

Read = Callable[[str], torch.Tensor]  # a tensor by diffusers' name


@dataclass(frozen=True)
class WholeModel:
    """``dtypes`` and what ``read`` takes are by diffusers' names, whatever the file's are."""

    path: Path
    shape: FluxShape
    dtypes: Mapping[str, torch.dtype]
    read: Read
    metadata: Mapping[str, str]

    def laid_out(self, layout: ModelLayout, read: Read | None = None) -> dict[str, Source]:
        """The tensors of a file in that layout; ``read`` gives others in the place of this model's."""
        read = read or self.read
        if layout == "diffusers":
            sizes = self.shape.tensors()
            return {n: Source(self.dtypes[n], sizes[n], lambda n=n: read(n)) for n in sizes}  # type: ignore[misc]
        parts: dict[str, list[tuple[str, Rows]]] = defaultdict(list)
        for name, placement in placements(self.shape).items():
            for rows in placement:
                parts[rows.file_name].append((name, rows))
        sizes = bfl_tensors(self.shape)
        return {
            name: Source(self.dtypes[some[0][0]], sizes[name], lambda some=some: _joined(some, read))  # type: ignore[misc]
            for name, some in parts.items()
        }


def _joined(parts: list[tuple[str, Rows]], read: Read) -> torch.Tensor:
    """A tensor of BFL's layout from the rows of diffusers' that it consists of."""
    ordered = sorted(parts, key=lambda part: part[1].file_first)
    if len(ordered) == 1:
        return read(ordered[0][0])
    whole = {name: read(name) for name, _ in ordered}
    if len({tensor.dtype for tensor in whole.values()}) > 1:  # some of them changed; torch promotes no 8 bits
        whole = {name: tensor.float() for name, tensor in whole.items()}
    return torch.cat([whole[name][rows.first : rows.first + rows.count] for name, rows in ordered])


@contextmanager
def open_model(path: Path) -> Iterator[WholeModel]:
    """A BFL or diffusers file, a diffusers folder (of the transformer, or with one in it), or a state's folder.

    Raises JobError where it holds no whole FLUX, with what is missing, unknown or misshapen.
    """
    files = _files(path)
    prefix, plain = without_prefix(read_entries(files))
    layout, shape = layout_of(plain), shape_of_file(path, plain)
    expected = bfl_tensors(shape) if layout == "bfl" else shape.tensors()
    compare(path, plain, expected, key="", types=TYPES)
    with ExitStack() as stack:
        readers: dict[str, TensorReader] = {}
        metadata: dict[str, str] = {}
        for file in files:
            reader = stack.enter_context(open_tensors(file))
            readers |= dict.fromkeys(reader.header.tensors, reader)
            metadata |= reader.header.metadata
        dtypes = {n: plain[n if layout == "diffusers" else p[0].file_name].dtype for n, p in placements(shape).items()}

        def read(name: str) -> torch.Tensor:
            if layout == "diffusers":
                return readers[prefix + name].read(prefix + name)
            rows = sorted(placements(shape)[name], key=lambda part: part.first)
            stored = [(prefix + r.file_name, r.file_first, r.file_first + r.count) for r in rows]
            found = [readers[part[0]].read(*part) for part in stored]
            return found[0] if len(found) == 1 else torch.cat(found)

        yield WholeModel(path, shape, dtypes, read, metadata)


def _files(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    if (path / MODEL_FILE).is_file():
        return (path / MODEL_FILE,)
    inner = path / "transformer"
    return shards_of(inner if inner.is_dir() else path, key="")


def write_model(
    target: Path,
    layout: ModelLayout,
    model: WholeModel,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    saturate: bool,
    read: Read | None = None,
) -> None:
    """A BFL file, or a diffusers folder of a transformer. Raises ExportError."""
    sources = model.laid_out(layout, read)
    if layout == "bfl":
        write(target, sources, dtype, metadata, saturate)
        return
    write(target / DIFFUSERS_FILE, sources, dtype, metadata, saturate)
    config: dict[str, Any] = {"_class_name": "FluxTransformer2DModel", **model.shape.config()}
    write_json(target / "config.json", config)
