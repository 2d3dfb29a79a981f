"""Time and memory of looking at a large dataset: ``python -m bench.scan [--images 10000] [--folder DIR]``.

Makes synthetic JPEGs of about half a megapixel (once; the folder is used again), then measures, each in a process of
its own: the first scan, which decodes all; the second, which must decode nothing; and the same of one zip of them.
Prints a table; fails where the second scan is not ten times as fast, or memory grows with the pictures.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

SIZES = ((832, 640), (640, 832), (768, 704), (960, 512))
PER_FOLDER = 2500
MOST_MEMORY = 600_000_000  # bytes at the peak: 16 pictures at work, and a kilobyte for each one known
LEAST_RATIO = 10  # first scan to second


def make(volume: Path, images: int) -> None:
    """Pictures in kohya folders with captions, and one zip of them all."""
    root = volume / "datasets" / f"many-{images}"
    with ProcessPoolExecutor() as pool:
        list(pool.map(_make_one, [root] * images, range(images), chunksize=64))
    target = root.with_name(f"{root.name}.zip")
    if not target.exists():
        part = target.with_suffix(".part")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(root.rglob("*.*")):
                archive.write(path, path.relative_to(root))
        part.replace(target)


def _make_one(root: Path, number: int) -> None:
    path = root / f"{1 + number // PER_FOLDER % 3}_part {number // PER_FOLDER}" / f"{number:06}.jpg"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = SIZES[number % len(SIZES)]
    noise = np.random.default_rng(number).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    path.with_suffix(".txt").write_text(f"picture number {number}, of clouds")
    path.write_bytes(file.getvalue())


def scan_once(volume: Path, path: str) -> None:
    """In a process of its own: one scan, and what it took as JSON."""
    from bootstrap.dataset import scan
    from bootstrap.volume import Volume
    from jobs.schema import DatasetEntry, Job

    job = Job(name="many", base="flux-tiny", method="full", resolution=512, datasets=(DatasetEntry(path=path),))
    begun, before = time.monotonic(), time.process_time()
    data = scan(job, Volume(volume), remember=True)
    told = {
        "images": data.images,
        "captions": data.captions,
        "seconds": time.monotonic() - begun,
        "cpu": time.process_time() - before,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(told))


def measured(volume: Path, path: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.scan", "--scan", path, "--folder", str(volume)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="a volume to make the pictures in, and to keep")
    parser.add_argument("--scan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scan:
        scan_once(options.folder, options.scan)
        return 0
    with TemporaryDirectory() as temporary:
        volume = options.folder or Path(temporary)
        make(volume, options.images)
        time.sleep(3)  # what was written just before a scan is looked at again in the next
        return report(volume, options.images)


def report(volume: Path, images: int) -> int:
    print(f"{images} pictures, {len(os.sched_getaffinity(0))} CPUs")
    print(f"{'scan':24}{'s':>8}{'CPU s':>8}{'images/s':>10}{'peak MB':>9}")
    wrong = []
    for path in (f"datasets/many-{images}", f"datasets/many-{images}.zip"):
        for known in (volume / "cache" / "pictures").glob("*.json"):
            known.unlink()
        first, second = measured(volume, path), measured(volume, path)
        for name, found in ((f"{Path(path).name}, first", first), (f"{Path(path).name}, again", second)):
            rate, peak = images / found["seconds"], found["memory"] / 1e6
            print(f"{name:24}{found['seconds']:8.1f}{found['cpu']:8.1f}{rate:10.0f}{peak:9.0f}")
            wrong += [f"{name}: {found}"] if found["images"] != images or found["captions"] != images else []
            wrong += [f"{name}: {peak:.0f} MB"] if found["memory"] > MOST_MEMORY else []
        if first["seconds"] < LEAST_RATIO * second["seconds"]:
            wrong.append(f"{path}: the second scan took {second['seconds']:.1f} s")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
