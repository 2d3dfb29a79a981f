"""How busy the encode pass keeps the VAE: ``python -m bench.encode [--pictures 512] [--size 512]``, on a GPU.

Photograph-sized JPEGs are made in a folder that goes again, then encoded as a run encodes them (read, decoded, cropped
and resized by threads; encoded; written to the cache) by a VAE of FLUX's size with random weights. Beside it: the same
VAE on the same batches with nothing around it. What is missing to 100 % is waiting.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from bench.cache import no_weights
from bootstrap.bases import FLUX_TINY
from bootstrap.dataset import Dataset, Item
from bootstrap.plan import make_plan
from bootstrap.pod import read_pod
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume
from bootstrap.wanted import CroppedItem, Wanted
from jobs.schema import Job
from trainer.encode import PIXELS_AT_ONCE, encode_images, encode_pixels, load_vae

WIDTH, HEIGHT = 2400, 1800  # of a picture: 4 megapixels
DIFFERENT = 32  # pictures that are really made; the others are these again, with some bytes behind their end
VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--narrow", type=int, default=1, help="divides the VAE's widths, to try this on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        measure(Volume(Path(folder)), options.pictures, options.size, options.narrow, device)


def measure(volume: Volume, pictures: int, size: int, narrow: int, device: torch.device) -> None:
    volume.create()
    vae = volume.models / "vae"
    widths = tuple(width // narrow for width in VAE["block_out_channels"])
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    AutoencoderKL(**(VAE | kinds | {"block_out_channels": widths})).save_pretrained(vae)
    items = draw(volume, pictures, (size, size))
    job = Job.model_validate(
        {"name": "encode", "base": "flux-tiny", "method": "lora", "datasets": [{"path": "datasets/d"}]}
    )
    data = Dataset(items, images=pictures, captions=0, parts=(), notes=()).summary()
    plan = make_plan(job, replace(read_pod(volume.root), gpus=()), FLUX_TINY, data)
    weights = replace(no_weights(), vae=vae)
    run = RunFile(job, plan, weights, volume.root)
    crops: list[dict[str, CroppedItem]] = [
        {key: crop} for key, crop in Wanted.of(job, plan, items, weights).crops.items()
    ]
    encode_images(crops[:8], run, device)  # cuDNN chooses its ways
    begun = time.monotonic()
    encode_images(crops, run, device)
    whole = len(crops) / (time.monotonic() - begun)
    alone = bare(vae, size, pictures, device)
    print(
        f"{device.type}, {plan.threads} threads: {whole:.1f} images/s, the VAE alone {alone:.1f}: {whole / alone:.0%}"
    )


def draw(volume: Volume, pictures: int, bucket: tuple[int, int]) -> tuple[Item, ...]:
    folder = volume.datasets / "d"
    folder.mkdir()
    different = []
    for number in range(min(DIFFERENT, pictures)):
        noise = np.random.default_rng(number).integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
        different.append(file.getvalue())
    items = []
    for number in range(pictures):
        data = different[number % len(different)] + number.to_bytes(4, "little")
        path = folder / f"{number:06}.jpg"
        path.write_bytes(data)
        items.append(Item(f"datasets/d/{path.name}", hashlib.sha256(data).hexdigest(), "", 1, WIDTH, HEIGHT, bucket))
    return tuple(items)


def bare(folder: Path, size: int, pictures: int, device: torch.device) -> float:
    """Images per second of the VAE by itself."""
    vae = load_vae(folder, device)
    at_once = max(1, PIXELS_AT_ONCE // size**2) if device.type == "cuda" else 1
    pixels = torch.randint(0, 256, (at_once, size, size, 3), dtype=torch.uint8)
    for _ in range(3):
        encode_pixels(vae, pixels)
    batches = max(1, pictures // at_once)
    begun = time.monotonic()
    for _ in range(batches):
        latents = encode_pixels(vae, pixels)
    assert all(bool(each["mean"].isfinite().all()) for each in latents)
    return batches * at_once / (time.monotonic() - begun)


if __name__ == "__main__":
    main()
