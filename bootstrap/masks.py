"""Masks: which parts of a picture are learned. White is learned, black is not, grey in part.

A mask is the picture's own alpha channel, or a picture of its own in a folder of masks that is laid out like the
dataset: ``masks/cats/a.png`` is the mask of ``cats/a.jpg``.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

from PIL import Image

from bootstrap.folders import walk
from bootstrap.images import ImageError, ImageFacts, decode, luminance

ALPHA = "alpha"  # what a job, and an item, say for a mask from the picture's own alpha channel
# A mask made from a scaled copy of the picture has its proportions but for the rounding of a side, here of a copy with
# a shorter side of 50 px or more.
PROPORTIONS_DIFFER = 0.02


class MaskFolder:
    """The mask files below a folder, found by their picture's name below the dataset.

    ``cats/a.jpg`` has ``cats/a.jpg.png`` (made for that very file) before ``cats/a.*``; names match across Unicode
    forms and whatever the ending. What cannot be read, ``notes`` tells. Raises ArchiveError.
    """

    def __init__(self, root: Path) -> None:
        tree = walk(root)
        self.root = root
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
    if why := _other_proportions(mask.width, mask.height, width, height):
        raise ImageError(why)
    return mask


def why_not(mask: ImageFacts | None, width: int, height: int) -> str:
    """Why a file, by what its inspection has found, is no mask of a picture of ``width`` x ``height`` pixels; "" where
    it is one."""
    if mask is None:
        return "is no picture"
    if mask.black:
        return "is black all over: nothing of the picture would be learned"
    return _other_proportions(mask.width, mask.height, width, height)


def _other_proportions(mask_width: int, mask_height: int, width: int, height: int) -> str:
    if abs(mask_width * height / (mask_height * width) - 1) <= PROPORTIONS_DIFFER:
        return ""
    told = f"is {mask_width} x {mask_height} px, and the picture is {width} x {height} px"
    return f"{told}: a mask covers its whole picture"
