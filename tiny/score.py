"""The judge's table: ``python -m tiny.score`` draws prompts with stock diffusers and counts what is right in them.

``--base FOLDER`` scores another folder in the hub's layout in place of flux-tiny, ``--lora FILE`` an adapter on it;
``--samples FOLDER`` draws nothing and judges pictures that a run left, by the prompts inside them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bootstrap.flux_tiny import TEXT_TOKENS, make_flux_tiny
from tiny.judge import NOT_JUDGED, Judge, load_judge, right
from tiny.scenes import ATTRIBUTES, KNOWN, UNSEEN, Scenes, caption, random_scenes, read_captions
from trainer.processor import use_processor

SIDE = 128
STEPS = 20
GUIDANCE = 3.5
AT_ONCE = 8  # pictures that one core draws together


@dataclass(frozen=True)
class Score:
    """The share of pictures that are right, in each attribute and in ``all`` at once."""

    pictures: int
    shares: Mapping[str, float]

    @classmethod
    def of(cls, judge: Judge, pictures: torch.Tensor, scenes: Scenes) -> Score:
        verdict = right(judge, pictures, scenes)
        return cls(len(pictures), {name: float(ok.mean()) for name, ok in verdict.items()})

    @property
    def all(self) -> float:
        return self.shares["all"]

    @property
    def taught(self) -> float:
        """Of the attributes that fine-tuning teaches alone."""
        return min(self.shares[name] for name in UNSEEN)


def known_prompts(count: int, seed: int = 7) -> list[str]:
    """Captions of scenes as pretraining has seen them, of seeds that it has not."""
    scenes = random_scenes(np.random.default_rng(seed), count, among=KNOWN)
    return [caption(scenes.words(row)) for row in range(count)]


def new_prompts(count: int, seed: int = 8) -> list[str]:
    """Captions with the shape and the look that only fine-tuning teaches."""
    scenes = random_scenes(np.random.default_rng(seed), count, UNSEEN, among=KNOWN)
    return [caption(scenes.words(row)) for row in range(count)]


def draw_prompts(pipeline: Any, prompts: Sequence[str], seed: int = 0, guidance: float = GUIDANCE) -> torch.Tensor:
    """What a stock pipeline draws, a seed for each prompt: [prompts, 3, 128, 128] in -1 .. 1."""
    drawn = []
    for first in range(0, len(prompts), AT_ONCE):
        some = list(prompts[first : first + AT_ONCE])
        seeds = [torch.Generator().manual_seed(seed + first + i) for i in range(len(some))]
        images = pipeline(
            some, width=SIDE, height=SIDE, num_inference_steps=STEPS, guidance_scale=guidance, generator=seeds,
            max_sequence_length=TEXT_TOKENS, output_type="pt",
        ).images  # fmt: skip
        drawn.append(images.float().cpu() * 2 - 1)
    return torch.cat(drawn)


def load_pipeline(folder: Path, lora: Path | None = None) -> Any:
    """Stock diffusers' pipeline in bf16, without progress bars, and quick on any processor."""
    import diffusers
    import transformers
    from diffusers import FluxPipeline

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    pipeline: Any = FluxPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    use_processor()
    if lora:
        pipeline.load_lora_weights(lora)
    return pipeline


def read_samples(paths: Iterable[Path]) -> tuple[torch.Tensor, list[str]]:
    """Pictures of ``samples/`` with the prompts written in them: [n, 3, 128, 128] in -1 .. 1."""
    pictures, prompts = [], []
    for path in paths:
        with Image.open(path) as image:
            prompts.append(str(image.info["prompt"]))
            pixels = torch.from_numpy(np.array(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)))
        pictures.append(pixels.permute(2, 0, 1).float() / 127.5 - 1)
    return torch.stack(pictures), prompts


def score_prompts(judge: Judge, pictures: torch.Tensor, prompts: Sequence[str]) -> Score:
    return Score.of(judge, pictures, read_captions(prompts))


def is_new(prompt: str) -> bool:
    return UNSEEN["shape"] in prompt


def table(rows: Mapping[str, Score]) -> list[str]:
    """One line for each row, its figures in per cent."""
    wide = max(map(len, rows), default=0)
    names = ["all", *(name for name in ATTRIBUTES if name not in NOT_JUDGED)]
    head = f"{'right, in %':{wide}}  pictures  " + "  ".join(f"{name.replace('_', ' '):>7}" for name in names)
    lines = [head]
    for title, score in rows.items():
        figures = "  ".join(f"{100 * score.shares[name]:{max(7, len(name))}.1f}" for name in names)
        lines.append(f"{title:{wide}}  {score.pictures:8}  {figures}")
    return lines


def score_samples(judge: Judge, folder: Path) -> dict[str, Score]:
    """Of a run's ``samples/``: for each step its known and its new prompts."""
    rows: dict[str, Score] = {}
    for step in sorted({path.name.rpartition("-")[0] for path in folder.glob("step-*.png")}):
        kinds = score_by_kind(judge, *read_samples(sorted(folder.glob(f"{step}-*.png"))))
        rows |= {f"{step}, {kind}": score for kind, score in kinds.items()}
    return rows


def score_by_kind(judge: Judge, pictures: torch.Tensor, prompts: Sequence[str]) -> dict[str, Score]:
    """Of the prompts of known words, and of those with the new one; a kind that there is none of is left out."""
    rows = {}
    for kind, new in (("known words", False), ("the new word", True)):
        chosen = [i for i, prompt in enumerate(prompts) if is_new(prompt) == new]
        if chosen:
            rows[kind] = score_prompts(judge, pictures[chosen], [prompts[i] for i in chosen])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tiny.score", description="The judge's table.")
    parser.add_argument("--base", type=Path, help="a folder in the hub's layout; flux-tiny by default")
    parser.add_argument("--lora", type=Path, help="an adapter on it")
    parser.add_argument("--samples", type=Path, help="a run's samples/, judged as they are")
    parser.add_argument("--prompts", type=int, default=200, help="of known words, and half as many of the new one")
    options = parser.parse_args(arguments)
    judge = load_judge()
    if options.samples:
        rows = score_samples(judge, options.samples)
        if not rows:
            print(f"{options.samples} holds no pictures called step-*.png", file=sys.stderr)
            return 1
        print("\n".join(table(rows)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = options.base or Path(folder) / "flux-tiny"
        if not options.base:
            make_flux_tiny(base)
        pipeline = load_pipeline(base, options.lora)
        name = (options.lora or base).stem
        rows = {}
        for kind, prompts in (
            ("known words", known_prompts(options.prompts)),
            ("the new word", new_prompts(options.prompts // 2)),
        ):
            rows[f"{name}, {kind}"] = score_prompts(judge, draw_prompts(pipeline, prompts), prompts)
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
