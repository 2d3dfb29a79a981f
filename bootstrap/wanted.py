"""What a run looks at, and so what the cache must hold: each image's text and crop at each step, known beforehand.

A text and a crop are functions of (seed, step, place in the step), as everything drawn is. So captions with choices
work from the cache: either all their texts are encoded, or, where that would be more than the run has images to show,
those that it will draw. Nothing is encoded while the model trains.

A key is a hash of everything the tensors depend on (the picture's bytes, its bucket and crop, the text, the encoders,
how they are used), so a changed picture, caption or setting has another key, and nothing is ever out of date.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from bootstrap.buckets import Box, crop_box, shifted_crop_box
from bootstrap.captions import draw_text, every_text
from bootstrap.dataset import Item
from bootstrap.draws import Use, draw, draw_of
from bootstrap.held_out import tried
from bootstrap.order import StepOrder
from bootstrap.plan import Plan
from bootstrap.weights import Weights
from jobs.prompts import Drawing
from jobs.schema import DatasetEntry, Job

# Raise when encoding itself changes (resizing, dtypes, tokenization): everything is then made anew.
LATENT_VERSION = 2
MASK_VERSION = 1
TEXT_VERSION = 1

EMPTY = "the empty caption"


@dataclass(frozen=True)
class Crop:
    """The part of a picture that is trained on, and whether it is mirrored left to right."""

    box: Box
    mirrored: bool


@dataclass(frozen=True)
class Text:
    """A text to encode: what it is, how, and whose, for messages."""

    text: str
    t5_mask: bool
    owner: str


@dataclass(frozen=True)
class CroppedItem:
    """A crop of a picture at the size of its bucket, to encode."""

    item: Item
    crop: Crop


def text_key(text: str, weights: Weights, t5_mask: bool) -> str:
    """The key of a caption or prompt."""
    return _key("text", TEXT_VERSION, text, weights.text_tokens, t5_mask, weights.digest)


def latent_key(item: Item, crop: Crop, weights: Weights) -> str:
    """The key of a crop of a picture at a size."""
    return _key("latent", LATENT_VERSION, item.digest, item.bucket, _rounded(crop.box), crop.mirrored, weights.digest)


def mask_key(item: Item, crop: Crop) -> str:
    """The key of the mask of a crop of a picture that has one."""
    # A mask may have another size than its picture: where the crop lies in it hangs on both.
    place = item.width, item.height, _rounded(crop.box), crop.mirrored
    return _key("mask", MASK_VERSION, item.mask_digest or item.digest, item.bucket, *place)


def _rounded(box: Box) -> tuple[float, ...]:
    return tuple(round(side, 2) for side in box)  # pixels: the same on every machine


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


# ---------------------------------------------------------------- what is drawn


def text_at(job: Job, item: Item, step: int, place: int) -> str:
    """The text that the image at (step, place) is trained with; "" where its caption is dropped."""
    entry = job.datasets[item.dataset]
    if draw(job.seed, Use.CAPTION_DROPOUT, step, place).random() < _dropout(job, entry):
        return ""
    return draw_text(item.caption, entry, draw(job.seed, Use.CAPTION, step, place))


def crop_at(job: Job, item: Item, step: int, place: int) -> Crop:
    """The crop that the image at (step, place) is trained on."""
    crops = crops_of(item, job.datasets[item.dataset])
    if len(crops) == 1:
        return crops[0]
    return crops[int(draw(job.seed, Use.CROP, step, place).integers(len(crops)))]


def crops_of(item: Item, entry: DatasetEntry) -> tuple[Crop, ...]:
    """Every crop of a picture, each as likely as the others.

    Random ones hang on the picture alone, so that another seed finds them in the cache.
    """
    size = item.width, item.height, item.bucket
    if entry.random_crops:
        # Philox takes 128 bits of key: the picture's hash.
        chance = np.random.Generator(np.random.Philox(key=int(item.digest[:32], 16)))
        boxes = [shifted_crop_box(*size, *chance.random(2).tolist()) for _ in range(entry.random_crops)]
    else:
        boxes = [crop_box(*size, entry.focus)]
    return tuple(Crop(box, mirrored) for box in boxes for mirrored in ((False, True) if entry.flip else (False,)))


def text_tried(job: Job, item: Item) -> str:
    """The text that a picture of validation is tried with, every time: one of those that its caption can be."""
    return draw_text(item.caption, job.datasets[item.dataset], draw_of(item.digest, Use.CAPTION))


def crop_tried(job: Job, item: Item) -> Crop:
    """The crop of a picture of validation, every time."""
    return crops_of(item, job.datasets[item.dataset])[0]


def _dropout(job: Job, entry: DatasetEntry) -> float:
    return job.caption_dropout if entry.caption_dropout is None else entry.caption_dropout


# ---------------------------------------------------------------- what is wanted of the cache


@dataclass(frozen=True)
class Wanted:
    """What a run needs of the cache, by key."""

    texts: dict[str, Text]
    crops: dict[str, CroppedItem]
    masks: dict[str, CroppedItem]
    drawn: bool = False  # the captions have more texts than the run shows images: only those it will draw are wanted

    @classmethod
    def of(cls, job: Job, plan: Plan, items: Sequence[Item], weights: Weights, held_out: Sequence[Item] = ()) -> Wanted:
        """Of the images trained on, and of those ``held_out`` that validation tries."""
        every = _every_text(job, items, most=max(len(items), plan.steps * job.images_per_step))
        training = _drawn_texts(job, plan, items) if every is None else every
        others = tried(held_out, job.validation.images) if job.validation else ()
        texts = _wanted_texts(job, weights, chain(training, ((text_tried(job, item), item.path) for item in others)))
        crops, masks = _wanted_crops(job, items, weights), _wanted_masks(job, items)
        for item in others:
            crop = CroppedItem(item, crop_tried(job, item))
            crops.setdefault(latent_key(item, crop.crop, weights), crop)
            if item.mask:
                masks.setdefault(mask_key(item, crop.crop), crop)
        return cls(texts, crops, masks, drawn=every is None)

    def beyond(self, there: Container[str]) -> Wanted:
        """What is not there yet."""
        texts = {key: text for key, text in self.texts.items() if key not in there}
        crops, masks = (
            {key: crop for key, crop in crops.items() if key not in there} for crops in (self.crops, self.masks)
        )
        return Wanted(texts, crops, masks, self.drawn)

    def __len__(self) -> int:
        return len(self.texts) + len(self.crops) + len(self.masks)

    def __str__(self) -> str:
        parts = {"pictures": len(self.crops), "captions": len(self.texts), "masks": len(self.masks)}
        return ", ".join(f"{count} {name}" for name, count in parts.items() if count) or "nothing"

    def bytes(self, weights: Weights) -> int:
        """The room it takes in the cache."""
        shape = weights.shape
        text = weights.text_tokens * (2 * shape.text_size + 1) + 2 * shape.pooled_size  # bf16, and the mask
        places = [sum(_places(crop.item) for crop in crops.values()) for crops in (self.crops, self.masks)]
        return len(self.texts) * text + places[0] * 16 * 2 * 2 + places[1]  # mean and spread of 16 channels in float16


def _places(item: Item) -> int:
    return item.bucket[0] // 8 * (item.bucket[1] // 8)


def _wanted_crops(job: Job, items: Iterable[Item], weights: Weights) -> dict[str, CroppedItem]:
    """By key: every crop of every picture in every bucket, bucket by bucket; those of one picture come together."""
    crops: dict[str, CroppedItem] = {}
    for item in sorted(items, key=lambda item: item.bucket):
        for crop in crops_of(item, job.datasets[item.dataset]):
            crops.setdefault(latent_key(item, crop, weights), CroppedItem(item, crop))
    return crops


def _wanted_masks(job: Job, items: Iterable[Item]) -> dict[str, CroppedItem]:
    """By key: the same of the pictures that have a mask."""
    masks: dict[str, CroppedItem] = {}
    for item in items:
        if item.mask:
            for crop in crops_of(item, job.datasets[item.dataset]):
                masks.setdefault(mask_key(item, crop), CroppedItem(item, crop))
    return masks


def _wanted_texts(job: Job, weights: Weights, training: Iterable[tuple[str, str]]) -> dict[str, Text]:
    """By key: the texts of ``training``, each with whose it is, and the prompts of the samples.

    Prompts are encoded without T5's mask, whatever the job trains with: samples are drawn as people will draw.
    """
    texts: dict[str, Text] = {}
    for text, owner in training:
        texts.setdefault(text_key(text, weights, job.t5_mask), Text(text, job.t5_mask, owner))
    return texts | prompt_texts(job.sample.drawings, weights)


def prompt_texts(drawings: Iterable[Drawing], weights: Weights) -> dict[str, Text]:
    """By key: what is to be drawn."""
    prompts = dict.fromkeys(drawing.prompt for drawing in drawings)
    return {text_key(prompt, weights, False): Text(prompt, False, f"the prompt {prompt!r}") for prompt in prompts}


def _drawn_texts(job: Job, plan: Plan, items: Sequence[Item]) -> Iterator[tuple[str, str]]:
    """The text of every image at every step."""
    order = StepOrder(items, job, plan.steps_per_epoch)
    for step in range(plan.steps):
        for place, index in enumerate(order.step(step)):
            text = text_at(job, items[index], step, place)
            yield text, items[index].path if text else EMPTY


def _every_text(job: Job, items: Sequence[Item], most: int) -> list[tuple[str, str]] | None:
    """All texts that can be drawn; None where they are more than ``most``."""
    found: dict[str, str] = {}
    seen: set[tuple[str, int]] = set()
    for item in items:
        if (item.caption, item.dataset) in seen:
            continue
        seen.add((item.caption, item.dataset))
        texts = every_text(item.caption, job.datasets[item.dataset], most)
        if texts is None:
            return None
        for text in texts:
            found.setdefault(text, item.path)
        if len(found) > most:
            return None
    if any(_dropout(job, job.datasets[item.dataset]) > 0 for item in items):
        found.setdefault("", EMPTY)
    return list(found.items())
