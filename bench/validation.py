"""Whether validation tells well trained from under- and over-trained: ``python -m bench.validation [--folder FOLDER]``.

The same job on flux-tiny three times, on a few pictures with others held out: stopped too early, stopped in time, and
trained until it knows its pictures by heart. A CPU does: some minutes of it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from bootstrap.outcome import DONE
from bootstrap.validation import Round, in_words, lowest, parting, read_rounds
from bootstrap.volume import Volume, write_atomically
from entrypoint.run import run_job
from tiny.drawn import draw_dataset

SHOWN, OTHERS = 4, 12  # pictures drawn: to train on, to try
RUNS = {"under": 5, "well": 40, "over": 120}  # steps
JOB = """\
name: {name}
base: flux-tiny
method: full
datasets: [{{ path: datasets/shown }}]
steps: {steps}
images_per_step: 2
resolution: 64
bucket_step: 64
learning_rate: 2e-3
warmup: 5
save: {{ every: 1000 }}
validation: {{ path: datasets/others, every: 10, images: 6 }}
"""


@dataclass(frozen=True)
class Result:
    """One run: what its rounds found."""

    name: str
    steps: int
    rounds: list[Round]

    @property
    def loss(self) -> float:
        loss = self.rounds[-1].loss
        return float("inf") if loss is None else loss


def prepare(volume: Volume) -> None:
    """Pictures to train on and others of the same kind."""
    volume.create()
    draw_dataset(volume.datasets / "shown", SHOWN)
    draw_dataset(volume.datasets / "others", OTHERS, seed=2)


def run(volume: Volume, name: str, steps: int) -> Result:
    """Raises RuntimeError where the run does not come to its end."""
    return Result(name, steps, rounds_of(volume, name, JOB.format(name=name, steps=steps)))


def rounds_of(volume: Volume, name: str, job: str) -> list[Round]:
    """Runs a job, given as the text of its file, and tells what its validation found.

    Raises RuntimeError where the run does not come to its end.
    """
    path = volume.jobs / f"{name}.yaml"
    write_atomically(path, job)
    with redirect_stdout(sys.stderr):
        code = run_job(path, volume.root)
    if code != DONE:
        raise RuntimeError(f"{name} ended with code {code}")
    return read_rounds(volume.run(name).validation)


def table(results: Sequence[Result]) -> str:
    """A line for each run, the best by its validation loss first."""
    lines = [f"{'run':6} {'steps':>5} {'training':>9} {'validation':>11}  lowest"]
    for result in sorted(results, key=lambda each: each.loss):
        last, best = result.rounds[-1], lowest(result.rounds)
        shown = sum(n * loss for n, loss in zip(last.train_images, last.train, strict=True) if loss is not None)
        trained = shown / max(1.0, sum(last.train_images))
        told = f"{best.loss:.4f} at step {best.step}" if best else "-"
        lines.append(f"{result.name:6} {result.steps:5} {trained:9.4f} {result.loss:11.4f}  {told}")
    return "\n".join(lines)


def wrong(results: Sequence[Result]) -> list[str]:
    """What is not as it should be, in words."""
    by_name = {result.name: result for result in results}
    found = [
        f"{name} has no higher validation loss than well"
        for name in ("under", "over")
        if by_name[name].loss <= by_name["well"].loss
    ]
    for name, result in by_name.items():
        told = parting(result.rounds)
        if (told is not None and told.overfits) != (name == "over"):
            found.append(f"{name} is {'not ' if name == 'over' else ''}said to overfit: {in_words(result.rounds)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="a volume, kept; runs that are done there are not made again")
    folder = parser.parse_args().folder
    volume = Volume(Path(tempfile.mkdtemp(prefix="fluxpod-")) if folder is None else folder.absolute())
    try:
        prepare(volume)
        results = [run(volume, name, steps) for name, steps in RUNS.items()]
    finally:
        if folder is None:
            shutil.rmtree(volume.root)
    print(table(results))
    print(in_words(results[-1].rounds))
    problems = wrong(results)
    print("\n".join(problems) or "ranked rightly; only the over-trained one is said to overfit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
