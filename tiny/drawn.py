"""Pictures drawn by the program, with captions: a small dataset that is always there.

One folder for each shape, named as kohya's tools name them (``2_circle``: two repeats), in several aspect ratios around
flux-tiny's 128 px. The same seed draws the same files.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from bootstrap.volume import write_atomically

COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 140, 30),
    "yellow": (248, 212, 40),
    "green": (46, 160, 67),
    "blue": (38, 84, 214),
    "purple": (128, 48, 176),
    "white": (250, 250, 250),
    "black": (20, 20, 24),
}
SIZES = ((128, 128), (192, 128), (128, 192), (160, 128), (128, 160), (144, 144))  # width, height in pixels
SMOOTH = 4  # drawn so many times larger, then reduced: smooth edges

Point = tuple[float, float]


@dataclass(frozen=True)
class Shape:
    name: str
    repeats: int
    outline: Callable[[], list[Point]]  # around (0, 0), within a radius of 1


def _regular(corners: int, turn: float = -90.0) -> list[Point]:
    angles = [math.radians(turn + 360 * corner / corners) for corner in range(corners)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _star() -> list[Point]:
    return [(x, y) if i % 2 == 0 else (0.42 * x, 0.42 * y) for i, (x, y) in enumerate(_regular(10))]


SHAPES = (
    Shape("circle", 2, lambda: _regular(90)),
    Shape("square", 1, lambda: _regular(4, -45)),
    Shape("star", 1, _star),
)


def draw_dataset(folder: Path, count: int = 24, seed: int = 1) -> int:
    """Writes ``count`` pictures (PNG, each with a .txt beside it) below ``folder``; gives how many were written.

    A file that is there already is left as it is: people may have put their own in its place.
    """
    chance = random.Random(seed)
    written = 0
    for index in range(count):
        shape = SHAPES[index % len(SHAPES)]
        size = SIZES[index // len(SHAPES) % len(SIZES)]
        image, caption = draw_picture(shape, size, chance)
        place = folder / f"{shape.repeats}_{shape.name}" / f"{shape.name}-{index // len(SHAPES) + 1:02d}.png"
        written += write_example(place, image, caption)
    return written


def write_example(place: Path, image: Image.Image, caption: str) -> bool:
    """A PNG with its caption in a .txt beside it; whether it was written: a picture that is there stays as it is."""
    if place.exists():
        return False
    write_atomically(place.with_suffix(".txt"), caption + "\n")
    file = io.BytesIO()
    image.save(file, "PNG")
    write_atomically(place, file.getvalue())
    return True


def draw_picture(shape: Shape, size: tuple[int, int], chance: random.Random) -> tuple[Image.Image, str]:
    """A picture of ``shape`` and what it shows in words."""
    colour, ground = chance.sample(sorted(COLOURS), 2)
    large = chance.random() < 0.5
    radius = (0.42 if large else 0.26) * min(size) * SMOOTH
    width, height = size[0] * SMOOTH, size[1] * SMOOTH
    x = width / 2 + chance.uniform(-1, 1) * (width / 2 - radius) * 0.8
    y = height / 2 + chance.uniform(-1, 1) * (height / 2 - radius) * 0.8
    image = Image.new("RGB", (width, height), COLOURS[ground])
    corners = [(x + radius * dx, y + radius * dy) for dx, dy in shape.outline()]
    ImageDraw.Draw(image).polygon(corners, fill=COLOURS[colour])
    article = "an" if ground[0] in "aeiou" else "a"
    caption = f"a {'large' if large else 'small'} {colour} {shape.name} on {article} {ground} background"
    return image.resize(size, Image.Resampling.BOX), caption
