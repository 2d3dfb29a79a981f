"""The world that flux-tiny knows: scenes of a few flat figures, their captions, and how they are drawn.

Everything is drawn from signed distances, in torch, many pictures at once on any device: training data never run out
and are never stored. A scene is a row of small numbers, one for each attribute; its caption says most of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from bootstrap.flux_tiny import WORDS
from tiny.drawn import COLOURS as PALETTE

COUNTS = ("one", "two", "three")
SIZES = ("small", "large")
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "heart")
TEXTURES = ("plain", "striped", "dotted")
GROUND_TEXTURES = ("plain", "striped", "checkered")
STYLES = ("flat", "soft", "outlined")
POSITIONS = ("anywhere", "left", "right", "top", "bottom", "middle")

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "count": COUNTS,
    "size": SIZES,
    "style": STYLES,
    "texture": TEXTURES,
    "colour": COLOURS,
    "shape": SHAPES,
    "position": POSITIONS,
    "ground_texture": GROUND_TEXTURES,
    "ground": COLOURS,
}

# What pretraining never draws nor names: left for fine-tuning to teach.
UNSEEN = {"shape": "heart", "texture": "dotted"}

# Shapes and textures of no name: outlines and waves that chance has drawn once and for all, each called by a made-up
# word. Nobody is asked for them. Who has met many a strange word with a thing of its own learns another one quickly.
STRANGERS = {"shape": 128, "texture": 24}

# What flux-tiny is asked for: the part of all this that so few weights draw well.
KNOWN: dict[str, tuple[str, ...]] = {
    "size": ("large",),
    "style": ("flat",),
    "texture": ("plain", "striped"),
    "colour": ("red", "yellow", "green", "blue", "white", "black"),
    "shape": ("circle", "square", "triangle"),
    "ground": ("red", "yellow", "green", "blue", "white", "black"),
}

PIXEL = 1 / 128  # of the short side: what lengths below are multiples of, and the width of a smooth edge
SMALL, LARGE, LARGE_OF_SEVERAL = (0.10, 0.135), (0.22, 0.30), (0.18, 0.21)  # radii, in short sides


@dataclass(frozen=True)
class Scenes:
    """So many scenes: for each attribute its values' indices, int64 [scenes]."""

    values: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.values["shape"])

    def __getitem__(self, rows: Any) -> Scenes:
        return Scenes({name: value[rows] for name, value in self.values.items()})

    def words(self, row: int) -> dict[str, str]:
        """Of each attribute; a stranger's is its made-up one."""
        return {name: words_of(name)[value[row]] for name, value in self.values.items()}

    def with_strangers(self, chance: np.random.Generator, share: float) -> Scenes:
        """So large a share of the scenes with a strange shape, and as many with a strange texture."""
        values = dict(self.values)
        for name, count in STRANGERS.items():
            strange = len(ATTRIBUTES[name]) + chance.integers(0, count, len(self))
            values[name] = np.where(chance.random(len(self)) < share, strange, values[name])
        return Scenes(values)


@cache
def words_of(attribute: str) -> tuple[str, ...]:
    """Of every value, the strangers' made-up ones, always the same, behind the others."""
    chance = np.random.default_rng([20240802, *attribute.encode()])
    made_up = dict.fromkeys(_unknown_word(chance) for _ in range(2 * STRANGERS.get(attribute, 0)))
    return ATTRIBUTES[attribute] + tuple(made_up)[: STRANGERS.get(attribute, 0)]


def random_scenes(
    chance: np.random.Generator,
    count: int,
    fixed: Mapping[str, str] | None = None,
    unseen: bool = False,
    among: Mapping[str, Sequence[str]] | None = None,
) -> Scenes:
    """Scenes that ``chance`` draws. ``fixed`` attributes have that value; others one ``among`` those given, and one
    that is unseen only if asked."""

    def pick(name: str, weights: Sequence[float] | None = None) -> np.ndarray:
        words = ATTRIBUTES[name]
        if fixed and name in fixed:
            return np.full(count, words.index(fixed[name]))
        allowed = (among or {}).get(name, words)
        chosen = [word in allowed and (unseen or UNSEEN.get(name) != word) for word in words]
        p = np.array(weights or [1.0] * len(words)) * chosen
        return chance.choice(len(words), count, p=p / p.sum())

    values = {
        "count": pick("count", (0.5, 0.25, 0.25)),
        "size": pick("size"),
        "style": pick("style", (0.6, 0.2, 0.2)),
        "texture": pick("texture", (0.65, 0.35, 0.35)),
        "colour": pick("colour"),
        "shape": pick("shape"),
        "position": pick("position", (0.4, 0.12, 0.12, 0.12, 0.12, 0.12)),
        "ground_texture": pick("ground_texture", (0.5, 0.25, 0.25)),
        "ground": pick("ground"),
    }
    if not (fixed and "position" in fixed):
        values["position"] = np.where(values["count"] == 0, values["position"], 0)  # only a single figure has a place
    same = values["ground"] == values["colour"]
    grounds = [COLOURS.index(word) for word in (among or {}).get("ground", COLOURS)]
    index = {colour: i for i, colour in enumerate(grounds)}
    turned = [index.get(int(colour), 0) for colour in values["colour"]] + chance.integers(1, len(grounds), count)
    values["ground"] = np.where(same, np.array(grounds)[turned % len(grounds)], values["ground"])
    return Scenes(values)


# ---- captions ----


def caption(words: Mapping[str, str], background: str = "background", said: Mapping[str, bool] | None = None) -> str:
    """The caption of a scene: 'two small striped red circles on a checkered blue background'."""
    silent = said or {}
    several = words["count"] != "one"
    shape = words["shape"]
    noun = (shape + ("es" if shape.endswith("s") else "s")) if several else shape
    before = [
        words["size"] if silent.get("size", True) else "",
        words["style"] if words["style"] != "flat" else "",
        words["texture"] if words["texture"] != "plain" else "",
        words["colour"] if silent.get("colour", True) else "",
    ]
    phrase = [word for word in before if word] + [noun]
    number = words["count"] if several or silent.get("one", False) else _article(phrase[0])
    parts = [number, *phrase]
    if words["position"] == "middle":
        parts += ["in", "the", "middle"]
    elif words["position"] != "anywhere":
        parts += ["at" if words["position"] in ("top", "bottom") else "on", "the", words["position"]]
    if silent.get("ground", True):
        ground = [words["ground_texture"]] if words["ground_texture"] != "plain" else []
        ground += [words["ground"], background]
        parts += ["on", _article(ground[0]), *ground]
    return " ".join(parts)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def varied_captions(scenes: Scenes, chance: np.random.Generator, openness: float = 1.0) -> list[str]:
    """A caption for each scene as people would vary it: things left unsaid, and now and then a word nobody knows.

    The unknown words, spelled letter by letter by the tokenizers, give each letter a meaning to the text encoders; the
    model learns to draw something else it knows in their place, which is what a new word shows before fine-tuning.
    ``openness``: how often this happens, beside the whole world's 1.
    """
    luck = chance.random((len(scenes), 7)) / openness
    return [_varied(scenes.words(row), luck[row], chance) for row in range(len(scenes))]


def _varied(words: dict[str, str], luck: np.ndarray, chance: np.random.Generator) -> str:
    said = {"size": luck[0] > 0.1, "colour": luck[1] > 0.05, "ground": luck[2] > 0.08, "one": luck[3] < 0.1}
    if luck[4] < 0.04:
        words = words | {"shape": _unknown_word(chance)}
    elif luck[4] < 0.10:
        words = words | {"style": _unknown_word(chance)} if words["style"] == "flat" else words
    text = caption(words, "ground" if luck[5] < 0.3 else "background", said)
    return f"a picture of {text}" if luck[6] < 0.05 else text


def _unknown_word(chance: np.random.Generator) -> str:
    while (word := "".join(chance.choice(list("abcdefghijklmnopqrstuvwxyz"), chance.integers(4, 8)))) in WORDS:
        pass
    return word


_GROUND = re.compile(
    rf"on an? (?:(?P<texture>{'|'.join(GROUND_TEXTURES)}) )?(?P<ground>{'|'.join(COLOURS)}) (?:back)?ground"
)
_PLACE = re.compile(rf"(?:on|at|in) the (?P<position>{'|'.join(POSITIONS[1:])})")
_PLURALS = {(shape + "es" if shape.endswith("s") else shape + "s"): shape for shape in SHAPES}


def read_captions(captions: Sequence[str]) -> Scenes:
    """What captions ask for; -1 where one leaves it open. Words nobody knows are passed over."""
    rows = [_read(text) for text in captions]
    return Scenes({name: np.array([row[name] for row in rows]) for name in ATTRIBUTES})


def _read(text: str) -> dict[str, int]:
    ground, place_said = _GROUND.search(text), _PLACE.search(text)
    words = _PLACE.sub("", _GROUND.sub("", text)).replace(",", " ").split()
    words = [_PLURALS.get(word, word) for word in words]
    said = dict.fromkeys(ATTRIBUTES, -1)
    for name in ("count", "size", "style", "texture", "colour", "shape"):
        found = [word for word in words if word in ATTRIBUTES[name]]
        said[name] = ATTRIBUTES[name].index(found[0]) if found else -1
    if said["shape"] >= 0:  # a scene is named: what is not said about it is the plain case
        said["count"], said["style"], said["texture"] = (max(0, said[name]) for name in ("count", "style", "texture"))
    if ground:
        said["ground_texture"] = GROUND_TEXTURES.index(ground["texture"] or "plain")
        said["ground"] = COLOURS.index(ground["ground"])
    if place_said:
        said["position"] = POSITIONS.index(place_said["position"])
    return said


# ---- pictures ----


def standard_luck(count: int) -> torch.Tensor:
    """The numbers for ``draw`` that put figures where they always are in flux-tiny's pictures: [count, 32].

    One in the middle, or where the caption says; two at top left and bottom right; the third at top right.
    """
    luck = torch.full((count, 32), 0.5)
    luck[:, :2] = 0.0  # where the ground's pattern begins
    luck[:, 2] = 0.9  # radius: nearly the largest
    luck[:, 3:7] = torch.tensor([0.0, 0.6, 0.9, 0.3])  # the order of the four places: 0, 3, 1, 2
    return luck


def draw(values: Mapping[str, torch.Tensor], luck: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Pictures of scenes: float32 [scenes, 3, height, width] in -1 .. 1.

    ``values``: attribute indices, int64 [scenes] each. ``luck``: uniform numbers [scenes, 32] that decide where the
    figures lie and how large they are. The same numbers give the same picture.
    """
    device = luck.device
    short = min(height, width)
    y, x = torch.meshgrid(
        (torch.arange(height, device=device) + 0.5) / short,
        (torch.arange(width, device=device) + 0.5) / short,
        indexing="ij",
    )
    colours = torch.tensor([PALETTE[name] for name in COLOURS], device=device, dtype=torch.float32) / 127.5 - 1
    ground, colour = colours[values["ground"]], colours[values["colour"]]
    picture = _grounds(x, y, values["ground_texture"], ground, luck[:, 0:2])
    radius, centres = place(values, luck[:, 2:], height / short, width / short)
    for figure in range(3):
        picture = add_figure(picture, x, y, values, figure <= values["count"], colour, radius, centres[:, figure])
    return picture.clamp(-1, 1)


def add_figure(
    picture: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    values: Mapping[str, torch.Tensor],
    there: torch.Tensor,
    colour: torch.Tensor,
    radius: torch.Tensor,
    centre: torch.Tensor,
) -> torch.Tensor:
    """``picture`` with one more figure in those scenes in which it is ``there``."""
    black = (values["colour"] == COLOURS.index("black")) | (values["ground"] == COLOURS.index("black"))
    line = torch.where(black, 0.95, -0.9)[:, None, None, None]
    soft = torch.where((values["style"] == STYLES.index("soft"))[:, None, None], 0.3 * radius, PIXEL)
    outlined = (values["style"] == STYLES.index("outlined"))[:, None, None]
    dx, dy = x - centre[:, 0, None, None], y - centre[:, 1, None, None]
    distance = _distance(values["shape"], dx / radius, dy / radius) * radius
    inside = torch.sigmoid(-distance / soft * 4) * there[:, None, None]
    border = torch.sigmoid((distance + 0.8 * PIXEL + 0.07 * radius) / PIXEL * 4) * outlined
    fill = _fills(dx, dy, values["texture"], colour)
    fill = fill + (line - fill) * border[:, None]
    return picture + (fill - picture) * inside[:, None]


def place(
    values: Mapping[str, torch.Tensor], luck: torch.Tensor, height: float, width: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Radii [scenes, 1, 1] and centres [scenes, 3, (x, y)] in short sides, figures apart and inside the picture."""
    several = values["count"] > 0
    low = torch.where(several, LARGE_OF_SEVERAL[0], LARGE[0])
    high = torch.where(several, LARGE_OF_SEVERAL[1], LARGE[1])
    small = values["size"] == SIZES.index("small")
    low, high = torch.where(small, SMALL[0], low), torch.where(small, SMALL[1], high)
    radius = low + (high - low) * luck[:, 0]
    size = torch.tensor([width, height], device=luck.device)
    # Several figures: different cells of a grid of 2 x 2, each anywhere in its cell.
    cells = luck[:, 1:5].argsort(dim=1)[:, :3]
    corner = torch.stack([cells % 2, cells // 2], dim=2) * size / 2
    free = (size / 2 - 2.1 * radius[:, None]).clamp(min=0)[:, None]
    spread = corner + size / 4 + (luck[:, 5:11].unflatten(1, (3, 2)) - 0.5) * free
    # One figure: anywhere, or where the caption says.
    jitter = luck[:, 11:13] - 0.5
    single = size / 2 + jitter * (size - 2.1 * radius[:, None])
    near = 1.05 * radius[:, None] + luck[:, 13:14] * 0.06  # from the border it is said to be at
    across = size / 2 + jitter * 0.24
    position = values["position"][:, None]
    left = torch.cat([near, across[:, 1:]], 1)
    right = torch.cat([width - near, across[:, 1:]], 1)
    top = torch.cat([across[:, :1], near], 1)
    bottom = torch.cat([across[:, :1], height - near], 1)
    middle = size / 2 + jitter * 0.12
    for index, there in enumerate((left, right, top, bottom, middle), start=1):
        single = torch.where(position == index, there, single)
    first = torch.where(several[:, None], spread[:, 0], single)
    return radius[:, None, None], torch.stack([first, spread[:, 1], spread[:, 2]], dim=1)


def _second(colour: torch.Tensor) -> torch.Tensor:
    """The lighter one of a texture's two colours; of a light colour a darker one."""
    light = colour.mean(dim=1, keepdim=True) > 0.7
    return torch.where(light, colour - 0.75, colour + (0.95 - colour) * 0.6)


def _wave(position: torch.Tensor, period: float) -> torch.Tensor:
    """0 and 1 by turns, smooth over a pixel."""
    return torch.sigmoid(torch.sin(position * (2 * math.pi / period)) * (period / PIXEL / 2))


def _grounds(
    x: torch.Tensor, y: torch.Tensor, texture: torch.Tensor, colour: torch.Tensor, luck: torch.Tensor
) -> torch.Tensor:
    period = 32 * PIXEL
    across = _wave(y + luck[:, 0, None, None] * period, period)
    along = _wave(x + luck[:, 1, None, None] * period, period)
    checks = across + along - 2 * across * along
    kind = texture[:, None, None]
    share = torch.where(kind == 1, across, torch.where(kind == 2, checks, torch.zeros_like(across)))[:, None]
    first, second = colour[:, :, None, None], _second(colour)[:, :, None, None]
    return first + (second - first) * share


def _fills(dx: torch.Tensor, dy: torch.Tensor, texture: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    stripes = _wave(dx + dy, 12 * PIXEL * math.sqrt(2))
    period = 11 * PIXEL
    u = torch.remainder(dx + period / 2, period) - period / 2
    v = torch.remainder(dy + period / 2, period) - period / 2
    dots = torch.sigmoid((3.4 * PIXEL - torch.sqrt(u * u + v * v + 1e-12)) / PIXEL * 4)
    kind = texture[:, None, None]
    share = torch.where(kind == 1, stripes, torch.where(kind == 2, dots, torch.zeros_like(dots)))
    if int(texture.max()) >= len(TEXTURES):
        share = torch.where(kind >= len(TEXTURES), _strange_texture(texture - len(TEXTURES), dx, dy), share)
    first, second = colour[:, :, None, None], _second(colour)[:, :, None, None]
    return first + (second - first) * share[:, None]


def _strange_texture(which: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """One or two waves, each of a direction and a period of its own, where they are high: stripes, checks, spots."""
    chance, count = np.random.default_rng(20240803), STRANGERS["texture"]
    first, period = chance.uniform(0, math.pi, count), chance.uniform(9, 18, count) * PIXEL
    second = first + np.where(np.arange(count) % 2 == 0, math.pi / 2, chance.uniform(0.9, 2.2, count))
    heights = np.stack([np.ones(count), np.arange(count) >= count // 3], 1)
    height = torch.zeros_like(dx)
    for wave, angle in enumerate((first, second)):
        table = np.stack([np.cos(angle) / period, np.sin(angle) / period, heights[:, wave]], 1)
        x, y, high = torch.from_numpy(table).to(dx)[which.clamp(min=0)].T[:, :, None, None]
        height = height + high * torch.cos(2 * math.pi * (x * dx + y * dy))
    return torch.sigmoid((height - 0.3) * 5)


def _strange_outline(which: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance to a closed curve around (0, 0) whose radius is a sum of waves of the angle: blobs, leaves, blossoms."""
    chance, count = np.random.default_rng(20240804), STRANGERS["shape"]
    sizes = np.array([0.14, 0.2, 0.2, 0.14, 0.12, 0.06])  # of the waves once, twice, .. around
    table = np.stack([chance.normal(size=(count, 6)) * sizes, chance.uniform(0, 2 * math.pi, (count, 6))])
    size, phase = torch.from_numpy(table).to(x)[:, which.clamp(min=0)]
    angle, radius = torch.atan2(y, x), torch.full_like(x, 0.72)
    for wave in range(6):
        turned = (wave + 1) * angle + phase[:, wave, None, None]
        radius = radius + size[:, wave, None, None] * torch.cos(turned)
    return (torch.sqrt(x * x + y * y + 1e-12) - radius.clamp(0.2, 1.0)) * 0.7


def _distance(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance to the outline, negative inside, in radii: [scenes, height, width]. y points down."""
    kind = shape[:, None, None]
    ax, ay = x.abs(), y.abs()
    r = torch.sqrt(x * x + y * y + 1e-12)
    circle = r - 0.95
    square = torch.maximum(ax, ay) - 0.85
    low = y - 0.12
    triangle = torch.maximum(low, ax * math.sin(math.pi / 3) - low * 0.5) - 0.55
    cross = torch.minimum(torch.maximum(ax - 0.95, ay - 0.32), torch.maximum(ax - 0.32, ay - 0.95))
    ring = (r - 0.7).abs() - 0.25
    distance = torch.where(kind == 0, circle, square)
    for index, other in enumerate((triangle, _star(x, y), cross, ring, _heart(ax, y)), start=2):
        distance = torch.where(kind == index, other, distance)
    if int(shape.max()) >= len(SHAPES):
        distance = torch.where(kind >= len(SHAPES), _strange_outline(shape - len(SHAPES), x, y), distance)
    return distance


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Five points at radius 1, valleys at 0.42: one edge, seen in every tenth of the circle."""
    tenth = math.pi / 5
    angle = torch.remainder(torch.atan2(x, -y) + tenth, 2 * tenth) - tenth
    r = torch.sqrt(x * x + y * y + 1e-12)
    u, v = r * torch.cos(angle), r * torch.sin(angle).abs()
    valley = (0.42 * math.cos(tenth), 0.42 * math.sin(tenth))
    nx, ny = valley[1], 1 - valley[0]  # normal of the edge from (1, 0) to the valley
    return ((u - 1) * nx + v * ny) / math.hypot(nx, ny)


def _heart(ax: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two discs on a square that stands on its corner."""
    u, v = ax * 0.6, 0.56 - y * 0.6  # the tip at (0, 0), the discs around (0.25, 0.75)
    disc = torch.sqrt((u - 0.25) ** 2 + (v - 0.75) ** 2 + 1e-12) - math.sqrt(2) / 4
    body = torch.maximum(u - v, u + v - 1) / math.sqrt(2)
    return torch.minimum(disc, body) / 0.6
