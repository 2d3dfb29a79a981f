"""CPU time and memory of what a run does with its list of pictures: ``python -m bench.cache [--pictures 100000]``.

The list is made up, no picture is opened, and the cache is filled with tensors of a few bytes: what is measured is what
grows with the number of pictures. (Looking through real ones is ``bench.scan``'s matter.) Needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from bootstrap.bases import FLUX_TINY
from bootstrap.cache import Cache, ShardWriter
from bootstrap.dataset import Dataset, Item
from bootstrap.order import epoch_order
from bootstrap.plan import make_plan
from bootstrap.pod import read_pod
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume
from bootstrap.wanted import Wanted
from bootstrap.weights import Weights
from jobs.schema import Job

R = TypeVar("R")
JOB = {"name": "many", "base": "flux-tiny", "method": "lora", "datasets": [{"path": "datasets/many"}]}
BUCKETS = ((512, 512), (576, 448), (448, 576), (640, 384))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Volume(Path(folder)), options.pictures)


def measure(volume: Volume, pictures: int) -> None:
    job, weights = Job.model_validate(JOB), no_weights()
    made_up = tuple(make_item(number) for number in range(pictures))
    data = Dataset(made_up, images=pictures, captions=pictures, parts=(), notes=()).summary()
    run = RunFile(job, make_plan(job, read_pod(volume.root), FLUX_TINY, data), weights, volume.root)
    print(f"{pictures} pictures{'CPU s':>24}{'MB more':>9}")
    timed("write items.jsonl", lambda: run.write(made_up))
    made_up = ()
    gc.collect()
    items = timed("read items.jsonl", run.read_items)
    timed("put an epoch in order", lambda: epoch_order(items, 1, 0, job.images_per_step, job.mixes_buckets))
    wanted = timed("tell what is wanted", lambda: Wanted.of(job, run.plan, items, weights))
    timed("cache as many tensors", lambda: fill(volume.cache, wanted))
    cache = timed("index the cache", lambda: Cache(volume.cache))
    missing = timed("tell what is missing", lambda: wanted.beyond(cache))
    assert not missing
    print(f"{len(list(volume.cache.glob('shard-*')))} shards, {resident():.0f} MB in all, torch included")


def make_item(number: int) -> Item:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    caption = f"picture {number}, with a caption of about a hundred letters, as people write them for such a picture"
    bucket = BUCKETS[number % len(BUCKETS)]
    return Item(f"datasets/many/some folder/picture {number}.jpg", digest, caption, 1, 1024, 768, bucket)


def no_weights() -> Weights:
    nowhere = Path("/nowhere")
    return Weights((), "bfl", nowhere, FLUX_TINY, nowhere, nowhere, nowhere, nowhere, nowhere, nowhere, 64, "", "bench")


def fill(root: Path, wanted: Wanted) -> None:
    small = torch.zeros(16, dtype=torch.float16)
    with ShardWriter(root) as writer:
        for key in wanted.crops:
            writer.add(key, {"mean": small, "spread": small})
        for key in wanted.texts:
            writer.add(key, {"prompt_embeds": small, "mask": small > 0, "pooled": small})


def timed(what: str, work: Callable[[], R]) -> R:
    memory, begun = resident(), time.process_time()
    result = work()
    print(f"{what:30}{time.process_time() - begun:9.2f}{resident() - memory:9.0f}", flush=True)
    return result


def resident() -> float:
    """This process's memory, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    main()
