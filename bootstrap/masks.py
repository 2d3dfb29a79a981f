"""Masks: which parts of a picture are learned. White is learned, black is not, grey in part.

A mask is the picture's own alpha channel, or a picture of its own in a folder of masks that is laid out like the
dataset: ``masks/cats/a.png`` is the mask of ``cats/a.jpg``.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from bootstrap.folders import walk
from bootstrap.images import ImageError, decode, luminance

ALPHA = "alpha"  # what a job, and an item, say for a mask from the picture's own alpha channel
# A mask made from a scaled copy of the picture has its proportions but for the rounding of a side, here of a copy with
# a shorter side of 50 px or more.
PROPORTIONS_DIFFER = 0.02


@dataclass(frozen=True)
class MaskFacts:
    """What the scan keeps of a mask file that fits its picture."""

    digest: str  # sha256 of the file's bytes
    learned: float  # share of its area, 0 .. 1


class MaskFolder:
    """The mask files below a folder, found by their picture's name below the dataset.

    ``cats/a.jpg`` has ``cats/a.jpg.png`` (made for that very file) before ``cats/a.*``; names match across Unicode
    forms and whatever the ending. Raises nothing for what cannot be read: ``notes`` tells.
    """

    def __init__(self, root: Path) -> None:
        tree = walk(root)
        self.notes = tree.notes
        self._by_name: dict[str, Path] = {}
        for folder in tree.folders:
            for name in folder.files:
                key = _name_of(folder.name, Path(name).stem)
                self._by_name.setdefault(key, folder.path / name)

    def of(self, folder: str, image: str) -> Path | None:
        """The mask of the file ``image`` in the dataset's folder ``folder`` ("" for the dataset itself)."""
        return self._by_name.get(_name_of(folder, image)) or self._by_name.get(_name_of(folder, Path(image).stem))


def _name_of(folder: str, name: str) -> str:
    return unicodedata.normalize("NFC", f"{folder}/{name}")


def read_mask(data: bytes, width: int, height: int) -> Image.Image:
    """The mask in a file's bytes, L, upright, in its own size.

    Raises ImageError for what is no picture, and for other proportions than those of its picture of ``width`` x
    ``height`` pixels.
    """
    mask = luminance(decode(data))
    if abs(mask.width * height / (mask.height * width) - 1) > PROPORTIONS_DIFFER:
        raise ImageError(
            f"is {mask.width} x {mask.height} px, and the picture is {width} x {height} px: a mask covers its whole "
            "picture"
        )
    return mask


def inspect_mask(path: Path, width: int, height: int) -> MaskFacts:
    """Decodes a mask file whole. Raises ImageError where it cannot be used, or hides all of its picture."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror})") from error
    learned = share_learned(read_mask(data, width, height))
    if not learned:
        raise ImageError("is black all over: nothing of the picture would be learned")
    return MaskFacts(hashlib.sha256(data).hexdigest(), learned)


def share_learned(mask: Image.Image) -> float:
    """The mean of a mask, 0 .. 1."""
    histogram = mask.histogram()
    return sum(value * count for value, count in enumerate(histogram)) / (255 * mask.width * mask.height)
