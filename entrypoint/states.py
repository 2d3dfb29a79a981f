"""``fluxpod states RUN``: what a run has saved, and whether it is whole."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bootstrap.outcome import DONE, JOB_WRONG
from bootstrap.state import State, StateError, list_states, newest_whole, verify
from bootstrap.volume import Volume

OUTPUT, ALL = "output", "all"  # of a run, in place of a step: its finished file, and all its states


def show_states(volume: Volume, run: str, hash_all: bool) -> int:
    """Prints a line for each state, oldest first, and for each folder that is none; 64 where one is damaged."""
    folder = volume.run(run).states
    states, notes = list_states(folder)
    damaged = bool(notes)
    for state in states:
        line, whole = _line(state, hash_all)
        damaged |= not whole
        print(line)
    for note in notes:
        print(f"not a state: {note}")
    if not states and not notes:
        print(f"no states in {folder}")
    return JOB_WRONG if damaged else DONE


def _line(state: State, hash_all: bool) -> tuple[str, bool]:
    saved = state.manifest.saved.replace("T", " ").replace("+00:00", "") or "-"
    kind = "state" if state.resumable else "weights only"
    line = f"step {state.step:>7}  {saved:19}  {state.bytes / 1e9:8.3f} GB  {kind:12}  {state.path}"
    if not hash_all:
        return line, True
    try:
        verify(state)
    except StateError as error:
        return f"{line}  DAMAGED: {error}", False
    return f"{line}  verified", True


def named_part(volume: Volume, text: str) -> tuple[str, str]:
    """The run, and what of it: a step, "output", "all" or "". Of RUN, RUN/STEP, RUN/output, RUN/all, and of paths that
    stand for them, such as runs/RUN/states/step-000500 or runs/RUN/output/RUN.safetensors."""
    parts, runs = Path(text).parts, volume.runs
    there, here = Path(os.path.normpath(volume.resolve(text))), Path(os.path.abspath(text))
    if there.is_relative_to(runs):
        parts = there.relative_to(runs).parts
    elif here.is_relative_to(runs) and not volume.run("".join(parts[:1])).root.is_dir():
        parts = here.relative_to(runs).parts
    run, *more = [part for part in parts if part not in ("states", os.sep)] or [text]
    if more and (step := re.fullmatch(r"(?:step-)?0*(\d+)", more[0])):
        return run, step[1]
    which = "/".join(more)
    return run, OUTPUT if which == f"{OUTPUT}/{run}.safetensors" else which


def find_state(volume: Volume, name: str) -> Path | None:
    """The folder of a state called ``RUN/STEP``, or ``RUN`` for the newest that is whole."""
    run, step = named_part(volume, name)
    states = list_states(volume.run(run).states)[0]
    if not step:
        newest, _ = newest_whole(volume.run(run).states)
        return newest.path if newest else (states[-1].path if states else None)
    return next((state.path for state in states if str(state.step) == step), None)
