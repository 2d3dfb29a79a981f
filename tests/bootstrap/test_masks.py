from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bootstrap.images import ImageError, decode, inspect, view
from bootstrap.masks import MaskFolder, read_mask, why_not


def saved(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def halves(size: tuple[int, int], mode: str = "L") -> Image.Image:
    """Left black, right white."""
    image = Image.new(mode, size, "black")
    image.paste("white", (size[0] // 2, 0, *size))
    return image


@pytest.mark.parametrize("size", [(128, 64), (64, 32), (256, 128)])
def test_a_mask_lies_over_its_picture_at_any_size(size: tuple[int, int]) -> None:
    """Picture and mask are the same drawing: after crop and resize they still are, whatever the mask's own size."""
    picture = decode(saved(halves((128, 64), "RGB")))
    box = (32.0, 0.0, 128.0, 64.0)  # black up to a third of it
    seen = view(picture, (96, 64), box, read_mask(saved(halves(size)), 128, 64))
    assert seen.mask is not None
    assert (seen.pixels.shape, seen.mask.shape) == ((64, 96, 3), (64, 96))
    assert np.array_equal(seen.mask, seen.pixels[..., 0])
    assert seen.mask[:, :32].max() == 0
    assert seen.mask[:, 32:].min() == 255


def test_a_mask_from_alpha() -> None:
    image = Image.new("RGBA", (64, 64), (10, 20, 30, 255))
    image.paste((255, 0, 255, 0), (0, 0, 64, 16))
    picture = decode(saved(image))
    assert picture.alpha is not None
    seen = view(picture, (32, 32), (0, 0, 64, 64), picture.alpha)
    assert seen.mask is not None
    assert seen.mask[:, 0].tolist() == [0] * 8 + [255] * 24
    assert seen.pixels[0, 0].tolist() == [255, 255, 255]  # not the magenta below
    assert decode(saved(Image.new("RGBA", (8, 8), (1, 2, 3, 255)))).alpha is None


def test_a_mask_is_averaged_over_areas_and_never_overshoots() -> None:
    mask = view(decode(saved(halves((96, 96), "RGB"))), (33, 33), (0, 0, 96, 96), halves((96, 96))).mask
    assert mask is not None
    row = mask[0].tolist()
    assert row == [0] * 16 + [128] + [255] * 16


def test_a_mask_drawn_on_transparent_ground() -> None:
    """White strokes on nothing: nothing is black."""
    drawn = Image.new("RGBA", (64, 64), (255, 255, 255, 0))
    drawn.paste((255, 255, 255, 255), (32, 0, 64, 64))
    assert np.array_equal(np.asarray(read_mask(saved(drawn), 64, 64)), np.asarray(halves((64, 64))))


def test_masks_are_found_by_their_pictures_names(tmp_path: Path) -> None:
    names = ("a.png", "a.jpg.png", "cats/a.webp", "cats/e\u0301.png")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    folder = MaskFolder(tmp_path)
    assert folder.of("", "a.jpg") == tmp_path / "a.jpg.png"
    assert folder.of("", "a.webp") == tmp_path / "a.png"
    assert folder.of("cats", "a.jpg") == tmp_path / "cats/a.webp"
    assert folder.of("cats", unicodedata.normalize("NFC", "e\u0301.jpg")) == tmp_path / names[3]
    assert folder.of("dogs", "a.jpg") is None


@pytest.mark.parametrize(
    ("data", "words"),
    [(saved(halves((64, 64))), "covers its whole picture"), (b"<html>", "web page"), (saved(halves((128, 65))), "")],
)
def test_a_mask_is_read_only_where_it_fits(data: bytes, words: str) -> None:
    if words:
        with pytest.raises(ImageError, match=words):
            read_mask(data, 128, 64)
    else:
        assert read_mask(data, 128, 64).size == (128, 65)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (halves((64, 64)), "covers its whole picture"),
        (Image.new("L", (128, 64)), "black all over"),
        (Image.new("RGBA", (128, 64), (255, 255, 255, 0)), "black all over"),
        (halves((128, 65)), ""),
    ],
)
def test_what_inspection_has_found_tells_whether_a_mask_fits(tmp_path: Path, image: Image.Image, words: str) -> None:
    image.save(tmp_path / "m.png")
    why = why_not(inspect(tmp_path / "m.png"), 128, 64)
    assert words in why
    assert bool(why) == bool(words)
    assert why_not(None, 128, 64) == "is no picture"
