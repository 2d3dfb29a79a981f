"""What a quantised base costs a LoRA in loss: ``python -m bench.base_precisions [--folder FOLDER]``.

The demo's LoRA on flux-tiny over each kind of base, with the same pictures, noise and noise levels. The loss is that of
pictures held out, by noise of their own that is always the same: of the base alone, and with the LoRA at the end.
A CPU does: some minutes of it. What each kind costs in time and memory tells ``bench.gpu``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from bench.validation import rounds_of
from bootstrap.volume import Volume
from tiny.demo import LORA, draw_datasets, job_text, varied_scenes, write_pictures
from tiny.scenes import UNSEEN

PRECISIONS = ("bf16", "int8", "fp8", "nf4")
HELD_OUT = 24  # pictures


@dataclass(frozen=True)
class Result:
    precision: str
    before: float  # loss of the base alone
    after: float


def prepare(volume: Volume) -> None:
    volume.create()
    draw_datasets(volume)
    write_pictures(volume.datasets / "others", "other", varied_scenes(np.random.default_rng(5), UNSEEN))


def run(volume: Volume, precision: str, steps: int) -> Result:
    """Raises RuntimeError where the run does not come to its end."""
    name = f"base-{precision}"
    job = yaml.safe_load(job_text(name, LORA | {"steps": steps}, []))
    del job["sample"]
    job["validation"] = {"path": "datasets/others", "every": steps, "images": HELD_OUT}
    job["plan"] = {"processes": 1, "base_precision": precision}
    rounds = rounds_of(volume, name, json.dumps(job, indent=2))  # JSON is YAML
    first, last = rounds[0], rounds[-1]
    if first.step != 0 or first.loss is None or last.loss is None:
        raise RuntimeError(f"{name} has no loss at both ends")
    return Result(precision, first.loss, last.loss)


def table(results: Sequence[Result]) -> str:
    """A line for each precision, with what it has more than the first, in per cent of that."""

    def more(value: float, least: float) -> str:
        return f"{100 * (value / least - 1):+.1f} %"

    first = results[0]
    lines = [f"{'base':5} {'alone':>8} {'':>9} {'with LoRA':>10} {'':>9}"]
    for each in results:
        gaps = (more(each.before, first.before), more(each.after, first.after)) if each is not first else ("", "")
        lines.append(f"{each.precision:5} {each.before:8.4f} {gaps[0]:>9} {each.after:10.4f} {gaps[1]:>9}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="a volume, kept; runs that are done there are not made again")
    parser.add_argument("--steps", type=int, default=LORA["steps"])
    options = parser.parse_args()
    volume = Volume(options.folder.absolute() if options.folder else Path(tempfile.mkdtemp(prefix="fluxpod-")))
    try:
        prepare(volume)
        results = [run(volume, precision, options.steps) for precision in PRECISIONS]
    finally:
        if options.folder is None:
            shutil.rmtree(volume.root)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
