"""CPU time and memory of what happens to many pictures before the first step: ``python -m bench.data``.

Small pictures with captions are drawn into a folder that goes again; then they are looked through, twice, put in order,
and as many latents and texts of a few bytes are cached and indexed. Pictures and tensors are small, so what is measured
is what grows with their number. Needs no GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from bootstrap.bases import FLUX_TINY
from bootstrap.cache import Cache, ShardWriter
from bootstrap.dataset import scan
from bootstrap.order import epoch_order
from bootstrap.plan import make_plan
from bootstrap.pod import read_pod
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume
from bootstrap.wanted import Wanted
from bootstrap.weights import Weights
from jobs.schema import Job

R = TypeVar("R")
SIZES = ((96, 96), (112, 80), (80, 112), (128, 64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Volume(Path(folder)), options.pictures)


def measure(volume: Volume, pictures: int) -> None:
    volume.create()
    print(f"{'':34}{'CPU s':>9}{'MB more':>9}")
    timed("draw pictures and captions", lambda: draw(volume.datasets / "many", pictures))
    job = Job.model_validate(
        {
            "name": "many",
            "base": "flux-tiny",
            "method": "lora",
            "resolution": 96,
            "bucket_step": 16,
            "datasets": [{"path": "datasets/many", "wildcards": True}],
        }
    )
    timed("look through them", lambda: scan(job, volume, remember=True))
    dataset = timed("look through them again", lambda: scan(job, volume, remember=True))
    nowhere = Path("/nowhere")
    weights = Weights(
        (), "bfl", nowhere, FLUX_TINY, nowhere, nowhere, nowhere, nowhere, nowhere, nowhere, 64, "", "bench"
    )
    plan = replace(make_plan(job, read_pod(volume.root), FLUX_TINY, dataset.summary()), steps=pictures)
    run = RunFile(job, plan, weights, volume.root)
    timed("write items.jsonl", lambda: run.write(dataset.items))
    items = timed("read it", run.read_items)
    steps = timed("put an epoch in order", lambda: epoch_order(items, 1, 0, job.images_per_step, job.mixes_buckets))
    assert sum(map(len, steps)) == len(items)
    wanted = timed("tell what is wanted", lambda: Wanted.of(job, plan, items, weights))
    timed(f"cache {len(wanted)} small tensors", lambda: fill(volume.cache, wanted))
    cache = timed("index the cache", lambda: Cache(volume.cache))
    missing = timed("tell what is missing", lambda: wanted.beyond(cache))
    assert not missing
    print(f"{len(list(volume.cache.glob('shard-*')))} shards")


def timed(what: str, work: Callable[[], R]) -> R:
    memory, begun = resident(), time.process_time()
    result = work()
    print(f"{what:34}{time.process_time() - begun:9.2f}{resident() - memory:9.0f}", flush=True)
    return result


def resident() -> float:
    """This process's memory, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def draw(folder: Path, pictures: int) -> None:
    folder.mkdir()
    chance = np.random.default_rng(1)
    for number in range(pictures):
        width, height = SIZES[number % len(SIZES)]
        pixels = chance.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(folder / f"{number:06}.jpg")
        (folder / f"{number:06}.txt").write_text(f"picture {number} in {{red|blue}}")


def fill(root: Path, wanted: Wanted) -> None:
    small = torch.zeros(16, dtype=torch.float16)
    with ShardWriter(root) as writer:
        for key in wanted.crops:
            writer.add(key, {"mean": small, "spread": small})
        for key in wanted.texts:
            writer.add(key, {"prompt_embeds": small, "mask": small > 0, "pooled": small})


if __name__ == "__main__":
    main()
