"""What the GPU benchmark measures: real-size FLUX on random weights, each case a job as a user would write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    job: dict[str, Any]  # beside name, base, datasets
    size: int  # pixels, square
    steps: int = 20
    card_gib: float | None = None  # GiB of a smaller card that may be filled, CUDA context included; None: this card's
    host_gib: float | None = None  # of the RAM that a pod with such a card has; None: this machine's
    kohya: float | None = None  # seconds per step of kohya's trainer on an H200, measured 2026-11 (s/it, batch 1)
    at_least: float | None = None  # seconds per step on an H200 that this is to be no slower than
    aim: float | None = None

    @property
    def images(self) -> int:
        return int(self.job["images_per_step"])

    def holds(self, seconds: float) -> bool | None:
        """Whether a step is as fast as it is to be at least; None where nothing was set."""
        return None if self.at_least is None else seconds <= self.at_least


def at_rate(images: int, per_second: float) -> float:
    """Seconds of a step, where the target is one of images per second."""
    return images / per_second


def full(size: int, images: int, **more: Any) -> dict[str, Any]:
    return {"method": "full", "resolution": size, "images_per_step": images, "warmup": 0} | more


def lora(size: int, images: int, **more: Any) -> dict[str, Any]:
    return {"method": "lora", "resolution": size, "images_per_step": images, "warmup": 0, "lora": {"rank": 16}} | more


CASES = {
    case.name: case
    for case in (
        Case("full-1024", full(1024, 1), 1024, kohya=1.37, at_least=0.48, aim=0.40),
        Case("full-1024-checkpointing", full(1024, 1, plan={"checkpointing": True}), 1024, kohya=1.37),
        Case("full-512x4", full(512, 4), 512, at_least=at_rate(4, 7.8), aim=at_rate(4, 9)),
        # A pod with a card of 48 GB, of which 44.5 GiB may be filled, and of 24 GB: 22.8. kohya's 1.33 is Adafactor's.
        Case(
            "full-1024-48gb",
            full(1024, 1),
            1024,
            steps=14,
            card_gib=44.5,
            host_gib=45,
            kohya=1.33,
            at_least=0.62,
            aim=0.54,
        ),
        Case(
            "full-512x8-48gb",
            full(512, 8, optimizer="PagedAdamW8bit"),
            512,
            steps=12,
            card_gib=44.5,
            host_gib=45,
            at_least=at_rate(8, 6),
            aim=at_rate(8, 7),
        ),
        Case("full-1024-24gb", full(1024, 1), 1024, 14, card_gib=22.8, host_gib=60, at_least=1.2, aim=0.8),
        Case("lora-1024", lora(1024, 1), 1024, kohya=1.05, at_least=0.40, aim=0.33),
        # What these cost beside lora-1024.
        Case("lora-1024-dora", lora(1024, 1, lora={"rank": 16, "dora": True}), 1024, 14),
        Case("lora-1024-dropout", lora(1024, 1, lora={"rank": 16, "dropout": 0.1}), 1024, 14),
        # Cards of 20, 16 and 12 GB.
        Case("lora-1024-int8", lora(1024, 1, plan={"base_precision": "int8"}), 1024, 14, card_gib=19.1),
        Case("lora-1024-fp8", lora(1024, 1, plan={"base_precision": "fp8"}), 1024, 14, card_gib=19.1),
        # Products in fp8, whose fidelity bench.fidelity shows.
        Case("full-1024-fp8-rowwise", full(1024, 1, plan={"products": "fp8-rowwise"}), 1024, 14),
        Case("full-1024-fp8-tensorwise", full(1024, 1, plan={"products": "fp8-tensorwise"}), 1024, 14),
        Case("lora-1024-fp8-rowwise", lora(1024, 1, plan={"products": "fp8-rowwise"}), 1024, 14),
        Case("lora-1024-fp8-tensorwise", lora(1024, 1, plan={"products": "fp8-tensorwise"}), 1024, 14),
        Case("lora-1024-16gb", lora(1024, 1), 1024, 14, card_gib=15.2, at_least=0.8, aim=0.6),
        Case("lora-1024-nf4", lora(1024, 1), 1024, 14, card_gib=11.2, at_least=0.8, aim=0.6),
    )
}

# What each of several GPUs does, measured on one of them alone as well (bench/gpus.py).
EACH_GPU = {
    case.name: case
    for case in (
        replace(CASES["full-1024"], steps=12),
        replace(CASES["full-512x4"], steps=12),
        Case("full-1024x4", full(1024, 4), 1024, 10),
        replace(CASES["lora-1024"], steps=12),
    )
}


# Measured where their names are asked for: what a round of validation takes, with compiled blocks in between, and what
# an average of the weights costs beside full-1024 and lora-1024; of two in 20 steps it follows the weights.
APART = {
    case.name: case
    for case in (
        Case("full-512x4-validated", full(512, 4, validation={"path": "none", "every": 5}), 512),
        Case("full-1024-ema", full(1024, 1, ema={}), 1024),
        Case("full-1024-ema-80gb", full(1024, 1, ema={}), 1024, card_gib=75, host_gib=100),
        Case("lora-1024-ema", lora(1024, 1, ema={}), 1024),
        Case("lora-1024-validated", lora(1024, 1, validation={"path": "none", "every": 5}), 1024),
    )
}


def find_case(name: str) -> Case:
    """A case by its name; with ``-x2`` behind it, as much on each of two GPUs. Raises ValueError for no case."""
    if together := re.fullmatch(r"(.+)-x(\d+)", name):
        case, gpus = EACH_GPU[together[1]], int(together[2])
        return replace(case, name=name, job=case.job | {"images_per_step": case.job["images_per_step"] * gpus})
    every = APART | CASES | EACH_GPU
    if name not in every:
        raise ValueError(f"no case {name}; there are {', '.join(every)}")
    return every[name]
