"""A run that is done, as the trainer leaves it, without one: weights are a few kilobytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import save

from bootstrap.outcome import DONE, Outcome
from bootstrap.state import MODEL_FILE, OPTIMIZER_FILE, folder_name, write_manifest
from bootstrap.volume import RunFolder, Volume
from jobs.load import parse_job
from tests.runs import make_run
from tests.states import make_manifest

STEPS = (5, 10)


def finish_run(root: Path, *, size: int = 150_000, **keys: Any) -> tuple[Volume, Path]:
    """The volume with ``runs/flowers``, and the job's file; ``keys`` of the job beside what it must have."""
    volume = Volume(root)
    volume.create()
    job: dict[str, Any] = {"name": "flowers", "base": "flux-tiny", "method": "full", "steps": STEPS[-1]}
    job |= {"datasets": [{"path": "datasets/d", "trigger": "pprflwr"}], "output": {"hub": "me/flowers"}} | keys
    file = volume.jobs / "flowers.yaml"
    file.write_text(json.dumps(job))
    run = make_run(root, parse_job(file.read_text(), file.name).job)
    folder = run.folder
    for step in STEPS:
        save_state(folder, step, size)
    draw_samples(folder)
    run.write(())
    folder.job.write_bytes(file.read_bytes())
    folder.output.mkdir()
    os.link(folder.states / folder_name(STEPS[-1]) / MODEL_FILE, folder.output / "flowers.safetensors")
    Outcome(DONE, f"all {STEPS[-1]} steps are done", STEPS[-1]).write(folder.outcome)
    return volume, file


def save_state(folder: RunFolder, step: int, size: int = 150_000) -> Path:
    told = {"fluxpod.step": str(step), "fluxpod.job": "d1gest"}
    model = save({"weight": np.random.default_rng(step).integers(0, 255, size, np.uint8)}, told)
    path = folder.states / folder_name(step)
    path.mkdir(parents=True)
    (path / MODEL_FILE).write_bytes(model)
    (path / OPTIMIZER_FILE).write_bytes(b"moments")
    write_manifest(path, make_manifest({MODEL_FILE: model, OPTIMIZER_FILE: b"moments"}, step))
    return path / MODEL_FILE


def draw_samples(folder: RunFolder) -> None:
    folder.samples.mkdir(parents=True)
    for step in (0, *STEPS):
        notes = PngInfo()
        notes.add_itxt("prompt", "pprflwr in the rain")
        notes.add_itxt("settings", f"step {step}, seed 42")
        Image.new("RGB", (32, 32), (step, 90, 30)).save(folder.samples / f"step-{step:06d}-00.png", pnginfo=notes)
