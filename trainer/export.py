"""``python -m trainer.export WHAT``: weights as a file for another tool; started by ``fluxpod export``.

A full state's own file is BFL's layout in bf16 already, and an adapter's has the job's layout: those need no export but
for another layout or number format.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bootstrap.lora_file import LAYOUTS, LoraFileError, is_lora, left_out, read_lora, tensors_of
from bootstrap.outcome import DONE, JOB_WRONG
from bootstrap.state import State, StateError, read_state
from bootstrap.tensor_files import TensorFileError, open_tensors, read_header, read_tensors
from jobs.problem import JobError
from trainer.adapter_files import adapter_in
from trainer.ema import PREFIX, live_of
from trainer.metadata import in_layout
from trainer.tensor_output import DTYPES, ExportError, held, refuse_existing, write
from trainer.whole_model import MODEL_LAYOUTS, open_model, write_model


def export(state: State, target: Path | None, layout: str | None, dtype: str | None, saturate: bool) -> Path:
    """Writes ``target`` (a file; a folder for a full model in diffusers' layout) and gives it. Raises ExportError."""
    run = state.path.parent.parent
    name = f"{run.name}-step-{state.step:06d}"
    return export_file(state.model, target, layout, dtype, saturate, (run / "output", name), state.manifest.saved)


def export_live(state: State, target: Path | None, layout: str | None, dtype: str | None, saturate: bool) -> Path:
    """The same of the live weights, where the state's own are their average. Raises ExportError."""
    if state.manifest.ema is None:
        raise ExportError("this state's weights are the live ones (its job has no ema): export it without --live")
    if not state.resumable:
        raise ExportError(
            "this state has been thinned: it holds the average alone. The live weights stay in the newest states "
            "(save.states)"
        )
    lora, run = state.manifest.lora, state.path.parent.parent
    layout = _known_layout(layout, lora is not None)
    ending = "" if layout == "diffusers" and not lora else ".safetensors"
    name = "-".join(filter(None, (f"{run.name}-step-{state.step:06d}-live", layout, dtype)))
    target = target or run / "output" / f"{name}{ending}"
    refuse_existing(target)
    told = read_header(state.model).metadata
    metadata = {key: text for key, text in told.items() if key != "fluxpod.ema"} | {"fluxpod.layout": layout}
    with open_tensors(state.optimizer) as reader:

        def read(name: str) -> torch.Tensor:
            return live_of(reader.read(PREFIX + name))

        if lora:
            names = [name.removeprefix(PREFIX) for name in reader.header.tensors if name.startswith(PREFIX)]
            adapter = adapter_in({name: read(name) for name in names}, lora)
            tensors = tensors_of(adapter, "kohya" if layout == "kohya" else "diffusers")
            write(target, held(tensors), DTYPES[dtype or "fp32"], in_layout(metadata, layout), saturate)
        else:
            with open_model(state.model) as model:
                kind = DTYPES[dtype or "bf16"]
                write_model(target, "bfl" if layout == "bfl" else "diffusers", model, kind, metadata, saturate, read)
    return target


def _known_layout(layout: str | None, lora: bool) -> str:
    """The layout asked for, or the usual one. Raises ExportError."""
    known: tuple[str, ...] = LAYOUTS if lora else MODEL_LAYOUTS
    if layout is not None and layout not in known:
        raise ExportError(
            f"{'a LoRA' if lora else 'a full model'} is exported as {' or '.join(known)}, not as {layout}"
        )
    return layout or known[0]


def export_file(
    source: Path,
    target: Path | None,
    layout: str | None,
    dtype: str | None,
    saturate: bool,
    place: tuple[Path, str] | None = None,
    saved: str = "",
) -> Path:
    """The same for any LoRA or transformer. ``place``: folder and beginning of the name where no ``target`` is given;
    ``saved``: when it was. Raises ExportError, LoraFileError, JobError."""
    lora = source.is_file() and is_lora(read_header(source).tensors)
    layout = _known_layout(layout, lora)
    folder, name = place or (source.parent, source.stem)
    ending = "" if layout == "diffusers" and not lora else ".safetensors"
    target = target or folder / ("-".join(filter(None, (name, layout, dtype))) + ending)
    refuse_existing(target)
    date = {"modelspec.date": saved} if saved else {}
    if lora:
        told = read_header(source).metadata
        adapter = read_lora(source)  # reads all of it, so that nothing is passed on that is not understood
        as_it_is = told.get("fluxpod.layout") == layout
        tensors = (
            read_tensors(source) if as_it_is else tensors_of(adapter, "kohya" if layout == "kohya" else "diffusers")
        )
        metadata = in_layout(told, layout) | date
        write(target, held(tensors), DTYPES[dtype or "fp32"], metadata, saturate)
    else:
        with open_model(source) as model:
            metadata = dict(model.metadata) | {"fluxpod.layout": layout} | date
            kind = DTYPES[dtype or "bf16"]
            write_model(target, "bfl" if layout == "bfl" else "diffusers", model, kind, metadata, saturate)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fluxpod export")
    parser.add_argument("what", type=Path, help="a state's folder, or a file")
    add_options(parser)
    options = parser.parse_args(arguments)
    chosen = (options.to, options.layout, options.dtype, options.saturate)
    try:
        if options.what.is_file() and options.live:
            raise ExportError("a file holds one kind of weights: name a state for its live ones")
        if options.what.is_file():
            target = export_file(options.what, *chosen)
            if told := left_out(options.what):
                print(told)
        elif options.live:
            target = export_live(read_state(options.what), *chosen)
        else:
            target = export(read_state(options.what), *chosen)
    except (StateError, ExportError, LoraFileError, TensorFileError, JobError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return JOB_WRONG
    print(f"wrote {target}")
    return DONE


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=("bfl", "diffusers", "kohya"), help="bfl or kohya by default")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16, and fp32 for a LoRA, by default")
    parser.add_argument("--to", type=Path, metavar="PATH", help="a file, or a folder for a full model of diffusers")
    parser.add_argument("--live", action="store_true", help="a state's live weights, where it holds their average")
    parser.add_argument("--saturate", action="store_true", help="put the largest number for what is beyond the range")


if __name__ == "__main__":
    sys.exit(main())
