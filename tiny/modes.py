"""The judge compares ways to train: ``python -m tiny.modes`` teaches flux-tiny the new thing in each of them.

Every mode is the demo's job but for a few keys, and goes the product's own way; what its last samples show is judged.
The measure is plain PyTorch in float32 on the same pictures: no mode may be more than three points below it. Prints a
table, and ends with 1 where one is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from bootstrap.flux_tiny import TEXT_TOKENS
from bootstrap.lora_targets import target_layers
from bootstrap.outcome import DONE
from bootstrap.volume import Volume
from jobs.load import load_job
from jobs.schema import Job
from tiny.demo import FULL, LORA, draw_datasets, job_text
from tiny.judge import Judge, load_judge
from tiny.score import (
    Score,
    draw_prompts,
    known_prompts,
    load_pipeline,
    new_prompts,
    read_samples,
    score_by_kind,
    table,
)
from trainer.flow import image_ids, noise_level, pack
from trainer.schedule import make_schedule

WORST = 0.03  # below float32
PROMPTS = 100  # known ones, and as many new


@dataclass(frozen=True)
class Mode:
    """One of the demo's two jobs, with some other ``keys``."""

    settings: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    again: bool = False  # trained to the end, then once more from its middle state

    @property
    def measure(self) -> str:
        return f"{self.settings['method']}, float32"


def full(optimizer: str, pace: float = 1.0, processes: int = 1, again: bool = False) -> Mode:
    keys = {"optimizer": optimizer, "learning_rate": float(FULL["rate"]) * pace, "plan": {"processes": processes}}
    return Mode(FULL, keys if "Adam" in optimizer else keys | {"optimizer_args": {}}, again)


def lora(precision: str, processes: int = 1) -> Mode:
    return Mode(LORA, {"plan": {"processes": processes, "base_precision": precision}})


MODES = {
    "AdamW": full("AdamW"),
    "AdamW, 2 processes": full("AdamW", processes=2),
    "AdamW, resumed": full("AdamW", again=True),
    "AdamW8bit": full("AdamW8bit"),
    "PagedAdamW8bit": full("PagedAdamW8bit"),
    "Lion8bit": full("Lion8bit", 1 / 5),  # the paces of jobs/learning_rates.py
    "Adafactor": full("Adafactor", 50),
    "lora bf16": lora("bf16"),
    "lora bf16, 2 processes": lora("bf16", processes=2),
    "lora int8": lora("int8"),
    "lora fp8": lora("fp8"),
    "lora nf4": lora("nf4"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tiny.modes", description="The judge compares ways to train.")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), metavar="MODE")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args(arguments)
    volume, judge = Volume(options.folder or Path(tempfile.mkdtemp(prefix="fluxpod-modes-"))), load_judge()
    volume.create()
    draw_datasets(volume)
    rows: dict[str, dict[str, Score]] = {}
    for name in options.modes:
        before = [volume.run(folder_of(other)).samples for other in list(rows)[:1]]
        rows[name] = judged(judge, train(name, MODES[name], volume, before))
    for settings in (FULL, LORA):
        used = [name for name in options.modes if MODES[name].settings is settings]
        if used:
            pipeline = float32(load_job(job_path(volume, used[0])).job, volume)
            pictures = draw_prompts(pipeline, prompts())
            rows[MODES[used[0]].measure] = score_by_kind(judge, pictures, prompts())
    print("\n".join(table({f"{name}: {kind}": score for name, kinds in rows.items() for kind, score in kinds.items()})))
    found = worse(rows)
    print("\n".join(found))
    return 1 if found else 0


def prompts() -> list[str]:
    return [*new_prompts(PROMPTS, 18), *known_prompts(PROMPTS, 17)]


def folder_of(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def job_path(volume: Volume, name: str) -> Path:
    return volume.jobs / f"{folder_of(name)}.yaml"


def train(name: str, mode: Mode, volume: Volume, drawn: Sequence[Path]) -> Path:
    """Runs the mode's job to its end; gives the folder of its samples. What the untrained model draws is the same for
    all, and taken from ``drawn``."""
    from entrypoint.run import run_job  # late: it takes seconds, and --help should not

    run, middle = volume.run(folder_of(name)), int(mode.settings["steps"]) // 2
    run.samples.mkdir(parents=True, exist_ok=True)
    for picture in (path for folder in drawn for path in folder.glob("step-000000-*.png")):
        shutil.copy2(picture, run.samples)
    job = yaml.safe_load(job_text(folder_of(name), mode.settings, prompts()))
    job |= dict(mode.keys) | {"save": {"every": middle, "states": 2}, "sample": job["sample"] | {"every": 100_000}}
    for more in ({}, {"resume_from": middle}) if mode.again else ({},):
        job_path(volume, name).write_text(json.dumps(job | more, indent=2))  # JSON is YAML
        if (code := run_job(job_path(volume, name), volume.root)) != DONE:
            raise SystemExit(f"{name} ended with code {code}")
    return run.samples


def judged(judge: Judge, samples: Path) -> dict[str, Score]:
    """Of the last samples."""
    last = max(path.name.rpartition("-")[0] for path in samples.glob("step-*.png"))
    return score_by_kind(judge, *read_samples(sorted(samples.glob(f"{last}-*.png"))))


def worse(rows: Mapping[str, Mapping[str, Score]]) -> list[str]:
    """The modes that lose more than they may, told."""
    found = []
    for name in (name for name in rows if name in MODES):
        for kind, score in rows[name].items():
            least = rows[MODES[name].measure][kind].all - WORST
            if score.all < least - 1e-9:
                found.append(f"{name}: {score.all:.1%} of the prompts of {kind}, at least {least:.1%} wanted")
    return found


# ---- the measure ----


def float32(job: Job, volume: Volume) -> Any:
    """Stock diffusers' pipeline, fine-tuned by ``job`` in plain PyTorch: float32 weights, or peft's adapters, by
    torch's own AdamW, on the same pictures, with noise and an order of its own."""
    pipeline = load_pipeline(volume.models / job.base).to(torch.float32)
    model = pipeline.transformer
    if job.method == "lora":
        from peft import LoraConfig

        assert job.lora
        layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        model.requires_grad_(False)
        targets = target_layers(layers, job.lora.targets)
        model.add_adapter(LoraConfig(r=job.lora.rank, lora_alpha=job.lora.rank, target_modules=targets))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=job.weight_decay, **job.optimizer_args)
    assert job.steps
    factor, chance = make_schedule(job, job.steps), np.random.default_rng(1)
    latents, text, pooled = encoded(job, volume, pipeline)
    for step in range(job.steps):
        rows = torch.from_numpy(chance.choice(len(text), job.images_per_step))
        noise = torch.from_numpy(chance.standard_normal(latents[0][rows].shape, np.float32))
        fresh = torch.from_numpy(chance.standard_normal(noise.shape, np.float32))
        clean = pack((latents[0][rows] + latents[1][rows] * fresh) * pipeline.vae.config.scaling_factor)
        how = {"discrete_flow_shift": job.discrete_flow_shift, "sigmoid_scale": job.sigmoid_scale}
        sigma = torch.tensor([noise_level(chance, job.timestep_sampling, clean.shape[1], **how) for _ in rows])
        target = pack(noise) - clean
        velocity = model(
            clean + sigma[:, None, None] * target, text[rows], pooled[rows], sigma, image_ids(*noise.shape[2:]),
            torch.zeros(text.shape[1], 3), torch.ones(len(rows)), return_dict=False,
        )[0]  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * factor(step)
        optimizer.zero_grad()
        (velocity - target).square().mean().backward()
        optimizer.step()
    return pipeline


@torch.no_grad()
def encoded(
    job: Job, volume: Volume, pipeline: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Mean (less the VAE's shift) and spread of the latents of the job's pictures, and their captions' two encodings;
    once for each repeat."""
    files = [
        file
        for dataset in job.datasets
        for file in sorted((volume.root / str(dataset.path)).glob("*.png")) * dataset.repeats
    ]
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    latent = pipeline.vae.encode(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1).latent_dist
    captions = [file.with_suffix(".txt").read_text(encoding="utf-8").strip() for file in files]
    text, pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=TEXT_TOKENS)
    return (latent.mean - pipeline.vae.config.shift_factor, latent.std), text, pooled


if __name__ == "__main__":
    sys.exit(main())
