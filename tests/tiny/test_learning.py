"""That training teaches: the demo's two jobs must reach their scores, by the judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bootstrap.volume import Volume
from tests.training import shared_folder, trained
from tiny.demo import FULL, LORA, draw_datasets, job_text
from tiny.judge import load_judge
from tiny.score import known_prompts, new_prompts, score_samples

PROMPTS = 16
LIMIT = 600.0  # seconds: one took 260 on an older processor


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Volume:
    def fill(root: Path) -> None:
        volume = Volume(root)
        volume.create()
        draw_datasets(volume)
        (volume.models / "flux-tiny").symlink_to(flux_tiny)

    make: Callable[[Path], object] = fill
    return Volume(shared_folder(tmp_path_factory, "hearts", make))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
def test_the_demo_teaches_a_shape_and_a_look_and_little_is_forgotten(settings: dict[str, Any], volume: Volume) -> None:
    prompts = [*new_prompts(PROMPTS), *known_prompts(PROMPTS)]
    job = yaml.safe_load(job_text(f"learns-{settings['method']}", settings, prompts))
    job |= {"plan": {"processes": 1}, "caption_dropout": 0.0}
    scores = score_samples(load_judge(), trained(volume, limit=LIMIT, **job).run.folder.samples)
    before, after = "step-000000", f"step-{settings['steps']:06d}"
    assert scores[f"{before}, known words"].all >= 0.9
    assert scores[f"{before}, the new word"].shares["shape"] == 0
    assert scores[f"{after}, the new word"].shares["shape"] >= 0.7
    assert scores[f"{after}, the new word"].shares["texture"] >= 0.6
    assert scores[f"{after}, known words"].all >= scores[f"{before}, known words"].all - 0.13  # two pictures
