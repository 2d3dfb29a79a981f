"""From (step) to what each pass of this process computes on: noisy latents, their targets, texts.

Everything random is looked up by (seed, step, place), on the CPU in float32, so the numbers are the same on any card
and any number of GPUs. The next steps are prepared by threads while the GPU works; there are no worker processes, so a
container's small /dev/shm is no matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from bootstrap.cache import Cache
from bootstrap.dataset import Item
from bootstrap.draws import Use, draw, draw_of
from bootstrap.order import Step, StepOrder
from bootstrap.run_file import RunFile
from bootstrap.wanted import Crop, crop_at, crop_tried, latent_key, mask_key, text_at, text_key, text_tried
from jobs.schema import Job
from trainer.flow import image_ids, mask_weights, noise_level, pack
from trainer.order import Pass, share_out

AHEAD = 3  # steps prepared in advance


@dataclass(frozen=True)
class Latents:
    """How FLUX's latents relate to the VAE's: (vae - shift) * scale. From the VAE's configuration."""

    shift: float
    scale: float


@dataclass(frozen=True)
class Batch:
    """One pass of one process.

    ``weights`` are those of the images' datasets, or 0 for a dummy that only keeps the processes in step.
    """

    noisy: torch.Tensor  # [batch, image tokens, 64]
    target: torch.Tensor  # the same
    sigma: torch.Tensor  # [batch]
    text: torch.Tensor  # [batch, text tokens, text size]
    pooled: torch.Tensor  # [batch, pooled size]
    text_mask: torch.Tensor  # [batch, text tokens], bool
    mask: torch.Tensor  # [batch, image tokens, 4]: what each place of the latent counts in the loss
    image_ids: torch.Tensor  # [image tokens, 3]
    weights: torch.Tensor  # [batch]
    # [batch, 2]: what an adapter's dropout is drawn by (trainer/dropout.py); empty where nothing is dropped.
    dropout_keys: torch.Tensor = field(default_factory=lambda: torch.zeros((0, 2), dtype=torch.int64))

    def to(self, device: torch.device) -> Batch:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return Batch(**moved)

    def pinned(self) -> Batch:
        return Batch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass(frozen=True)
class StepData:
    """What one process does in one global step."""

    batches: tuple[Batch, ...]
    images: int  # of the whole global step, all processes
    pixels: int  # of all of these


class TrainingData:
    """The images of every step, for one process."""

    def __init__(self, run: RunFile, items: Sequence[Item], latents: Latents, rank: int):
        self.job: Job = run.job
        self.items = items
        self.latents = latents
        self.rank = rank
        self.processes, self.images_per_pass = run.plan.processes, run.plan.images_per_pass
        self.threads = max(1, run.plan.workers)
        self.pin = run.plan.device == "cuda"
        self.buckets = [item.bucket for item in items]
        self.weights = run.weights
        self.order = StepOrder(items, run.job, run.plan.steps_per_epoch)
        self.cache = Cache(run.cache)

    def step(self, index: int) -> Step:
        """The items of global step ``index``, counted from 0 over all epochs; a pure function of the seed."""
        return self.order.step(index)

    def prepared(self, first: int, stop: int) -> Iterator[StepData]:
        """The data of steps ``first`` to ``stop``, in order, prepared ahead."""
        with ThreadPoolExecutor(self.threads, thread_name_prefix="data") as pool:
            waiting = [pool.submit(self.prepare, index) for index in range(first, min(first + AHEAD, stop))]
            try:
                for index in range(first, stop):
                    data = waiting.pop(0).result()
                    if index + AHEAD < stop:
                        waiting.append(pool.submit(self.prepare, index + AHEAD))
                    yield data
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def prepare(self, index: int) -> StepData:
        step = self.step(index)
        batches = []
        for shares in share_out(step, self.buckets, self.processes, self.images_per_pass):
            mine = shares[self.rank]
            batches.append(self._batch(index, mine) if mine else self._dummy(index, shares))
        return StepData(tuple(batches), len(step), self.pixels(index))

    def pixels(self, index: int) -> int:
        """Of all images of a step."""
        return sum(self.buckets[item][0] * self.buckets[item][1] for item in self.step(index))

    def _batch(self, index: int, share: Pass) -> Batch:
        images = [
            self.example(index, place, self.items[item]) for place, item in zip(share.places, share.items, strict=True)
        ]
        return self.stacked(images, share.bucket, [self.weight(self.items[item]) for item in share.items])

    def weight(self, item: Item) -> float:
        return self.job.datasets[item.dataset].weight

    def stacked(
        self, images: Sequence[dict[str, torch.Tensor]], bucket: tuple[int, int], weights: Sequence[float]
    ) -> Batch:
        """Images of one bucket as a batch, in pinned memory where there is a GPU."""
        stacked = {name: torch.stack([image[name] for image in images]) for name in images[0]}
        width, height = bucket
        batch = Batch(image_ids=image_ids(height // 8, width // 8), weights=torch.tensor(weights), **stacked)
        return batch.pinned() if self.pin else batch

    def _dummy(self, index: int, shares: Sequence[Pass | None]) -> Batch:
        """One image of a neighbour's, weighing nothing: the smallest, since all wait for the largest."""
        others = [share for share in shares if share]
        smallest = min(others, key=lambda share: share.bucket[0] * share.bucket[1])
        one = Pass(smallest.bucket, smallest.places[:1], smallest.items[:1])
        batch = self._batch(index, one)
        return replace(batch, weights=torch.zeros_like(batch.weights))

    def example(self, step: int, place: int, item: Item) -> dict[str, torch.Tensor]:
        """One image as it is seen at (step, place): its latent, noise, noise level and caption."""
        job, seed = self.job, self.job.seed
        width, height = item.bucket
        sigma = noise_level(
            draw(seed, Use.NOISE_LEVEL, step, place),
            job.timestep_sampling,
            width // 16 * (height // 16),
            discrete_flow_shift=job.discrete_flow_shift,
            sigmoid_scale=job.sigmoid_scale,
        )
        crop, text = crop_at(job, item, step, place), text_at(job, item, step, place)
        return self._mixed(item, crop, text, sigma, lambda use: draw(seed, use, step, place))

    def tried(self, item: Item, level: int, levels: int) -> dict[str, torch.Tensor]:
        """One image of validation at the ``level``-th of its noise levels, of which each of ``levels`` equal parts of 0
        to 1 has one: the same at every step, in every run."""
        sigma = (level + draw_of(item.digest, Use.VALIDATION_LEVEL, level).random()) / levels
        crop, text = crop_tried(self.job, item), text_tried(self.job, item)
        return self._mixed(item, crop, text, sigma, lambda use: draw_of(item.digest, use, level))

    def _mixed(
        self, item: Item, crop: Crop, caption: str, sigma: float, chance: Callable[[Use], np.random.Generator]
    ) -> dict[str, torch.Tensor]:
        """An image with noise of level ``sigma``, what is to be predicted, and its caption."""
        cached = self.cache.read(latent_key(item, crop, self.weights))
        mean, spread = cached["mean"].float(), cached["spread"].float()
        within = torch.from_numpy(chance(Use.LATENT).standard_normal(mean.shape, dtype="float32"))
        latent = (mean + spread * within - self.latents.shift) * self.latents.scale
        noise = torch.from_numpy(chance(Use.NOISE).standard_normal(mean.shape, dtype="float32"))
        text = self.cache.read(text_key(caption, self.weights, self.job.t5_mask))
        return {
            "noisy": pack(((1 - sigma) * latent + sigma * noise)[None])[0].to(torch.bfloat16),
            "target": pack((noise - latent)[None])[0],
            "sigma": torch.tensor(sigma, dtype=torch.float32),
            "text": text["prompt_embeds"],
            "pooled": text["pooled"],
            "text_mask": text["mask"],
            "mask": self._mask(item, crop),
            "dropout_keys": torch.from_numpy(chance(Use.ADAPTER_DROPOUT).integers(2**32, size=2)),
        }

    def _mask(self, item: Item, crop: Crop) -> torch.Tensor:
        width, height = item.bucket
        if not item.mask:
            return torch.ones(height // 16 * (width // 16), 4)
        entry = self.job.datasets[item.dataset]
        mask = self.cache.read(mask_key(item, crop))["mask"].float() / 255
        return mask_weights(mask, entry.mask_floor, entry.mask_normalize)
