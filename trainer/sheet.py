"""Pictures in rows and columns with their labels, as one picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from PIL import Image, ImageDraw

from bootstrap.fonts import Font, font, printable

MARGIN = 12  # pixels
PAPER, INK, FAINT = (250, 250, 248), (20, 20, 20), (110, 110, 110)
MOST_LINES = 4  # of a prompt


@dataclass(frozen=True)
class Row:
    """Pictures of one prompt with one seed, one for each column."""

    prompt: str
    settings: str
    pictures: Sequence[Image.Image]


def draw_grid(columns: Sequence[str], rows: Sequence[Row], cell: int) -> Image.Image:
    """Column labels above, each prompt above its rows, settings below each row. Pictures larger than ``cell`` pixels
    are scaled down to it."""
    size = max(11, cell // 24)  # of letters
    letters, line = font(size), size + size // 2
    width = max(min(max(p.width, p.height), cell) for row in rows for p in row.pictures)
    whole = MARGIN + len(columns) * (width + MARGIN)
    parts = [_labels(columns, width, letters, line)]
    for prompt, some in groupby(rows, lambda row: row.prompt):
        parts.append(_text(_wrapped(prompt, letters, whole - 2 * MARGIN), INK, letters, line))
        parts += [_row(row, width, cell, letters, line) for row in some]
    sheet = Image.new("RGB", (whole, MARGIN + sum(part.height for part in parts)), PAPER)
    top = MARGIN
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height
    return sheet


def _labels(columns: Sequence[str], width: int, letters: Font, line: int) -> Image.Image:
    wrapped = [_wrapped(label, letters, width) for label in columns]
    strip = Image.new(
        "RGB", (MARGIN + len(columns) * (width + MARGIN), max(map(len, wrapped)) * line + MARGIN // 2), PAPER
    )
    for place, lines in enumerate(wrapped):
        _write(strip, lines, MARGIN + place * (width + MARGIN), INK, letters, line)
    return strip


def _row(row: Row, width: int, cell: int, letters: Font, line: int) -> Image.Image:
    shown = []
    for picture in row.pictures:
        small = picture.copy()
        small.thumbnail((cell, cell), Image.Resampling.LANCZOS)
        shown.append(small)
    height = max(picture.height for picture in shown)
    strip = Image.new("RGB", (MARGIN + len(shown) * (width + MARGIN), height + line + MARGIN), PAPER)
    for place, picture in enumerate(shown):
        strip.paste(picture, (MARGIN + place * (width + MARGIN), 0))
    settings = _wrapped(row.settings, letters, strip.width - 2 * MARGIN)[:1]
    _write(strip, settings, MARGIN, FAINT, letters, line, top=height + 2)
    return strip


def _text(lines: Sequence[str], colour: tuple[int, int, int], letters: Font, line: int) -> Image.Image:
    width = MARGIN * 2 + max(int(letters.getlength(text)) for text in lines)
    strip = Image.new("RGB", (width, len(lines) * line + MARGIN // 2), PAPER)
    _write(strip, lines, MARGIN, colour, letters, line)
    return strip


def _write(
    on: Image.Image,
    lines: Sequence[str],
    left: int,
    colour: tuple[int, int, int],
    letters: Font,
    line: int,
    top: int = 0,
) -> None:
    draw = ImageDraw.Draw(on)
    for number, text in enumerate(lines):
        draw.text((left, top + number * line), text, colour, letters)


def _wrapped(text: str, letters: Font, width: int) -> list[str]:
    """Lines that fit into so many pixels; what is too long ends in dots."""
    text = printable(" ".join(text.split()))
    count = max(4, int(len(text) * width / max(1.0, letters.getlength(text))))
    while True:
        lines = textwrap.wrap(text, count) or [""]
        if count <= 4 or all(letters.getlength(line) <= width for line in lines):
            break
        count -= 1
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], lines[MOST_LINES - 1][: count - 3] + "..."]
