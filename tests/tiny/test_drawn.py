from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np

from bootstrap.dataset import scan
from bootstrap.volume import Volume
from jobs.schema import Job
from tiny.drawn import COLOURS, SHAPES, SIZES, draw_dataset, draw_picture


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def test_the_same_seed_draws_the_same_files(tmp_path: Path) -> None:
    assert draw_dataset(tmp_path / "a", 9, seed=3) == 9
    draw_dataset(tmp_path / "b", 9, seed=3)
    draw_dataset(tmp_path / "c", 9, seed=4)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a") != files(tmp_path / "c")


def test_what_is_there_stays_and_what_is_missing_comes_back_the_same(tmp_path: Path) -> None:
    draw_dataset(tmp_path, 9)
    before = files(tmp_path)
    assert draw_dataset(tmp_path, 9) == 0
    (tmp_path / "1_star" / "star-02.png").unlink()
    assert draw_dataset(tmp_path, 9) == 1
    assert files(tmp_path) == before


def test_the_product_reads_them_as_kohya_folders(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.create()
    draw_dataset(volume.datasets / "demo", 24)
    job = Job(
        name="t",
        base="flux-tiny",
        method="full",
        datasets=[{"path": "datasets/demo"}],
        resolution=128,
        bucket_step=16,
    )
    data = scan(job, volume)
    assert (data.images, data.captions) == (24, 24)
    assert Counter(item.repeats for item in data.items) == {2: 8, 1: 16}
    assert len({item.bucket for item in data.items}) >= 4
    assert not [note for note in data.notes if "captions: 24/24" not in note and "repeats by its name" not in note]


def test_the_caption_says_what_is_seen() -> None:
    for shape in SHAPES:
        for size in SIZES:
            image, caption = draw_picture(shape, size, random.Random(1))
            assert image.size == size
            _, extent, colour, kind, *_, ground, _ = caption.split()
            assert kind == shape.name
            assert image.getpixel((0, 0)) == COLOURS[ground]
            share = (np.asarray(image) == COLOURS[colour]).all(-1).mean() * size[0] * size[1] / min(size) ** 2
            assert 0.15 < share < 0.6 if extent == "large" else 0.05 < share < 0.25
