"""What the GPU benchmark measures: real-size FLUX on random weights, each case a job as a user would write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
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
    settings: dict[str, Any] = field(default_factory=dict)


def full(size: int, images: int, **more: Any) -> dict[str, Any]:
    return {"method": "full", "resolution": size, "images_per_step": images, "warmup": 0} | more


def lora(size: int, images: int, **more: Any) -> dict[str, Any]:
    return {"method": "lora", "resolution": size, "images_per_step": images, "warmup": 0, "lora": {"rank": 16}} | more


CASES = {
    case.name: case
    for case in (
        Case("full-1024", full(1024, 1), 1024, kohya=1.37),
        Case("full-1024-checkpointing", full(1024, 1, plan={"checkpointing": True}), 1024, kohya=1.37),
        Case("full-512x4", full(512, 4), 512),
        # A pod with a card of 48 GB, of which 44.5 GiB may be filled, and of 24 GB: 22.8.
        Case("full-1024-48gb", full(1024, 1), 1024, 14, card_gib=44.5, host_gib=45),
        Case("full-512x8-48gb", full(512, 8, optimizer="PagedAdamW8bit"), 512, 12, card_gib=44.5, host_gib=45),
        Case("full-1024-24gb", full(1024, 1), 1024, 14, card_gib=22.8, host_gib=60),
        Case("lora-1024", lora(1024, 1), 1024, kohya=1.05),
        Case(
            "lora-1024-int8", lora(1024, 1, plan={"base_precision": "int8"}), 1024, 14, card_gib=19.1
        ),  # of a 20 GB card
        Case("lora-1024-fp8", lora(1024, 1, plan={"base_precision": "fp8"}), 1024, 14, card_gib=19.1),
        Case("lora-1024-16gb", lora(1024, 1), 1024, 14, card_gib=15.2),
        Case("lora-1024-nf4", lora(1024, 1), 1024, 14, card_gib=11.2),  # of a 12 GB card
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


def find_case(name: str) -> Case:
    """A case by its name; with ``-x2`` behind it, as much on each of two GPUs. Raises ValueError for no case."""
    if together := re.fullmatch(r"(.+)-x(\d+)", name):
        case, gpus = EACH_GPU[together[1]], int(together[2])
        return replace(case, name=name, job=case.job | {"images_per_step": case.job["images_per_step"] * gpus})
    if name not in CASES | EACH_GPU:
        raise ValueError(f"no case {name}; there are {', '.join(CASES | EACH_GPU)}")
    return EACH_GPU.get(name) or CASES[name]
