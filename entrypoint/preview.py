"""A contact sheet of a job's data as the trainer will see them: crops, sizes, captions, repeats, masks."""

from __future__ import annotations

import io
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from bootstrap.buckets import Size
from bootstrap.captions import draw_text
from bootstrap.dataset import Dataset, Item
from bootstrap.draws import Use, draw
from bootstrap.fonts import font, printable
from bootstrap.images import ImageError, view
from bootstrap.inspection import AT_ONCE, in_order
from bootstrap.pictures import read_item
from bootstrap.volume import Volume, write_atomically
from bootstrap.wanted import crop_at, crops_of
from jobs.schema import DatasetEntry, Job

MOST = 60  # pictures on a sheet: more cannot be looked at, and none of the larger sets fits anyway
COLUMNS = 6
PICTURE = 256  # pixels of a picture's longer side on the sheet
LINES, LINE, LETTERS = 7, 15, 38  # of text below a picture; pixels of a line, letters in it
MARGIN = 12
DIMMED = 0.25  # brightness of what a mask keeps from being learned
PAPER, INK, FAINT = (250, 250, 248), (20, 20, 20), (110, 110, 110)
ENCODING = {"quality": 90, "subsampling": 0}


@dataclass(frozen=True)
class Cell:
    """One picture of the sheet."""

    picture: Image.Image | None  # None where it cannot be read
    size: str  # what it is trained at, and its repeats
    name: str
    text: str


def write_preview(job: Job, dataset: Dataset, volume: Volume, file: Path) -> str:
    """Writes the sheet as a JPEG; gives a line for people. Raises OSError."""
    chosen = choose(dataset.items)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        places = enumerate(chosen)
        cells = list(in_order(pool, lambda pair: _cell(job, pair[1], pair[0], volume), places, 2 * AT_ONCE))
    sheet = draw_sheet(cells)
    write_atomically(file, _encoded(sheet))
    return f"preview: {len(chosen)} of {len(dataset.items)} in {file}"


def choose(items: Sequence[Item], most: int = MOST) -> list[Item]:
    """At most ``most`` items, bucket by bucket: of each a share as it has of all but at least one, evenly spaced.

    Where there are more buckets than that, the fullest.
    """
    buckets: dict[Size, list[Item]] = defaultdict(list)
    for item in items:
        buckets[item.bucket].append(item)
    fullest = sorted(buckets, key=lambda bucket: (-len(buckets[bucket]), bucket))[:most]
    shares = dict.fromkeys(fullest, 1)
    for _ in range(min(most, sum(len(buckets[bucket]) for bucket in fullest)) - len(fullest)):
        open_ones = [bucket for bucket in fullest if shares[bucket] < len(buckets[bucket])]
        shares[max(open_ones, key=lambda bucket: len(buckets[bucket]) / shares[bucket])] += 1
    return [
        buckets[bucket][place * len(buckets[bucket]) // count]
        for bucket, count in sorted(shares.items())
        for place in range(count)
    ]


def _cell(job: Job, item: Item, place: int, volume: Volume) -> Cell:
    """The item as a first step could show it: one of its crops, one of its texts."""
    entry = job.datasets[item.dataset]
    size = f"{item.bucket[0]} x {item.bucket[1]}" + "".join(f", {more}" for more in _about(item, entry))
    name = Path(item.path).name
    try:
        picture, mask = read_item(item, volume)
    except ImageError as error:
        return Cell(None, size, name, str(error))
    crop = crop_at(job, item, 0, place)
    seen = view(picture, item.bucket, crop.box, mask)
    pixels = seen.pixels
    if seen.mask is not None:
        pixels = (pixels * (DIMMED + (1 - DIMMED) * seen.mask[..., None] / 255)).astype(np.uint8)
    shown = Image.fromarray(pixels[:, ::-1] if crop.mirrored else pixels)
    shown.thumbnail((PICTURE, PICTURE), Image.Resampling.LANCZOS)
    text = draw_text(item.caption, entry, draw(job.seed, Use.CAPTION, 0, place))
    return Cell(shown, size, name, text or "(empty caption)")


def _about(item: Item, entry: DatasetEntry) -> Iterator[str]:
    """What the picture alone does not show."""
    if item.repeats > 1:
        yield f"{item.repeats} repeats"
    if (crops := len(crops_of(item, entry))) > 1:
        yield f"one of {crops} crops"
    if entry.weight != 1:
        yield f"weight {entry.weight:g}"


def draw_sheet(cells: Sequence[Cell]) -> Image.Image:
    """The cells in rows of COLUMNS, each row as high as its highest cell needs."""
    rows = [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]
    heights = [max(_height(cell) for cell in row) for row in rows]
    sheet = Image.new("RGB", (COLUMNS * (PICTURE + MARGIN) + MARGIN, sum(heights) + MARGIN), PAPER)
    draw, letters = ImageDraw.Draw(sheet), font(11)
    top = MARGIN
    for row, height in zip(rows, heights, strict=True):
        for place, cell in enumerate(row):
            left, under = MARGIN + place * (PICTURE + MARGIN), top
            if cell.picture:
                sheet.paste(cell.picture, (left, under))
                under += cell.picture.height + 4
            for number, line in enumerate(_lines(cell)):
                draw.text((left, under + number * LINE), line, FAINT if number == 1 else INK, letters)
        top += height
    return sheet


def _height(cell: Cell) -> int:
    return (cell.picture.height + 4 if cell.picture else 0) + len(_lines(cell)) * LINE + 2 * MARGIN


def _lines(cell: Cell) -> list[str]:
    """The text below a picture; what is too long ends in dots."""
    lines = [cell.size, cell.name if len(cell.name) <= LETTERS else f"{cell.name[: LETTERS - 3]}..."]
    lines += [line for part in cell.text.splitlines() for line in textwrap.wrap(part, LETTERS)]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"{lines[LINES - 1][: LETTERS - 3]}..."]
    return [printable(line) for line in lines]


def _encoded(sheet: Image.Image) -> bytes:
    file = io.BytesIO()
    sheet.save(file, "JPEG", **ENCODING)
    return file.getvalue()
