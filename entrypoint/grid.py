"""``fluxpod sample``: which states are meant. ``trainer.grid`` draws."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bootstrap.outcome import JOB_WRONG
from bootstrap.state import list_states
from bootstrap.volume import Volume
from entrypoint.model_files import NotFoundError, state_or_file
from entrypoint.states import ALL, OUTPUT, named_part

OPTIONS = ("seeds", "cell", "to")
SWITCHES = ("base", "cpu")
HOW_NAMED = "RUN/STEP, RUN for its newest, RUN/all, RUN/output for the finished file, or a path to one of them"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("states", nargs="+", metavar="STATE", help=HOW_NAMED)
    prompts = "a prompt, settings behind it, or a file of them; may be repeated (the prompts of the job)"
    parser.add_argument("--prompts", action="append", default=[], metavar="TEXT|FILE", help=prompts)
    parser.add_argument("--seeds", metavar="1,2,3", help="draw each prompt with all of these (its own)")
    parser.add_argument("--base", action="store_true", help="the base as the first column")
    parser.add_argument("--cell", type=int, default=512, metavar="PIXELS", help="largest side of a picture there (512)")
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone: slow")
    parser.add_argument("--to", type=Path, metavar="FILE", help="a PNG (runs/RUN/samples/grid-001.png)")


def run(volume: Volume, options: argparse.Namespace) -> int:
    """Starts the trainer's part; gives its exit code, or 64 for names that mean nothing."""
    try:
        paths = [str(path) for name in options.states for path in columns(volume, name)]
    except NotFoundError as error:
        print(error, file=sys.stderr)
        return JOB_WRONG
    chosen = [f"--prompts={text}" for text in options.prompts]
    chosen += [f"--{name}={value}" for name in OPTIONS if (value := getattr(options, name)) is not None]
    chosen += [f"--{name}" for name in SWITCHES if getattr(options, name)]
    return subprocess.run([sys.executable, "-m", "trainer.grid", *paths, *chosen], check=False).returncode


def columns(volume: Volume, name: str) -> Iterator[Path]:
    """What a name stands for: all of a run's states, its finished file, one state, or a path. Raises NotFoundError."""
    run, which = named_part(volume, name)
    folder = volume.run(run)
    if which == ALL and (states := list_states(folder.states)[0]):
        yield from (state.path for state in states)
    elif which == OUTPUT and (file := folder.output / f"{run}.safetensors").is_file():
        yield file
    elif which in (ALL, OUTPUT):
        what = "no states" if which == ALL else "no finished file"
        raise NotFoundError(f"{name} is nothing to draw with: {folder.root} holds {what}. Write {HOW_NAMED}")
    else:
        yield state_or_file(volume, name)
