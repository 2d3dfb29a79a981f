"""Which attention gets right gradients on this card, by the trainer's own self-check.

``python -m bench.gradients`` prints a line for each attention that trainer/attention.py knows, compiled as in training,
at several image sizes. Exit status 1 where the one that training would take, the first that fits, is wrong.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch

from bootstrap.flux_shape import FluxShape
from bootstrap.plan import DataSummary, Plan, make_plan
from bootstrap.pod import Gpu, Pod
from jobs.schema import Job
from trainer.attention import ATTENTIONS, candidates
from trainer.self_check import CardError, Size, check
from trainer.world import World

# 512, 768 and 1024 px, and 832 x 448, whose 1456 + 512 tokens end in the middle of a block of 128.
SIZES = ((512, 512), (768, 768), (1024, 1024), (832, 448))
TEXT_TOKENS = 512


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gradients", description=__doc__)
    parser.add_argument("--attention", default="", help="comma-separated names; all by default")
    parser.add_argument("--images", type=int, default=1, help="in one pass (1)")
    parser.add_argument("--t5-mask", action="store_true", help="with a mask over the text's padding")
    parser.add_argument("--eager", action="store_true", help="not compiled")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    job = Job.model_validate(
        {"name": "gradients", "base": "random", "method": "full", "datasets": [{"path": "none"}]}
        | {"t5_mask": options.t5_mask}
    )
    plan, world = replace(plan_for_one_card(job), compile=not options.eager), World(0, 1, device, None)  # type: ignore[arg-type]
    sizes = [Size(width, height, options.images, TEXT_TOKENS) for width, height in SIZES]
    first = candidates(device, options.t5_mask)[0]
    names = options.attention.split(",") if options.attention else [attention.name for attention in ATTENTIONS]
    ok = True
    for attention in (attention for attention in ATTENTIONS if attention.name in names):
        if why := attention.cannot(device, options.t5_mask):
            print(f"{attention.name:12} cannot run here: {why}", flush=True)
            continue
        try:
            verdict = check(attention, job, plan, FluxShape(), sizes, world)
        except CardError as error:
            print(f"{attention.name:12} WRONG  {error}; what comes after it was not checked", flush=True)
            return 1
        told = "right" if verdict.right else "WRONG"
        print(
            f"{attention.name:12} {told}  error {verdict.error:.1e}  {verdict.seconds:5.1f} s  {verdict.why}",
            flush=True,
        )
        ok &= verdict.right or attention is not first
    return 0 if ok else 1


def plan_for_one_card(job: Job) -> Plan:
    """How training runs on one large card, whatever this one has."""
    pod = Pod((Gpu(0, "NVIDIA H200", 140 << 30),), cpus=8, memory=1 << 40, shm=0, disk_free=1 << 50)
    return make_plan(job, pod, FluxShape(), DataSummary(1, 1, ((1024, 1024, 1),)))


if __name__ == "__main__":
    sys.exit(main())
