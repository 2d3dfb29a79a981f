"""Two processes train as one does, within the order of sums: full and LoRA, every kind of optimizer, with accumulation
and without, masks, steps of several sizes, shares of unequal size. More of it is in test_train.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bootstrap.volume import Volume
from tests.training import fill_volume, shared_folder, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DRIFT = 1e-2  # of a loss; see test_train.py
# Of the length of what was learned: sums have another order, and where a rule looks at signs (Lion), a gradient
# near zero may go the other way.
APART = {"AdamW": 0.02, "AdamW8bit": 0.1, "Lion8bit": 0.2, "Adafactor": 0.05, "torch.optim.RAdam": 0.02}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, flux_tiny_schnell: Path) -> Volume:
    bases = (flux_tiny, flux_tiny_schnell)
    volume = Volume(shared_folder(tmp_path_factory, "training", lambda root: fill_volume(root, *bases)))
    shared_folder(tmp_path_factory, "masked", lambda _: mask(volume))
    return volume


def mask(volume: Volume) -> None:
    """The drawn pictures, each with another part of it transparent."""
    shutil.copytree(volume.datasets / "drawn", folder := volume.datasets / "masked")
    for number, path in enumerate(sorted(folder.glob("*.png"))):
        picture = Image.open(path).convert("RGBA")
        picture.paste((0, 0, 0, 0), (0, 0, picture.width // 2, picture.height * (1 + number % 3) // 4))
        picture.save(path)


MASKED: dict[str, Any] = {"datasets": [{"path": "datasets/masked", "mask": "alpha", "mask_floor": 0.1}]}
ONE_BY_ONE: dict[str, Any] = {"images_per_pass": 1}


@pytest.mark.parametrize(
    ("method", "optimizer", "keys", "plan"),
    [
        ("full", "AdamW8bit", MASKED | {"images_per_step": 3}, ONE_BY_ONE),
        ("full", "AdamW", {"max_grad_norm": 1.0}, ONE_BY_ONE),
        ("lora", "AdamW8bit", {"images_per_step": 5}, ONE_BY_ONE),
        ("lora", "Lion8bit", MASKED, {}),
        ("lora", "Adafactor", MASKED | {"images_per_step": 3}, {}),
        ("lora", "torch.optim.RAdam", {"images_per_step": 3}, ONE_BY_ONE),
    ],
)
def test_two_are_one(method: str, optimizer: str, keys: dict[str, Any], plan: dict[str, Any], volume: Volume) -> None:
    common: dict[str, Any] = {"method": method, "optimizer": optimizer, "steps": 3, "warmup": 0} | keys
    common |= {"lora": {"rank": 4}} if method == "lora" else {}
    common |= {"learning_rate": 1e-4} if "Lion" in optimizer else {}
    name = f"{method}-{optimizer}-{len(keys)}"
    one, two = (trained(volume, name=f"{name}-of-{n}", plan=plan | {"processes": n}, **common) for n in (1, 2))
    assert two.values("lr") == one.values("lr")
    assert two.values("loss") == pytest.approx(one.values("loss"), rel=DRIFT)
    assert len(set(one.values("loss"))) == 3
    if method == "lora":  # a full model's weights move less than bf16 rounds; its losses tell
        ours, theirs = (flat(each.weights, "lora_up") for each in (one, two))  # they begin at zero
        assert (theirs - ours).norm() < APART[optimizer] * ours.norm()
        assert bool(ours.norm() > 0)


def flat(weights: dict[str, torch.Tensor], part: str) -> torch.Tensor:
    return torch.cat([weights[name].float().reshape(-1) for name in sorted(weights) if part in name])
