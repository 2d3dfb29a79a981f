"""Encodes the captions and pictures that the cache lacks: ``python -m trainer.encode run.json --part I --parts N``.

One process per GPU, each with its own share and without a process group; run before the trainer, so that the encoders
are gone when the model comes. A picture's latent is kept as the mean and the spread that the VAE gives, so that
training draws a fresh one each time, as the VAE was trained to be read, at twice the space of one fixed draw.
"""

from __future__ import annotations

import argparse
import errno
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKL
from transformers import AutoConfig, CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from bootstrap.cache import Cache, ShardWriter
from bootstrap.captions import shown
from bootstrap.dataset import Item
from bootstrap.images import ImageError, view
from bootstrap.images import View as Seen
from bootstrap.inspection import in_order
from bootstrap.outcome import DONE, JOB_WRONG, POD_WRONG
from bootstrap.pictures import read_item
from bootstrap.processes import record_process
from bootstrap.run_file import RunFile
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import Volume, read_json
from bootstrap.wanted import CroppedItem, Text, Wanted, text_key
from bootstrap.weights import Weights
from bootstrap.whereabouts import Phase, Place
from jobs.problem import JobError, Problem
from trainer.out_of_memory import in_parts_that_fit, is_out_of_memory, measure
from trainer.processor import use_processor

# T5-XXL is busy with four captions of 512 tokens; the VAE in float32 with four pictures of 512 px or one of 1024 px,
# which take about 5 GB. A CPU gains nothing from a batch, and alone each picture comes out the same in any company.
TEXTS_AT_ONCE = 4
PIXELS_AT_ONCE = 1024 * 1024
PROGRESS_SECONDS = 2.0

T = TypeVar("T")


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
        tensors |= read_tensors(folder / file, device)
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


def read_crops(crops: Sequence[CroppedItem], volume: Volume) -> list[torch.Tensor]:
    """Crops of one picture as they are trained on: uint8 [height, width, 3] each. It is decoded once for all.

    Raises JobError where the picture is not what the scan has seen.
    """
    seen = [(seen.pixels, each.crop.mirrored) for seen, each in zip(_views(crops, volume), crops, strict=True)]
    return [torch.from_numpy(pixels[:, ::-1].copy() if mirrored else pixels) for pixels, mirrored in seen]


def read_masks(crops: Sequence[CroppedItem], volume: Volume) -> list[torch.Tensor]:
    """The masks of crops of one picture: uint8 [height / 8, width / 8] each, 255 where all is learned.

    Each value is the mean of the pixels that a place of the latent stands for. Raises JobError as ``read_crops`` does.
    """
    masks = []
    for seen, each in zip(_views(crops, volume), crops, strict=True):
        assert seen.mask is not None
        height, width = seen.mask.shape
        means = seen.mask.reshape(height // 8, 8, width // 8, 8).mean(axis=(1, 3)).round().astype(np.uint8)
        masks.append(torch.from_numpy(means[:, ::-1].copy() if each.crop.mirrored else means))
    return masks


def _views(crops: Sequence[CroppedItem], volume: Volume) -> Iterator[Seen]:
    item = crops[0].item
    try:
        picture, mask = read_item(item, volume)
    except ImageError as error:
        remedy = "Start the job again once the pictures are in place"
        raise JobError([Problem(f"{item.path}: {error}", remedy)]) from error
    return (view(picture, item.bucket, each.crop.box, mask) for each in crops)


class _Progress:
    """Plain lines, one every few seconds and one at the end: they are read in a log as often as on a screen."""

    def __init__(self, total: int, things: str, place: Place | None) -> None:
        self.total, self.things, self.done, self.place = total, things, 0, place or Place.unwatched()
        self._told = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        self.place.move()
        if self.done == self.total or time.monotonic() - self._told > PROGRESS_SECONDS:
            self._told = time.monotonic()
            print(f"encoded {self.done}/{self.total} {self.things}", flush=True)


def encode_texts(
    texts: Mapping[str, Text], weights: Weights, device: torch.device, root: Path, place: Place | None = None
) -> None:
    """Writes the outputs for ``texts`` (by key) to the cache in ``root``."""
    encoders = TextEncoders(weights, device)
    progress = _Progress(len(texts), "captions", place)
    long = list(dict.fromkeys(text.owner for text in texts.values() if encoders.too_long(text.text)))
    if long:
        print(
            f"encoded up to {weights.text_tokens} T5 tokens only, {len(long)} long captions: {shown(long)}", flush=True
        )
    at_once = TEXTS_AT_ONCE if device.type == "cuda" else 1
    with ShardWriter(root) as writer:
        by_mask = sorted(texts.items(), key=lambda pair: pair[1].t5_mask)
        for masked, group in groupby(by_mask, lambda pair: pair[1].t5_mask):
            while batch := list(islice(group, at_once)):
                words = [text.text for _, text in batch]
                outputs = in_parts_that_fit(partial(encoders.encode, t5_mask=masked), words)
                for (key, text), tensors in zip(batch, outputs, strict=True):
                    _require_finite(tensors, text.owner)
                    writer.add(key, tensors)
                progress.advance(len(batch))


Crops = Mapping[str, CroppedItem]  # of one picture, by key


def encode_images(pictures: Sequence[Crops], run: RunFile, device: torch.device, place: Place | None = None) -> None:
    """Writes the latents of the pictures' crops to the cache.

    Pictures are decoded ahead on other threads, and shards written on another, so that the VAE need not wait.
    """
    vae = load_vae(run.weights.vae, device)

    def encode(pixels: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return encode_pixels(vae, torch.stack(list(pixels)))

    progress = _Progress(sum(map(len, pictures)), "images", place)
    with ShardWriter(run.cache) as writer, _read_ahead(read_crops, pictures, run) as crops:
        for bucket, group in groupby(crops, lambda crop: crop[1].bucket):
            at_once = max(1, PIXELS_AT_ONCE // (bucket[0] * bucket[1])) if device.type == "cuda" else 1
            while batch := list(islice(group, at_once)):
                latents = in_parts_that_fit(encode, [pixels for _, _, pixels in batch])
                for (key, item, _), tensors in zip(batch, latents, strict=True):
                    _require_finite(tensors, item.path)
                    writer.add(key, tensors)
                progress.advance(len(batch))


def write_masks(pictures: Sequence[Crops], run: RunFile, place: Place | None = None) -> None:
    """Writes the masks of the pictures' crops to the cache."""
    progress = _Progress(sum(map(len, pictures)), "masks", place)
    with ShardWriter(run.cache) as writer, _read_ahead(read_masks, pictures, run) as masks:
        for key, _, mask in masks:
            writer.add(key, {"mask": mask})
            progress.advance(1)


@contextmanager
def _read_ahead(
    read: Callable[[Sequence[CroppedItem], Volume], list[torch.Tensor]], pictures: Sequence[Crops], run: RunFile
) -> Iterator[Iterator[tuple[str, Item, torch.Tensor]]]:
    """What ``read`` makes of each crop, in order, with its key and item."""
    threads, volume = max(1, run.plan.threads), Volume(run.volume)
    with ThreadPoolExecutor(threads) as pool:
        try:
            read_ahead = in_order(pool, lambda crops: read(list(crops.values()), volume), pictures, 2 * threads)
            yield (
                (key, crop.item, tensor)
                for crops, found in zip(pictures, read_ahead, strict=True)
                for (key, crop), tensor in zip(crops.items(), found, strict=True)
            )
        finally:
            pool.shutdown(cancel_futures=True)


def _require_finite(tensors: Mapping[str, torch.Tensor], owner: str) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise JobError([Problem(f"{owner}: encoding it gives numbers that are not finite", "Check the base's files")])


def encode_part(run: RunFile, part: int, parts: int, place: Place | None = None) -> None:
    """Encodes this part's share of what is wanted and missing.

    The shares are cut from all that is wanted, not from what is missing: that changes while other parts write.
    """
    items = run.read_items()
    cache = Cache(run.cache)
    wanted = Wanted.of(run.job, run.plan, items, run.weights, run.read_held_out())
    texts = _missing(list(wanted.texts.items())[part::parts], cache)
    pictures = _missing_by_picture(wanted.crops, part, parts, cache)
    masks = _missing_by_picture(wanted.masks, part, parts, cache)
    if run.plan.device == "cuda":
        device = torch.device("cuda", part % torch.cuda.device_count())
    else:
        device = use_processor(run.plan.threads)
    if texts:
        encode_texts(texts, run.weights, device, run.cache, place)
        gc.collect()  # T5 has to be gone before the VAE comes
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if pictures:
        encode_images(pictures, run, device, place)
    if masks:
        write_masks(masks, run, place)


def encode_prompts(run: RunFile, prompts: Sequence[str]) -> None:
    """Encodes prompts that came up while the run trains: on the CPU, since the GPU is full."""
    wanted = {text_key(prompt, run.weights, False): Text(prompt, False, f"the prompt {prompt!r}") for prompt in prompts}
    processor = use_processor(run.plan.threads)
    if texts := _missing(wanted.items(), Cache(run.cache)):
        encode_texts(texts, run.weights, processor, run.cache)


def _missing(wanted: Iterable[tuple[str, T]], cache: Cache) -> dict[str, T]:
    return {key: thing for key, thing in wanted if key not in cache}


def _missing_by_picture(wanted: Crops, part: int, parts: int, cache: Cache) -> list[Crops]:
    """A part's share; the crops of one picture stay together, so that it is decoded once."""
    by_picture = groupby(wanted.items(), lambda pair: (pair[1].item.path, pair[1].item.bucket))
    shares = [list(crops) for _, crops in by_picture][part::parts]
    return [missing for crops in shares if (missing := _missing(crops, cache))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.encode", description="Encodes what the cache lacks.")
    parser.add_argument("run", type=Path, help="run.json")
    parser.add_argument("--part", type=int, default=0, help="which share, from 0")
    parser.add_argument("--parts", type=int, default=1, help="how many shares there are")
    parser.add_argument("--prompt", action="append", help="only this, on the CPU; may be repeated")
    options = parser.parse_args(arguments)
    if not 0 <= options.part < options.parts:
        parser.error("--part must lie between 0 and --parts - 1")
    _quiet()
    try:
        run = RunFile.read(options.run)
        if options.prompt:
            record_process(run.folder.processes, "prompts")
            encode_prompts(run, options.prompt)
        else:
            place = Place.take(options.part)
            place.enter(Phase.ENCODING)
            encode_part(run, options.part, options.parts, place)
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
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        told = measure(error, "encoding one caption or picture alone", options.part)
        print(
            f"out of GPU memory: {told}. End what else runs on this GPU, lower resolution, or take a larger GPU. "
            "What is cached stays.",
            file=sys.stderr,
            flush=True,
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
