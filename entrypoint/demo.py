"""The main job from end to end on pictures drawn by the program: ``python -m entrypoint.demo [--volume demo/volume]``.

Everything goes the product's own way: a job file and a dataset on a volume, then ``run``. A second start goes on where
the first ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bootstrap.outcome import DONE
from bootstrap.volume import RunFolder, Volume, write_atomically
from entrypoint.drawn import draw_dataset

PICTURES = 24
JOB = """\
# A smoke run on flux-tiny, which needs neither a GPU nor an account.
name: demo
base: flux-tiny
method: full
datasets:
  - path: datasets/demo
steps: 60
resolution: 128
bucket_step: 16
learning_rate: 1e-3      # flux-tiny begins from random weights; a real FLUX needs 1e-5
warmup: 5
save: { every: 20, states: 1, weights: 2 }
sample:
  every: 30
  prompts: ["a large red circle on a white background"]
  width: 128
  height: 128
  steps: 4
plan: { processes: 2 }   # trained as on two GPUs, without any
"""


def prepare(volume: Volume) -> Path:
    """Puts the job and its pictures on the volume, where they are not there yet; gives the job's path."""
    volume.create()
    folder, job = volume.datasets / "demo", volume.jobs / "demo.yaml"
    written = draw_dataset(folder, PICTURES)
    if written:
        print(f"drew {written} pictures with captions in {folder}")
    if not job.exists():
        write_atomically(job, JOB)
    return job


def summary(run: RunFolder) -> list[str]:
    """Where the run left what, and its figures, in lines for people."""
    lines = [f"everything of this run: {run.root}"]
    kinds = {
        "output": sorted(run.output.glob("*.safetensors")),
        "states": sorted(run.states.glob("step-*")),
        "samples": sorted(run.samples.glob("*.*")),
        "tensorboard": [run.tensorboard] if run.tensorboard.exists() else [],
        "log": [run.log] if run.log.exists() else [],
    }
    lines += [f"  {kind}: {path.relative_to(run.root)}" for kind, paths in kinds.items() for path in paths]
    steps = _read_metrics(run.metrics)
    losses = [step["loss"] for step in steps if step.get("loss") is not None]
    if losses:
        lines.append(f"loss: first {losses[0]:.4f}, last {losses[-1]:.4f}, over {len(losses)} steps")
    speeds = [step["images_per_s"] for step in steps if step.get("images_per_s")]
    if speeds:
        lines.append(f"speed: {statistics.median(speeds):.1f} images/s")
    return lines


def _read_metrics(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m entrypoint.demo", description="The main job on drawn pictures.")
    parser.add_argument("--volume", type=Path, default=Path("demo/volume"), help="a folder; made where it is not there")
    volume = Volume(parser.parse_args(arguments).volume.absolute())
    job = prepare(volume)
    from entrypoint.run import run_job  # late: the pictures are drawn before anything heavy is imported

    code = run_job(job, volume.root)
    print()
    print("\n".join(summary(volume.run("demo"))))
    if code == DONE:
        print("flux-tiny is made of random weights: its samples are noise and show only that drawing works.")
    else:
        print(
            f"The demo ended with code {code}; the lines above say why. Starting it again goes on from the last state."
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
