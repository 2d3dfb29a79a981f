from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bootstrap.dataset import Dataset, Item, scan
from bootstrap.volume import Volume
from entrypoint import preview
from entrypoint.cli import main
from entrypoint.preview import COLUMNS, MARGIN, MOST, PICTURE, Cell, choose, write_preview
from jobs.schema import Job

JOB = "name: demo\nbase: flux-tiny\nmethod: full\ndatasets: [{path: datasets/a}]\nresolution: 128\nbucket_step: 16\n"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """Three pictures: a wide one, red left and blue right; a square one; one with a transparent upper half."""
    folder = tmp_path / "datasets" / "a"
    folder.mkdir(parents=True)
    wide = Image.new("RGB", (400, 200), "blue")
    wide.paste("red", (0, 0, 200, 200))
    wide.save(folder / "a wide.png")
    Image.new("RGB", (256, 256), "lime").save(folder / "b.png")
    half = Image.new("RGBA", (256, 256), (0, 0, 200, 255))
    half.paste((0, 0, 0, 0), (0, 0, 256, 128))
    half.save(folder / "c.png")
    (folder / "b.txt").write_text("Blümchen {a|b}\nzweite Zeile " + "lang " * 80, encoding="utf-8")
    return Volume(tmp_path)


@pytest.fixture
def job() -> Job:
    return Job(
        name="demo", base="flux-tiny", method="full", datasets=[{"path": "datasets/a"}], resolution=128, bucket_step=16
    )


def test_the_sheet_shows_crops_and_masks(volume: Volume, job: Job, tmp_path: Path) -> None:
    data = scan(job, volume)
    items = tuple(replace(item, mask="alpha") if item.path.endswith("c.png") else item for item in data.items)
    told = write_preview(job, replace(data, items=items), volume, tmp_path / "sheet.jpg")
    assert told == f"preview: 3 of 3 in {tmp_path / 'sheet.jpg'}"
    with Image.open(tmp_path / "sheet.jpg") as file:
        sheet = file.convert("RGB")
    assert sheet.width == COLUMNS * (PICTURE + MARGIN) + MARGIN

    def at(cell: int, x: int, y: int) -> tuple[int, ...]:
        return sheet.getpixel((MARGIN + cell * (PICTURE + MARGIN) + x, MARGIN + y))

    # In the order of their buckets: 128 x 128 twice, then the wide one. Pictures stay as small as they are trained.
    assert np.abs(np.array(at(0, 64, 64)) - (0, 255, 0)).max() < 12
    assert np.abs(np.array(at(1, 64, 20)) - (64, 64, 64)).max() < 12  # white, dimmed
    assert np.abs(np.array(at(1, 64, 100)) - (0, 0, 200)).max() < 12
    assert np.abs(np.array(at(2, 10, 40)) - (255, 0, 0)).max() < 12
    assert np.abs(np.array(at(2, 160, 40)) - (0, 0, 255)).max() < 12


def test_a_picture_that_changed_since_is_told_on_the_sheet(volume: Volume, job: Job, tmp_path: Path) -> None:
    data = scan(job, volume)
    for path in (volume.datasets / "a").glob("*.png"):
        Image.new("RGB", (256, 256), "black").save(path)
    write_preview(job, data, volume, tmp_path / "sheet.jpg")
    with Image.open(tmp_path / "sheet.jpg") as sheet:
        assert sheet.height < PICTURE


def items(*buckets: tuple[int, int]) -> list[Item]:
    return [Item(str(number), "", "", 1, 64, 64, bucket) for number, bucket in enumerate(buckets)]


def test_every_bucket_is_shown_and_large_ones_more() -> None:
    chosen = choose(items(*[(64, 64)] * 900, *[(64, 96)] * 100, (96, 64)))
    counts = [sum(item.bucket == bucket for item in chosen) for bucket in ((64, 64), (64, 96), (96, 64))]
    assert sum(counts) == MOST
    assert counts == [53, 6, 1]
    assert len({item.path for item in chosen}) == MOST
    assert len(choose(items(*[(64, 16 * n) for n in range(1, 200)]))) == MOST
    assert [item.path for item in choose(items((64, 96), (64, 64)))] == ["1", "0"]
    assert choose([]) == []


def test_as_a_command(volume: Volume, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "my.yaml"
    job.write_text(JOB)
    before = sorted(os.listdir(tmp_path))
    assert main(["check", str(job), "--volume", str(tmp_path), "--preview"]) == 0
    assert f"preview: 3 of 3 in {tmp_path / 'my.preview.jpg'}" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "my.preview.jpg"])
    (tmp_path / "file").write_text("no folder")
    assert main(["check", str(job), "--volume", str(tmp_path), "--preview", str(tmp_path / "file" / "x.jpg")]) == 64
    assert "cannot be written" in capsys.readouterr().err


def test_the_masks_need_not_be_there(volume: Volume, job: Job, tmp_path: Path) -> None:
    data: Dataset = scan(job, volume)
    gone = tuple(replace(item, mask="datasets/masks/gone.png", mask_digest="x") for item in data.items)
    assert "3 of 3" in write_preview(job, replace(data, items=gone), volume, tmp_path / "sheet.jpg")


def test_one_of_the_crops_and_texts_is_shown(volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"path": "datasets/a", "flip": True, "random_crops": 2, "wildcards": True, "weight": 0.5, "repeats": 3}
    job = Job(name="demo", base="flux-tiny", method="full", datasets=[entry], resolution=128, bucket_step=16)
    drawn: list[Cell] = []
    monkeypatch.setattr(preview, "draw_sheet", lambda cells: drawn.extend(cells) or Image.new("RGB", (8, 8)))
    write_preview(job, scan(job, volume), volume, tmp_path / "sheet.jpg")
    assert {cell.size.partition(", ")[2] for cell in drawn} == {"3 repeats, one of 4 crops, weight 0.5"}
    assert {cell.text.split("\n")[0] for cell in drawn if cell.name == "b.png"} <= {"Blümchen a", "Blümchen b"}
