from __future__ import annotations

import io
import struct
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from bootstrap import images
from bootstrap.images import MAX_PIXELS, MOST_BYTES, ImageError, image_format, inspect
from bootstrap.images import decode as decode_picture

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def decode(data: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    picture = decode_picture(data)
    return picture.image, picture.notes


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def corners() -> Image.Image:
    """32 x 16: the four quarters red, green / blue, white."""
    image = Image.new("RGB", (32, 16), WHITE)
    for box, colour in (((0, 0), RED), ((16, 0), GREEN), ((0, 8), BLUE)):
        image.paste(colour, (*box, box[0] + 16, box[1] + 8))
    return image


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("JPEG", "JPEG"),
        ("PNG", "PNG"),
        ("WEBP", "WEBP"),
        ("GIF", "GIF"),
        ("TIFF", "TIFF"),
        ("BMP", "BMP"),
        ("AVIF", "AVIF"),
        ("JPEG2000", "JPEG2000"),
    ],
)
def test_each_kind_is_known_by_content_and_decoded(form: str, expected: str) -> None:
    data = saved(Image.new("RGB", (48, 32), (200, 60, 40)), form)
    assert image_format(data[:16]) == expected
    image, notes = decode(data)
    assert (image.mode, image.size, notes) == ("RGB", (48, 32), ())
    assert np.abs(np.asarray(image).mean((0, 1)) - (200, 60, 40)).max() < 6


def test_heic_is_read() -> None:
    heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    heif.from_pillow(Image.new("RGB", (64, 48), (200, 60, 40))).save(file)
    assert image_format(file.getvalue()[:16]) == "HEIF"
    image, _ = decode(file.getvalue())
    assert np.abs(np.asarray(image).mean((0, 1)) - (200, 60, 40)).max() < 6


@pytest.mark.parametrize(
    ("values", "note"), [((0.0, 1.0), "0..1"), ((0.0, 255.0), "0..255"), ((0.0, 4000.0), "0..4000")]
)
def test_float_grey(values: tuple[float, float], note: str) -> None:
    image, notes = decode(saved(Image.fromarray(np.array([values, values], np.float32)), "TIFF"))
    assert (image.getpixel((0, 0)), image.getpixel((1, 0))) == ((0, 0, 0), WHITE)
    assert note in notes[0]


@pytest.mark.parametrize("mode", ["1", "L", "YCbCr", "LAB"])
def test_other_modes_become_rgb(mode: str) -> None:
    form = "JPEG" if mode == "YCbCr" else "TIFF"
    image, _ = decode(saved(Image.new(mode, (8, 8)), form))
    assert (image.mode, image.size) == ("RGB", (8, 8))


def test_heic_without_its_plug_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageError, match="pillow-heif, which reads those, is not installed"):
        decode(b"\0\0\0\x18ftypheic" + bytes(100))


def test_a_broken_profile_is_told_and_passed_over() -> None:
    image, notes = decode(saved(Image.new("RGB", (8, 8), (1, 2, 3)), "PNG", icc_profile=b"nonsense"))
    assert image.getpixel((0, 0)) == (1, 2, 3)
    assert "profile" in notes[0]


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    image, notes = decode(saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True))
    assert image.getpixel((0, 0)) == RED
    assert notes == ("animated: the first frame is used",)


def test_a_large_text_in_a_png_is_no_reason_to_refuse_it() -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("workflow", "x" * 3_000_000, zip=True)
    assert decode(saved(corners(), "PNG", pnginfo=texts))[0].size == (32, 16)


def test_more_pixels_than_the_limit_are_refused_before_decoding() -> None:
    side = 20_000
    assert side * side > MAX_PIXELS
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + crc
    png += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(ImageError, match="megapixels"):
        decode(png)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (saved(corners().resize((320, 160)), "JPEG")[:1500], "damaged JPEG"),
        (saved(corners(), "PNG")[:60], "damaged PNG"),
        (b"", "empty"),
        (b"<!DOCTYPE html><html>403</html>", "web page"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"just some words", "not a picture"),
    ],
    ids=["half a jpeg", "half a png", "empty", "html", "svg", "text"],
)
def test_what_cannot_be_used_says_why(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "a.JPG"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=words):
        inspect(path)


@pytest.mark.parametrize(
    ("size", "words"), [((15, 400), "too small"), ((20, 401), "too long"), ((401, 20), "more than 20 times")]
)
def test_absurd_sizes(tmp_path: Path, size: tuple[int, int], words: str) -> None:
    Image.new("RGB", size).save(tmp_path / "a.png")
    with pytest.raises(ImageError, match=words):
        inspect(tmp_path / "a.png")


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ImageError, match=r"2\.0 GB"):
        inspect(tmp_path / "a.jpg")


def test_large_pictures_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.images.LARGE_PIXELS", 31 * 16)
    at_work, most = 0, 0
    real = images._turn_upright

    def slowly(image: Image.Image, notes: list[str]) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.02)
        real(image, notes)
        at_work -= 1

    monkeypatch.setattr(images, "_turn_upright", slowly)
    data = saved(corners(), "PNG")
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(decode, [data] * 4))) == 4
    assert most == 1


def test_inspect(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(saved(corners(), "PNG"))
    (tmp_path / "notes.doc").write_bytes(b"no picture")
    (tmp_path / "raw.nef").write_bytes(saved(corners(), "TIFF"))
    facts = inspect(tmp_path / "a.bin")
    assert facts is not None
    assert (facts.width, facts.height, len(facts.digest)) == (32, 16, 64)
    assert inspect(tmp_path / "notes.doc") is None
    with pytest.raises(ImageError, match="raw"):
        inspect(tmp_path / "raw.nef")
