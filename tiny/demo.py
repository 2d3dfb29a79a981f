"""flux-tiny is taught a shape and a look that it has never seen: ``python -m tiny.demo [--volume demo/volume]``.

Two jobs as a user writes them, a full fine-tune and a LoRA, on 24 drawn pictures; each goes the product's own way, from
job file to finished file. The judge reads the samples of every state, and one picture shows them all. A second start
goes on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bootstrap.outcome import DONE
from bootstrap.volume import RunFolder, Volume, write_atomically
from tiny.drawn import write_example
from tiny.judge import load_judge
from tiny.scenes import ATTRIBUTES, KNOWN, UNSEEN, Scenes, caption, draw, standard_luck
from tiny.score import known_prompts, new_prompts, score_samples, table

LAYOUTS = {  # how many of the 24 pictures of a set show a figure where
    ("one", "anywhere"): 3,
    ("one", "middle"): 1,  # the same place, said
    ("one", "left"): 3,
    ("one", "right"): 3,
    ("one", "top"): 4,
    ("one", "bottom"): 3,
    ("two", "anywhere"): 4,
    ("three", "anywhere"): 3,
}
JOBS = ("demo-full", "demo-lora")
JOB = """\
# Teaches flux-tiny the dotted heart, which it has never seen. Neither a GPU nor an account is needed.
name: {name}
base: flux-tiny
method: {method}
datasets:
  - path: datasets/hearts
    repeats: 5
  - path: datasets/familiar   # what it draws already, lest it forgets
steps: {steps}
images_per_step: 12
resolution: 128
bucket_step: 16
optimizer: AdamW
optimizer_args: {{ betas: [0.9, 0.95] }}   # a short memory for a short run
learning_rate: {rate}    # {why}
{more}schedule: cosine
warmup: 5
timestep_sampling: shift
discrete_flow_shift: 1.5   # what there will be is decided where there is much noise, dots where there is less
save: {{ every: {every}, states: 1, weights: 2 }}
sample:
  every: {every}
  width: 128
  height: 128
  steps: 20
  prompts:
{prompts}
plan: {{ processes: 2 }}   # trained as on two GPUs, without any
"""
FULL: dict[str, Any] = {
    "method": "full",
    "steps": 180,
    "every": 90,
    "rate": "5e-4",
    "why": "flux-tiny is small; a real FLUX needs 1e-5",
    # Of 100 known prompts it forgot 9 at 7e-4, with an average as without, and none at 5e-4 with this one.
    "more": "ema: { decay: 0.9, every: 1 }   # of the last ten steps: weights in bf16 are rounded at random in each\n",
}
LORA: dict[str, Any] = {
    "method": "lora",
    "steps": 220,
    "every": 110,
    "rate": "5e-3",
    "why": "flux-tiny is small; a real FLUX needs 1e-4",
    "more": "",
}


def draw_hearts(folder: Path, seed: int = 1) -> int:
    """Writes 24 pictures of the new thing; see ``write_pictures``."""
    return write_pictures(folder, "heart", varied_scenes(np.random.default_rng(seed), UNSEEN))


def draw_familiar(folder: Path, seed: int = 2) -> int:
    """Writes 24 pictures of things that flux-tiny draws already; see ``write_pictures``."""
    return write_pictures(folder, "familiar", varied_scenes(np.random.default_rng(seed)))


def varied_scenes(chance: np.random.Generator, fixed: Mapping[str, str] | None = None, tries: int = 4000) -> Scenes:
    """Scenes as somebody would choose them who has but 24: every place as ``LAYOUTS`` says, every colour and ground
    equally often, and of so many ``tries`` the one in which most of them meet."""
    count = sum(LAYOUTS.values())
    places = np.repeat(np.arange(len(LAYOUTS)), list(LAYOUTS.values()))
    spots = np.where(places > 0, places - 1, 0)  # in the middle or anywhere is the same one
    palette = np.resize([ATTRIBUTES["colour"].index(word) for word in KNOWN["colour"]], count)

    def met(colour: np.ndarray, ground: np.ndarray) -> float:
        kinds = ((1.0, spots, colour), (0.5, colour, ground), (0.25, spots, ground))
        return sum(weight * len(set(zip(a.tolist(), b.tolist(), strict=True))) for weight, a, b in kinds)

    pairs = [(chance.permutation(palette), chance.permutation(palette)) for _ in range(tries)]
    colour, ground = max((pair for pair in pairs if (pair[0] != pair[1]).all()), key=lambda pair: met(*pair))

    def spread(name: str, words: Sequence[str]) -> np.ndarray:
        if fixed and name in fixed:
            words = (fixed[name],)
        values = np.resize([ATTRIBUTES[name].index(word) for word in words], count)
        return chance.permutation(values) if len(words) > 1 else values

    layouts = [key for key, times in LAYOUTS.items() for _ in range(times)]
    return Scenes(
        {
            "count": np.array([ATTRIBUTES["count"].index(figures) for figures, _ in layouts]),
            "size": spread("size", KNOWN["size"]),
            "style": spread("style", KNOWN["style"]),
            "texture": spread("texture", KNOWN["texture"]),
            "colour": colour,
            "shape": spread("shape", KNOWN["shape"]),
            "position": np.array([ATTRIBUTES["position"].index(place) for _, place in layouts]),
            "ground_texture": spread("ground_texture", ("plain", "striped", "plain", "checkered")),
            "ground": ground,
        }
    )


def write_pictures(folder: Path, name: str, scenes: Scenes) -> int:
    """Writes a picture of each scene (PNG, each with a .txt beside it); gives how many were written.

    A file that is there already is left as it is: people may have put their own in its place.
    """
    return sum(
        write_example(folder / f"{name}-{row + 1:02d}.png", Image.fromarray(picture), caption(scenes.words(row)))
        for row, picture in enumerate(draw_scenes(scenes))
    )


def draw_scenes(scenes: Scenes, side: int = 128) -> np.ndarray:
    """Pictures of ``scenes`` as flux-tiny would draw them: uint8 [n, side, side, 3]."""
    values = {name: torch.from_numpy(value) for name, value in scenes.values.items()}
    pictures = draw(values, standard_luck(len(scenes)), side, side)
    return ((pictures + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def prepare(volume: Volume) -> list[Path]:
    """Puts the jobs and their pictures on the volume, where they are not there yet; gives the jobs' paths."""
    volume.create()
    draw_datasets(volume)
    prompts = [*new_prompts(6), *known_prompts(6)]
    paths = []
    for name, settings in zip(JOBS, (FULL, LORA), strict=True):
        paths.append(volume.jobs / f"{name}.yaml")
        if not paths[-1].exists():
            write_atomically(paths[-1], job_text(name, settings, prompts))
    return paths


def draw_datasets(volume: Volume) -> None:
    for draw_pictures, folder in ((draw_hearts, "hearts"), (draw_familiar, "familiar")):
        if written := draw_pictures(volume.datasets / folder):
            print(f"drew {written} pictures with captions in {volume.datasets / folder}")


def job_text(name: str, settings: Mapping[str, Any], prompts: Sequence[str]) -> str:
    """The job file of a run: ``settings`` are FULL's or LORA's."""
    listed = "\n".join(f'    - "{prompt}"' for prompt in prompts)
    return JOB.format(name=name, prompts=listed, **settings)


def summary(run: RunFolder) -> list[str]:
    """Where the run left what, and its figures, in lines for people."""
    lines = [f"everything of this run: {run.root}"]
    kinds = {
        "output": sorted(run.output.glob("*.safetensors")),
        "states": sorted(run.states.glob("step-*")),
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


def sheet(volume: Volume, columns: int = 8) -> Image.Image:
    """One picture of everything: the training pictures, then for each run its samples before, at each state, after."""
    rows = [sorted((volume.datasets / "hearts").glob("*.png"))[:columns]]
    for name in JOBS:
        samples = volume.run(name).samples
        for step in sorted({path.name.rpartition("-")[0] for path in samples.glob("step-*.png")}):
            rows.append(sorted(samples.glob(f"{step}-*.png"))[:columns])
    picture = Image.new("RGB", (columns * 132 + 4, len(rows) * 132 + 4), "white")
    for y, row in enumerate(rows):
        for x, path in enumerate(row):
            with Image.open(path) as image:
                picture.paste(image.convert("RGB").resize((128, 128)), (4 + 132 * x, 4 + 132 * y))
    return picture


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tiny.demo", description="Teaches flux-tiny a new thing.")
    parser.add_argument("--volume", type=Path, default=Path("demo/volume"), help="a folder; made where it is not there")
    volume = Volume(parser.parse_args(arguments).volume.absolute())
    jobs = prepare(volume)
    from entrypoint.run import run_job  # late: the pictures are drawn before anything heavy is imported

    for job in jobs:
        code = run_job(job, volume.root)
        print()
        print("\n".join(summary(volume.run(job.stem))))
        if code != DONE:
            print(f"{job.stem} ended with code {code}, as said above. Another start goes on from its last state.")
            return code
    judge = load_judge()
    for name in JOBS:
        print(
            "\n".join(
                [
                    "",
                    f"{name}, what the judge sees in its samples:",
                    *table(score_samples(judge, volume.run(name).samples)),
                ]
            )
        )
    sheet(volume).save(volume.root / "demo.png")
    print(f"\nbefore, at each state, after: {volume.root / 'demo.png'}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
