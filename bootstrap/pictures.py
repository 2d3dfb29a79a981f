"""An item's picture and mask as they lie on the volume, held to what the scan has seen."""

from __future__ import annotations

import hashlib

from PIL import Image

from bootstrap.archives import read_file
from bootstrap.dataset import Item
from bootstrap.images import ImageError, Picture, decode
from bootstrap.masks import ALPHA, read_mask
from bootstrap.volume import Volume


def read_item(item: Item, volume: Volume) -> tuple[Picture, Image.Image | None]:
    """The picture and its mask (L, of any size in the same proportions), if the item has one.

    Raises ImageError where a file is gone, or is not what it was when the scan saw it.
    """
    picture = decode(_unchanged(item.path, item.digest, volume))
    if not item.mask:
        return picture, None
    if item.mask == ALPHA:
        return picture, picture.alpha or Image.new("L", picture.image.size, 255)
    return picture, read_mask(_unchanged(item.mask, item.mask_digest, volume), *picture.image.size)


def _unchanged(path: str, digest: str, volume: Volume) -> bytes:
    try:
        data = read_file(volume.resolve(path))
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise ImageError("has changed since this run began to prepare")
    return data
