"""Encodes the captions and pictures that the cache lacks: ``python -m trainer.encode run.json --part I --parts N``.

One process per GPU, each with its own share and without a process group; run before the trainer, so that the encoders
are gone when the model comes. A picture's latent is kept as the mean and the spread that the VAE gives, so that
training draws a fresh one each time, as the VAE was trained to be read, at twice the space of one fixed draw.
"""

from __future__ import annotations

import argparse
import errno
import gc
import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from transformers import AutoConfig, CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from bootstrap.archives import read_file
from bootstrap.buckets import Size, crop_box
from bootstrap.cache import Cache, ShardWriter, Text, wanted_latents, wanted_texts
from bootstrap.captions import shown
from bootstrap.dataset import Item
from bootstrap.images import ImageError, decode
from bootstrap.outcome import DONE, JOB_WRONG, POD_WRONG
from bootstrap.run_file import RunFile
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import Volume, read_json
from bootstrap.weights import Weights
from jobs.problem import JobError, Problem

# T5-XXL is busy with four captions of 512 tokens; the VAE in float32 with four pictures of 512 px or one of 1024 px,
# which take about 5 GB. A CPU gains nothing from a batch, and alone each picture comes out the same in any company.
TEXTS_AT_ONCE = 4
PIXELS_AT_ONCE = 1024 * 1024
PROGRESS_SECONDS = 2.0

T = TypeVar("T")
R = TypeVar("R")


class TextEncoders:
    """CLIP's pooled output and T5's sequence, as diffusers' ``FluxPipeline.encode_prompt`` makes them in bfloat16."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self.device = device
        self.text_tokens = weights.text_tokens
        self.clip_tokenizer = CLIPTokenizer.from_pretrained(weights.tokenizer)
        self.t5_tokenizer = T5Tokenizer.from_pretrained(weights.tokenizer_2)
        self.clip = _load(CLIPTextModel, weights.clip, device)
        self.t5 = _load(T5EncoderModel, weights.t5, device)

    def too_long(self, text: str) -> bool:
        """Whether T5, the longer of the two, sees only the beginning of ``text``."""
        tokens = self.t5_tokenizer(text, truncation=True, max_length=self.text_tokens + 1).input_ids
        return len(tokens) > self.text_tokens

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], t5_mask: bool) -> list[dict[str, torch.Tensor]]:
        """For each text prompt_embeds bf16 [tokens, width], mask bool [tokens] (false on padding), pooled bf16 [width].

        The padding is encoded too, since FLUX sees it; with ``t5_mask`` T5 does not look at it.
        """
        clip_tokens = self.clip_tokenizer(
            list(texts),
            padding="max_length",
            max_length=self.clip_tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        pooled = self.clip(clip_tokens.input_ids.to(self.device), output_hidden_states=False).pooler_output
        t5_tokens = self.t5_tokenizer(
            list(texts), padding="max_length", max_length=self.text_tokens, truncation=True, return_tensors="pt"
        )
        mask = t5_tokens.attention_mask.to(self.device)
        seen = {"attention_mask": mask} if t5_mask else {}
        embeds = self.t5(t5_tokens.input_ids.to(self.device), output_hidden_states=False, **seen)[0]
        return [
            {"prompt_embeds": e.to(torch.bfloat16), "mask": m.to(torch.bool), "pooled": p.to(torch.bfloat16)}
            for e, m, p in zip(embeds, mask, pooled, strict=True)
        ]


def _load(kind: Any, folder: Path, device: torch.device) -> Any:
    """A transformers model in bfloat16; its files are read in blocks and each tensor goes to the device at once."""
    tensors: dict[str, torch.Tensor] = {}
    index = read_json(folder / "model.safetensors.index.json")
    for file in sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]:
        tensors.update({name: tensor.to(device) for name, tensor in read_tensors(folder / file).items()})
    config = AutoConfig.from_pretrained(folder)
    model, loaded = kind.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.bfloat16, output_loading_info=True
    )
    if loaded["missing_keys"]:
        lacking = sorted(loaded["missing_keys"])
        raise JobError([Problem(f"{folder} lacks tensors of {kind.__name__}: {shown(lacking)}", key="base")])
    return model.to(device).eval()


def load_vae(folder: Path, device: torch.device) -> Any:
    """The VAE in float32: in bfloat16 its mean is off by about one part in a hundred."""
    return AutoencoderKL.from_pretrained(folder, dtype=torch.float32, disable_mmap=True).to(device).eval()


@torch.inference_mode()
def encode_pixels(vae: Any, pixels: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """For each of uint8 [n, height, width, 3] its mean and spread, float16 [16, height / 8, width / 8].

    As the VAE gives them: not yet shifted and scaled for FLUX.
    """
    images = pixels.to(vae.device, torch.float32).permute(0, 3, 1, 2) / 127.5 - 1
    posterior = vae.encode(images).latent_dist
    pairs = zip(posterior.mean, posterior.std, strict=True)
    return [{"mean": mean.to(torch.float16), "spread": spread.to(torch.float16)} for mean, spread in pairs]


def fit(image: Image.Image, bucket: Size) -> torch.Tensor:
    """uint8 [height, width, 3]: the centre of ``image`` at the bucket's size, cropped and antialiased in one step."""
    box = crop_box(image.width, image.height, bucket)
    return torch.from_numpy(np.array(image.resize(bucket, Image.Resampling.LANCZOS, box=box)))


def read_pixels(item: Item, volume: Volume) -> torch.Tensor:
    """The item's picture as it is trained on. Raises JobError where it is not what the scan has seen."""
    try:
        data = read_file(volume.resolve(item.path))
        if hashlib.sha256(data).hexdigest() != item.digest:
            raise ImageError("has changed since this run began to prepare")
        return fit(decode(data).image, item.bucket)
    except (OSError, ImageError) as error:
        raise JobError(
            [Problem(f"{item.path}: {error}", "Start the job again once the pictures are in place")]
        ) from error


class _Progress:
    """Plain lines, one every few seconds and one at the end: they are read in a log as often as on a screen."""

    def __init__(self, total: int, things: str) -> None:
        self.total, self.things, self.done = total, things, 0
        self._told = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        if self.done == self.total or time.monotonic() - self._told > PROGRESS_SECONDS:
            self._told = time.monotonic()
            print(f"encoded {self.done}/{self.total} {self.things}", flush=True)


def encode_texts(texts: Mapping[str, Text], weights: Weights, device: torch.device, root: Path) -> None:
    """Writes the outputs for ``texts`` (by key) to the cache in ``root``."""
    encoders = TextEncoders(weights, device)
    progress = _Progress(len(texts), "captions")
    long = [text.owner for text in texts.values() if encoders.too_long(text.text)]
    if long:
        print(
            f"encoded up to {weights.text_tokens} T5 tokens only, {len(long)} long captions: {shown(long)}", flush=True
        )
    at_once = TEXTS_AT_ONCE if device.type == "cuda" else 1
    with ShardWriter(root) as writer:
        for masked, group in groupby(
            sorted(texts.items(), key=lambda pair: pair[1].t5_mask), lambda pair: pair[1].t5_mask
        ):
            for batch in _batches(list(group), lambda pair: at_once):
                outputs = encoders.encode([text.text for _, text in batch], masked)
                for (key, text), tensors in zip(batch, outputs, strict=True):
                    _require_finite(tensors, text.owner)
                    writer.add(key, tensors)
                progress.advance(len(batch))


def encode_images(items: Mapping[str, Item], run: RunFile, device: torch.device) -> None:
    """Writes the latents of ``items`` (by key) to the cache; pictures are decoded ahead, on other threads."""
    vae = load_vae(run.weights.vae, device)
    progress = _Progress(len(items), "images")
    volume = Volume(run.volume)

    def at_once(pair: tuple[str, Item]) -> int:
        width, height = pair[1].bucket
        return max(1, PIXELS_AT_ONCE // (width * height)) if device.type == "cuda" else 1

    with ExitStack() as stack:
        threads = max(1, run.plan.threads)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        stack.callback(pool.shutdown, cancel_futures=True)
        writer = stack.enter_context(ShardWriter(run.cache))
        pixels = _ahead(pool, lambda item: read_pixels(item, volume), items.values(), 2 * threads)
        for _, group in groupby(items.items(), lambda pair: pair[1].bucket):
            for batch in _batches(list(group), at_once):
                pictures = torch.stack([next(pixels) for _ in batch])
                for (key, item), tensors in zip(batch, encode_pixels(vae, pictures), strict=True):
                    _require_finite(tensors, item.path)
                    writer.add(key, tensors)
                progress.advance(len(batch))


def _require_finite(tensors: Mapping[str, torch.Tensor], owner: str) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise JobError([Problem(f"{owner}: encoding it gives numbers that are not finite", "Check the base's files")])


def _batches(things: Sequence[T], at_once: Callable[[T], int]) -> Iterator[Sequence[T]]:
    size = at_once(things[0]) if things else 1
    for start in range(0, len(things), size):
        yield things[start : start + size]


def _ahead(pool: ThreadPoolExecutor, function: Callable[[T], R], things: Iterable[T], depth: int) -> Iterator[R]:
    """``function`` of each thing in order, computed up to ``depth`` things ahead: no more results are held."""
    waiting: deque[Future[R]] = deque()
    for thing in things:
        waiting.append(pool.submit(function, thing))
        if len(waiting) > depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def encode_part(run: RunFile, part: int, parts: int) -> None:
    """Encodes this part's share of what is wanted and missing.

    The shares are cut from all that is wanted, not from what is missing: that changes while other parts write.
    """
    items = run.read_items()
    cache = Cache(run.cache)
    texts = _share(wanted_texts(run.job, items, run.weights), part, parts, cache)
    images = _share(wanted_latents(items), part, parts, cache)
    if run.plan.device == "cuda":
        device = torch.device("cuda", part % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, run.plan.threads))
    if texts:
        encode_texts(texts, run.weights, device, run.cache)
        gc.collect()  # T5 has to be gone before the VAE comes
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if images:
        encode_images(images, run, device)


def _share(wanted: Mapping[str, T], part: int, parts: int, cache: Cache) -> dict[str, T]:
    keys = list(wanted)[part::parts]
    return {key: wanted[key] for key in cache.missing(keys)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.encode", description="Encodes what the cache lacks.")
    parser.add_argument("run", type=Path, help="run.json")
    parser.add_argument("--part", type=int, default=0, help="which share, from 0")
    parser.add_argument("--parts", type=int, default=1, help="how many shares there are")
    options = parser.parse_args(arguments)
    if not 0 <= options.part < options.parts:
        parser.error("--part must lie between 0 and --parts - 1")
    _quiet()
    try:
        encode_part(RunFile.read(options.run), options.part, options.parts)
    except JobError as error:
        print(error, file=sys.stderr, flush=True)
        return JOB_WRONG
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(
            "The volume is full: make room, or choose a larger one. What is cached stays.", file=sys.stderr, flush=True
        )
        return POD_WRONG
    return DONE


def _quiet() -> None:
    """No bars and no hints of the libraries between our lines."""
    import diffusers
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
