"""``python -m trainer.grid STATE...``: one picture of what several states draw of the same prompts; started by
``fluxpod sample``.

Each state is a column, each prompt and seed a row. The pictures are those that training draws, by the same pipeline
from the states' files. The transformers come after one another, the text encoders before the first, so that memory
holds one of them.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from PIL import Image
from pydantic import ValidationError

from bootstrap import estimate
from bootstrap.base_files import compare, layout_of, read_entries, without_prefix
from bootstrap.cache import Cache
from bootstrap.estimate import TILE, in_gib
from bootstrap.flux_shape import FluxShape
from bootstrap.layout import bfl_tensors
from bootstrap.lora_file import LoraFileError
from bootstrap.outcome import DONE, JOB_WRONG, POD_WRONG
from bootstrap.pod import read_free_memory
from bootstrap.precision import MOST_FAITHFUL, Precision, base_bytes, unpacked_bytes
from bootstrap.prompts import read_prompts
from bootstrap.run_file import RunFile
from bootstrap.state import StateError, read_state
from bootstrap.tensor_files import TensorFileError
from bootstrap.wanted import prompt_texts, text_key
from jobs.problem import JobError
from jobs.prompts import Drawing, parse_prompts
from jobs.schema import Lora
from jobs.values import MOST_SEED
from trainer.adapter import add_adapter
from trainer.adapter_files import load_adapter
from trainer.attention import candidates
from trainer.encode import encode_texts
from trainer.model import Source, bare_model, fill, give_memory, sources
from trainer.pipeline import Pipeline
from trainer.processor import use_processor
from trainer.sample import write_picture
from trainer.sheet import Row, draw_grid
from trainer.trained import trained_tensors
from trainer.whole_model import TYPES

OVERHEAD = 2 << 30  # bytes beside the weights: activations of one picture, the VAE's weights, kernels


class GridError(ValueError):
    """What cannot be drawn as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Column:
    """Weights to draw with. ``file``: None draws with the base of its run."""

    label: str
    run: RunFile
    file: Path | None = None
    lora: Lora | None = None  # of the file, if it is an adapter

    @property
    def whole(self) -> bool:
        """Whether the file is a whole model."""
        return self.file is not None and self.lora is None


def column_of(path: Path) -> Column:
    """A state's folder, or the finished file of a run. Raises GridError."""
    run = _run_of(path)
    name = run.job.name
    if path.is_dir():
        try:
            state = read_state(path)
        except StateError as error:
            raise GridError(str(error)) from None
        return Column(f"{name}, step {state.step}", run, state.model, state.manifest.lora)
    if not path.is_file():
        raise GridError(f"there is no {path}")
    label = f"{name}, output" if path.stem == name else path.stem
    return Column(label, run, path, run.job.lora)


def _run_of(path: Path) -> RunFile:
    """The run that a state, or a file in output/, belongs to."""
    file = path.absolute().parent.parent / "run.json"
    try:
        return RunFile.read(file)
    except FileNotFoundError:
        raise GridError(f"{path} lies in no run's states/ or output/: which base it belongs to is not known") from None
    except (OSError, ValidationError) as error:
        raise GridError(f"{file} cannot be read, and tells which base {path.name} belongs to: {error}") from None


def with_base(columns: Sequence[Column]) -> list[Column]:
    """The bases of the columns before them, each once."""
    bases = {column.run.weights.transformer: column.run for column in reversed(columns)}
    return [*(Column(f"base, {run.job.base}"[:60], run) for run in reversed(bases.values())), *columns]


def drawings_of(prompts: Sequence[str], seeds: Sequence[int], columns: Sequence[Column]) -> list[Drawing]:
    """What to draw, prompt by prompt: those asked for (text, or a file of them), else those of the job, each with its
    own seed or with all that are asked for. Raises GridError, and JobError for what is no prompt."""
    sample = columns[0].run.job.sample
    told: list[str] = []
    for each in prompts:
        path = Path(each)
        told += read_prompts(path) if _is_file(path) else parse_prompts(each, "--prompts")
    drawings = [sample.drawing(prompt) for prompt in told] if told else list(sample.drawings)
    if not drawings:
        raise GridError("the run's job has no prompts: name some with --prompts")
    return [replace(each, seed=seed) for each in drawings for seed in (seeds or [each.seed])]


def seeds_in(text: str) -> list[int]:
    """1,2,3 as numbers. Raises GridError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) <= MOST_SEED for part in parts):
        raise GridError(f"--seeds {text}: write whole numbers with commas between them, such as 1,2,3")
    return [int(part) for part in parts]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a prompt is longer than any name
        return False


# ---------------------------------------------------------------- models


class Models:
    """The transformer of one column at a time, on ``device``; what two columns share is read once."""

    def __init__(self, device: torch.device, largest: int):
        self.device, self.largest = device, largest  # pixels of the largest picture
        self.model: FluxTransformer2DModel | None = None
        self.adapter: Lora | None = None  # that the model has
        self.held: object = None  # which whole weights it has

    def show(self, column: Column) -> FluxTransformer2DModel:
        """Raises GridError where there is not enough memory, and what reading the files raises."""
        weights = column.run.weights
        if column.file is not None and column.whole:
            wanted: object = column.file
            places = _places_in(column.file, weights.shape)
        else:
            wanted = weights.transformer
            places = sources(weights.shape, weights.transformer, weights.layout, weights.prefix)
        if self.model is None or self.held != wanted or self.adapter not in (None, column.lora):
            self._read(column, places)
            self.held, self.adapter = wanted, None
        assert self.model is not None
        if column.lora and column.file:
            if self.adapter is None:
                add_adapter(self.model, column.lora, seed=0)
                self.adapter = column.lora
            load_adapter(column.file, trained_tensors(self.model, 0, 1), column.lora)
        return self.model.eval()

    def _read(self, column: Column, places: list[Source]) -> None:
        self.model = None
        gc.collect()
        precision = self._precision(column)
        model = bare_model(column.run.weights.shape, precision)
        give_memory(model, self.device)
        fill(model, places)
        if self.device.type == "cuda":  # cuDNN's attention is trusted on no card before it is tried
            next(a for a in candidates(self.device, masked=False) if a.name != "cudnn").switch_on(model)
        self.model = model

    def _precision(self, column: Column) -> Precision:
        """bf16 where it fits, else the most faithful format that does."""
        shape = column.run.weights.shape
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = read_free_memory() or 1 << 60
        beside = OVERHEAD + int(min(self.largest, TILE**2) * estimate.DECODE)
        for precision in MOST_FAITHFUL if self.device.type == "cuda" else MOST_FAITHFUL[:1]:
            if base_bytes(shape, precision) + unpacked_bytes(shape, precision) + beside <= free:
                if precision != "bf16":
                    print(f"{column.label}: drawn in {precision}, since bf16 does not fit; colours may differ a little")
                return precision
        need = in_gib(base_bytes(shape, MOST_FAITHFUL[-1] if self.device.type == "cuda" else "bf16") + beside)
        where = "this GPU has" if self.device.type == "cuda" else "this machine has"
        raise GridError(f"drawing takes {need} of memory, and {where} {in_gib(free)} free: is a run using it?")


def _places_in(file: Path, shape: FluxShape) -> list[Source]:
    """Where the rows of a whole model lie in a file of either layout. Raises JobError where it holds another one, or
    none."""
    prefix, entries = without_prefix(read_entries([file]))
    layout = layout_of(entries)
    compare(file, entries, bfl_tensors(shape) if layout == "bfl" else shape.tensors(), key="", types=TYPES)
    return sources(shape, [file], layout, prefix)


def in_order(columns: Sequence[Column]) -> list[Column]:
    """Those that share a base one after the other: the base itself, its adapters, then whole models."""
    return sorted(columns, key=lambda c: (c.whole, str(c.run.weights.transformer), c.file is not None, str(c.lora)))


# ---------------------------------------------------------------- drawing


def draw_all(columns: Sequence[Column], drawings: Sequence[Drawing], device: torch.device) -> list[list[Image.Image]]:
    """For each drawing its picture by each column, in their order. Tells how far it is."""
    for column in {column.run.weights.digest: column for column in columns}.values():
        texts = prompt_texts(drawings, column.run.weights)
        missing = Cache(column.run.cache).missing(texts)
        if missing:
            print(f"encoding {len(missing)} prompts", flush=True)
            encode_texts({key: texts[key] for key in missing}, column.run.weights, device, column.run.cache)
            gc.collect()
    models = Models(device, max(drawing.width * drawing.height for drawing in drawings))
    drawn: dict[int, list[Image.Image]] = {}
    for column in in_order(columns):
        print(f"{column.label}: loading", flush=True)
        pictures = list(_pictures(column, models, drawings, device))
        drawn[next(number for number, each in enumerate(columns) if each is column)] = pictures
    return [[drawn[number][row] for number in range(len(columns))] for row in range(len(drawings))]


def _pictures(
    column: Column, models: Models, drawings: Sequence[Drawing], device: torch.device
) -> Iterator[Image.Image]:
    weights, cache = column.run.weights, Cache(column.run.cache)
    model = models.show(column)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 60
    tiled = models.largest > TILE**2 and models.largest * estimate.DECODE + OVERHEAD > free
    pipeline = Pipeline(weights, model, device, tiled=tiled)
    for number, drawing in enumerate(drawings, start=1):
        text = cache.read(text_key(drawing.prompt, weights, t5_mask=False))
        yield pipeline.decode(pipeline.denoise(drawing, text), drawing)
        print(f"{column.label}: {number}/{len(drawings)} drawn", flush=True)


def write_grid(target: Path | None, columns: Sequence[Column], rows: Sequence[Row], cell: int) -> Path:
    """The picture as a PNG, by default beside the samples of the first column's run; nothing is overwritten."""
    folder = columns[0].run.folder.samples
    target = target or next(p for n in range(1, 10**6) if not (p := folder / f"grid-{n:03d}.png").exists())
    write_picture(draw_grid([column.label for column in columns], rows, cell), target, {})
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fluxpod sample")
    parser.add_argument("states", type=Path, nargs="+")
    add_options(parser)
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available() and not options.cpu
    device = torch.device("cuda") if on_gpu else use_processor()
    try:
        if options.to and options.to.exists():
            raise GridError(f"{options.to} is there already: name another file with --to")
        if not 64 <= options.cell <= 4096:
            raise GridError(f"--cell {options.cell}: write a number of pixels from 64 to 4096")
        columns = [column_of(path) for path in options.states]
        columns = with_base(columns) if options.base else columns
        drawings = drawings_of(options.prompts, seeds_in(options.seeds), columns)
        pictures = draw_all(columns, drawings, device)
        rows = [Row(drawing.prompt, str(drawing), some) for drawing, some in zip(drawings, pictures, strict=True)]
        print(f"wrote {write_grid(options.to, columns, rows, options.cell)}")
    except (GridError, JobError, TensorFileError, LoraFileError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return JOB_WRONG
    except torch.cuda.OutOfMemoryError as error:
        print(f"The GPU's memory ran out: is a run using it? Smaller pictures take less. ({error})", file=sys.stderr)
        return POD_WRONG
    return DONE


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", action="append", default=[])
    parser.add_argument("--seeds", default="")
    parser.add_argument("--base", action="store_true")
    parser.add_argument("--cell", type=int, default=512)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--to", type=Path)


if __name__ == "__main__":
    sys.exit(main())
