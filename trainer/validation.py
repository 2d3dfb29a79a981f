"""Trying the model on pictures that it is not trained on.

Each image has its own noise and noise levels, the same in every round, in every run and on any number of processes, so
what changes from one round to the next is the model. Nothing of training is touched: no random state, no gradient. A
round is passes of the size that training's have; all processes make the same number of them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch
from diffusers import FluxTransformer2DModel

from bootstrap.dataset import Item
from bootstrap.held_out import tried
from bootstrap.inspection import in_order
from bootstrap.run_file import RunFile
from bootstrap.state import Validated
from bootstrap.validation import BANDS, Round, band_name, in_words, read_rounds
from bootstrap.wanted import crop_tried, latent_key, mask_key, text_key, text_tried
from trainer.data import AHEAD, Batch, TrainingData
from trainer.flow import image_losses
from trainer.metrics import Metrics, cut_after
from trainer.model import predict
from trainer.sample import evaluating
from trainer.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class View:
    """One image at one of its noise levels."""

    item: Item
    level: int


@dataclass(frozen=True)
class Turn:
    """What one process takes in one pass: views of one bucket, ``first`` being the number of the first among all. Where
    there are fewer than a pass holds, it is filled up with the last."""

    first: int
    views: tuple[View, ...]


def turns(views: Sequence[View], images_per_pass: int, processes: int) -> list[list[Turn]]:
    """For each pass, what each process takes; ``views`` are sorted by bucket. A process that has nothing left to do
    does the first turn of the pass once more, since a sharded model runs on all of them at once."""
    every: list[Turn] = []
    for _, of_bucket in groupby(range(len(views)), key=lambda number: views[number].item.bucket):
        numbers = list(of_bucket)
        for start in range(0, len(numbers), images_per_pass):
            mine = numbers[start : start + images_per_pass]
            every.append(Turn(mine[0], tuple(views[number] for number in mine)))
    passes = [every[start : start + processes] for start in range(0, len(every), processes)]
    return [each + [each[0]] * (processes - len(each)) for each in passes]


class Validator:
    """Makes the rounds; knows when. Every method is entered by all processes."""

    def __init__(self, run: RunFile, model: FluxTransformer2DModel, world: World, data: TrainingData, start: int):
        self.run, self.model, self.world, self.data = run, model, world, data
        self.path = run.folder.validation
        settings = run.job.validation
        self.images = tried(run.read_held_out(), settings.images) if settings else ()
        if settings is None or not self.images:
            return
        self.every, self.levels, self.keeps_best = settings.every, settings.levels, settings.keeps_best
        self.views = [View(item, level) for item in self.images for level in range(self.levels)]
        self.passes = turns(self.views, run.plan.images_per_pass, world.size)
        self.pictures = self._name()
        if world.leads:
            cut_after(self.path, start)

    @property
    def images_of_a_process(self) -> int:
        """In a round."""
        return len(self.passes) * self.run.plan.images_per_pass if self.images else 0

    def due(self, step: int, saving: bool = False) -> bool:
        """After ``step`` updates; ``saving``: a state is to be saved next."""
        if not self.images:
            return False
        return step % self.every == 0 or step == self.run.plan.steps or (saving and self.keeps_best)

    def round(self, step: int, metrics: Metrics) -> Validated | None:
        """Tries the model after ``step`` updates; None where a stop came first, or the loss is no number."""
        begun = time.monotonic()
        metrics.flush()
        losses = self._losses()
        if losses is None:
            return None
        loss, by_level = self._means(losses)
        if self.world.leads:
            self._write(step, loss, by_level, time.monotonic() - begun, metrics)
        return Validated(loss, self.pictures) if math.isfinite(loss) else None

    @torch.no_grad()
    def _losses(self) -> list[float] | None:
        """Of every view, on every process; None where a stop was asked for in between."""
        found: dict[int, torch.Tensor] = {}
        with evaluating(self.model):
            for turn, batch in self._prepared():
                if self.world.any(self.world.stop_requested)[0]:
                    return None
                self.world.place.move()
                batch = batch.to(self.world.device)
                prediction = predict(self.model, batch, self.run.job.guidance, self.run.job.t5_mask)
                found[turn.first] = image_losses(prediction, batch.target, batch.mask)[: len(turn.views)]
        mine = {first + place: loss for first, some in found.items() for place, loss in enumerate(some.tolist())}
        every = {number: loss for some in self.world.gather(mine) for number, loss in some.items()}
        return [every[number] for number in range(len(self.views))]

    def _prepared(self) -> Iterator[tuple[Turn, Batch]]:
        mine = [each[self.world.rank] for each in self.passes]
        with ThreadPoolExecutor(self.data.threads, thread_name_prefix="validation") as pool:
            yield from zip(mine, in_order(pool, self._batch, mine, AHEAD), strict=True)

    def _batch(self, turn: Turn) -> Batch:
        views = [*turn.views, *[turn.views[-1]] * (self.run.plan.images_per_pass - len(turn.views))]
        images = [self.data.tried(view.item, view.level, self.levels) for view in views]
        return self.data.stacked(images, turn.views[0].item.bucket, [1.0] * len(views))

    def _means(self, losses: Sequence[float]) -> tuple[float, tuple[float | None, ...]]:
        """Over all views, and over those of each band, each image by the weight of its dataset; in one order on any
        number of processes."""
        weights = [self.data.weight(view.item) for view in self.views]
        bands = [min(BANDS - 1, view.level * BANDS // self.levels) for view in self.views]

        def mean(of: Sequence[int]) -> float:
            total = math.fsum(weights[number] for number in of)
            return math.fsum(weights[number] * losses[number] for number in of) / total if total else math.nan

        numbers = range(len(losses))
        return mean(numbers), tuple(_or_none(mean([n for n in numbers if bands[n] == band])) for band in range(BANDS))

    def _write(
        self, step: int, loss: float, by_level: tuple[float | None, ...], seconds: float, metrics: Metrics
    ) -> None:
        """A line in the file, the log and TensorBoard."""
        before: list[Round] = []
        train: tuple[float | None, ...] = (None,) * BANDS
        images = (0.0,) * BANDS
        try:
            before = [each for each in read_rounds(self.path) if each.pictures == self.pictures]
            train, images = metrics.means_since(before[-1].step if before else 0)
        except OSError as error:
            log.warning("the figures of the steps before step %d cannot be read: %s. Training goes on.", step, error)
        found = Round(step, _or_none(loss), by_level, train, images, self.pictures, round(seconds, 3))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(found.line())
        except OSError as error:
            log.warning("the validation of step %d was not written down: %s. Training goes on.", step, error)
        log.info("%s", in_words([*before, found]))
        told = {"loss": found.loss} | {f"loss/{band_name(band)}": each for band, each in enumerate(by_level)}
        for name, number in told.items():
            if number is not None:
                metrics.curve(f"validation/{name}", number, step)

    def _name(self) -> str:
        """Of everything a round depends on but the model: rounds of the same name can be compared."""
        job, weights = self.run.job, self.run.weights
        parts: list[object] = [self.levels, job.guidance, job.t5_mask]
        for item in self.images:
            entry, crop = job.datasets[item.dataset], crop_tried(job, item)
            keys = latent_key(item, crop, weights), text_key(text_tried(job, item), weights, job.t5_mask)
            mask = (mask_key(item, crop), entry.mask_floor, entry.mask_normalize) if item.mask else ()
            parts.append((keys, mask, entry.weight))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None
