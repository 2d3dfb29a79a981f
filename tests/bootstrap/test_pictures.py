from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from PIL import Image

from bootstrap.dataset import Item
from bootstrap.images import ImageError
from bootstrap.pictures import read_item
from bootstrap.volume import Volume


def item(root: Path, mask: str = "") -> Item:
    """A picture whose left half is transparent."""
    image = Image.new("RGBA", (64, 32), (200, 60, 40, 255))
    image.paste((0, 0, 0, 0), (0, 0, 32, 32))
    image.save(root / "a.png")
    Image.new("L", (128, 64), 100).save(root / "m.png")
    digest, of_mask = (hashlib.sha256((root / name).read_bytes()).hexdigest() for name in ("a.png", "m.png"))
    return Item("a.png", digest, "", 1, 64, 32, (64, 32), mask=mask, mask_digest=of_mask if mask == "m.png" else "")


@pytest.mark.parametrize(("mask", "corners"), [("alpha", (0, 255)), ("m.png", (100, 100))])
def test_masks(tmp_path: Path, mask: str, corners: tuple[int, int]) -> None:
    picture, found = read_item(item(tmp_path, mask), Volume(tmp_path))
    assert picture.image.size == (64, 32)
    assert found is not None
    assert (found.getpixel((0, 0)), found.getpixel((found.width - 1, 0))) == corners


def test_alpha_of_an_opaque_picture_hides_nothing(tmp_path: Path) -> None:
    Image.new("RGB", (64, 32)).save(tmp_path / "a.png")
    digest = hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    _, mask = read_item(Item("a.png", digest, "", 1, 64, 32, (64, 32), mask="alpha"), Volume(tmp_path))
    assert mask is not None
    assert mask.getextrema() == (255, 255)


@pytest.mark.parametrize("name", ["a.png", "m.png"])
def test_what_changed_or_went_is_told(tmp_path: Path, name: str) -> None:
    one = item(tmp_path, "m.png")
    (tmp_path / name).write_bytes(b"else")
    with pytest.raises(ImageError, match="has changed"):
        read_item(one, Volume(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(ImageError, match="cannot be read"):
        read_item(one, Volume(tmp_path))


def test_without_a_mask(tmp_path: Path) -> None:
    assert read_item(item(tmp_path), Volume(tmp_path))[1] is None
