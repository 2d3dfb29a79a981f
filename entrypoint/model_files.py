"""``fluxpod export``, ``merge`` and ``extract``: which files are meant. ``trainer.export`` and so on do the work."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bootstrap.bases import parse_base
from bootstrap.manifest import whole
from bootstrap.outcome import JOB_WRONG
from bootstrap.state import MODEL_FILE
from bootstrap.volume import Volume
from entrypoint.states import find_state
from jobs.problem import JobError

OPTIONS = ("layout", "dtype", "to", "rank", "targets")
SWITCHES = ("saturate", "any_base", "live")


class NotFoundError(ValueError):
    """A name that means no model; the message says what to write."""


def run(volume: Volume, options: argparse.Namespace) -> int:
    """Starts the trainer's part of a command; gives its exit code, or 64 for names that mean nothing."""
    try:
        if options.command == "export":
            named = [str(state_or_file(volume, options.what))]
        elif options.command == "merge":
            named = [lora(volume, text) for text in options.loras] + [f"--base={model(volume, options.base)}"]
        else:
            named = [str(model(volume, options.tuned)), f"--base={model(volume, options.base)}"]
    except NotFoundError as error:
        print(error, file=sys.stderr)
        return JOB_WRONG
    chosen = [f"--{name}={value}" for name in OPTIONS if (value := getattr(options, name, None)) is not None]
    switched = [f"--{name.replace('_', '-')}" for name in SWITCHES if getattr(options, name, False)]
    command = [sys.executable, "-m", f"trainer.{options.command}", *named, *chosen, *switched]
    return subprocess.run(command, check=False).returncode


def state_or_file(volume: Volume, text: str) -> Path:
    """A file or folder, here or on the volume, else a state's folder. Raises NotFoundError."""
    for path in (Path(text).absolute(), volume.resolve(text)):
        if path.exists() and path.parent != volume.runs:  # a run's folder stands for its newest state
            return path
    if found := find_state(volume, text):
        return found
    raise NotFoundError(
        f"there is no state {text}, and no such file: write a path, or RUN/STEP; `fluxpod states RUN` lists them"
    )


def lora(volume: Volume, text: str) -> str:
    """A LoRA's file, with the strength that may stand behind it. Raises NotFoundError."""
    name, at, strength = text.rpartition("@")
    if not at or not _is_number(strength):
        name, strength = text, ""
    path = state_or_file(volume, name)
    file = path / MODEL_FILE if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError(f"{path} holds no {MODEL_FILE}: name the LoRA's file")
    return f"{file}@{strength}" if strength else f"{file}@1"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def model(volume: Volume, text: str) -> Path:
    """A full model: a file, a folder, a state, or what was fetched from the hub. Raises NotFoundError."""
    try:
        return state_or_file(volume, text)
    except NotFoundError as error:
        try:
            base = parse_base(text, volume)
        except JobError:
            raise error from None
    if base.kind == "hub" and (fetched := whole(volume.models, base.repo, base.revision)):
        return fetched[0]
    if base.path is not None and base.path.is_dir():
        return base.path
    raise NotFoundError(
        f"{text} is no state, and no model of that name was fetched to this volume: write a path, or "
        "RUN/STEP; a job with a hub's model as base fetches it"
    )
