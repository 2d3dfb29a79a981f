"""What is told of samples that show a broken model, and what is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.runs import make_job
from tiny.drawn import draw_dataset
from trainer.alarm import alarm_text, fault_of
from trainer.encode import load_vae


def picture(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def test_black_and_flat_pictures() -> None:
    chance = np.random.default_rng(0)
    grain = chance.normal(0, 1, (512, 512, 3))
    assert fault_of(picture(np.abs(grain) + 1)) == "black"
    assert fault_of(picture(grain + 128)) == "flat"
    assert fault_of(picture(grain + 255)) == "flat"


def test_noise_and_what_a_vae_makes_of_it(flux_tiny: Path) -> None:
    assert fault_of(picture(np.random.default_rng(0).uniform(0, 255, (512, 512, 3)))) == "pure noise"
    latent = torch.randn(1, 16, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        pixels = load_vae(flux_tiny / "vae", torch.device("cpu")).decode(latent)[0][0]
    assert fault_of(picture((pixels.permute(1, 2, 0).numpy() + 1) * 127.5)) == "pure noise"


def test_pictures_of_anything_are_fine(tmp_path: Path) -> None:
    draw_dataset(tmp_path / "drawn", 8)
    for file in sorted((tmp_path / "drawn").rglob("*")):
        if file.suffix != ".txt" and file.is_file():
            with Image.open(file) as image:
                assert fault_of(image.resize((512, 512))) == "", file
    # A texture of squares, grainy all over; and a light spot on black.
    chance = np.random.default_rng(0)
    squares = np.kron(chance.uniform(60, 200, (9, 9, 1)), np.ones((64, 64, 3)))
    assert fault_of(picture(squares + chance.normal(0, 25, squares.shape))) == ""
    dark = np.zeros((512, 512, 3))
    dark[100:140, 200:240] = 200
    assert fault_of(picture(dark)) == ""


def test_small_pictures_are_not_called_noise() -> None:
    assert fault_of(picture(np.random.default_rng(0).uniform(0, 255, (128, 128, 3)))) == ""


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"base": "black-forest-labs/FLUX.1-dev", "learning_rate": 1e-2}, "learning_rate: 0.01 is for method full so"),
        ({"guidance": 3.5}, "guidance: 3.5 in training washes the model out"),
        ({"guidance": 3.5}, "learning_rate (1e-05) too high for AdamW8bit"),
        ({}, "learning_rate (1e-05) too high for AdamW8bit"),
    ],
)
def test_the_alarm_names_the_settings_that_cause_it(keys: dict[str, object], told: str) -> None:
    text = alarm_text(250, {1: "black", 2: "flat"}, 3, make_job(**keys))
    assert text.startswith("2 of 3 samples of step 250 are black and flat. Usual causes")
    assert told in text


def test_the_alarm_names_nothing_that_breaks_no_model() -> None:
    text = alarm_text(6, {0: "black"}, 1, make_job(steps=12, warmup=100, learning_rate=0.3))
    assert "warmup" not in text
    assert "Usual causes: learning_rate (0.3) too high" in text
