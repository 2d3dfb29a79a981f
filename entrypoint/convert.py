"""``fluxpod convert``: a job from the file of another tool, on standard output or in a new file, and a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bootstrap.folders import walk
from bootstrap.outcome import DONE, JOB_WRONG
from bootstrap.volume import Volume, write_atomically
from jobs.convert.conversion import convert as convert_file
from jobs.problem import JobError

# What the other tools take for pictures: they go by endings, and steps are counted as they count them.
PICTURES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".avif"))


def convert(file: Path, output: Path | None, datasets: Path | None, gpus: int | None, volume: Volume) -> int:
    """Prints the job, or writes it where nothing is yet; the report goes to standard error. Gives 0 or 64."""
    try:
        if output is not None and os.path.lexists(output):
            print(
                f"{output} is there already, and is not overwritten. Name another file, or remove it.", file=sys.stderr
            )
            return JOB_WRONG
        done = convert_file(file, datasets=datasets, gpus=gpus, count=lambda paths: _count(paths, file.parent, volume))
    except JobError as error:
        print(error, file=sys.stderr)
        return JOB_WRONG
    print(done.report, file=sys.stderr)
    if output is None:
        print(done.text, end="")
        return DONE
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, done.text)
    except OSError as error:
        print(f"{output} cannot be written: {error.strerror}. Choose another place.", file=sys.stderr)
        return JOB_WRONG
    print(f"\nwrote {output}; check it with: fluxpod check {output}", file=sys.stderr)
    return DONE


def _count(paths: Sequence[str], beside: Path, volume: Volume) -> int | None:
    """Pictures times the repeats of their folders' names, in the first of ``paths`` that is here."""
    places = [place for path in paths for place in (beside / path, volume.resolve(path))]
    root = next((place for place in places if place.is_dir()), None)
    if root is None:
        return None
    return sum(
        folder.repeats * sum(Path(name).suffix.lower() in PICTURES for name in folder.files)
        for folder in walk(root).folders
    )
