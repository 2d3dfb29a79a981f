"""The data of a job as a table: what each dataset has brought, and the sizes that its pictures are trained at."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from bootstrap.dataset import Dataset, Part

WIDTH = 120
COLUMNS = ("dataset", "images", "captions", "repeats", "sizes", "an epoch", "skipped")


def render_data(dataset: Dataset) -> str:
    """A row for each dataset, one for all where there are several, and how many images an epoch has in each bucket."""
    rows = [COLUMNS, *(_row(part) for part in dataset.parts)]
    if len(dataset.parts) > 1:
        parts = dataset.parts
        images, captions, skipped = (sum(counts) for counts in zip(*map(_counts, parts), strict=True))
        sizes = len({item.bucket for item in dataset.items})
        in_epoch = sum(part.per_epoch for part in parts)
        rows.append(("all", str(images), f"{captions}/{images}", "", str(sizes), str(in_epoch), str(skipped)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    buckets = ", ".join(f"{width} x {height}: {count}" for width, height, count in dataset.summary().buckets)
    lines.append(textwrap.fill(f"sizes, with their images in an epoch: {buckets}", WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def _counts(part: Part) -> tuple[int, int, int]:
    return part.images, part.captions, part.skipped


def _row(part: Part) -> Sequence[str]:
    path = part.path if len(part.path) <= 50 else f"...{part.path[-47:]}"
    if not part.fetched:
        return path, *["?"] * (len(COLUMNS) - 1)
    least, most = part.repeats
    repeats = str(least) if least == most else f"{least}-{most}"
    captions = f"{part.captions}/{part.images}"
    return path, str(part.images), captions, repeats, str(part.buckets), str(part.per_epoch), str(part.skipped)
