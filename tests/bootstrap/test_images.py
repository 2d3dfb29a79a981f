from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from bootstrap.images import MAX_PIXELS, ImageError, image_format, inspect
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


def quarters(image: Image.Image) -> list[tuple[int, ...]]:
    w, h = image.size
    places = ((w // 4, h // 4), (3 * w // 4, h // 4), (w // 4, 3 * h // 4), (3 * w // 4, 3 * h // 4))
    return [image.getpixel(place) for place in places]


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


# What each orientation does to the corners (top left, top right, bottom left, bottom right), from the EXIF standard:
# 1 as it is, 2 mirrored, 3 upside down, 4 flipped, 5 transposed, 6 turned right, 7 transverse, 8 turned left.
TURNED = {
    1: (RED, GREEN, BLUE, WHITE),
    2: (GREEN, RED, WHITE, BLUE),
    3: (WHITE, BLUE, GREEN, RED),
    4: (BLUE, WHITE, RED, GREEN),
    5: (RED, BLUE, GREEN, WHITE),
    6: (BLUE, RED, WHITE, GREEN),
    7: (WHITE, GREEN, BLUE, RED),
    8: (GREEN, WHITE, RED, BLUE),
}


@pytest.mark.parametrize("orientation", TURNED)
def test_exif_orientation_is_applied_once(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image, _ = decode(saved(corners(), "PNG", exif=exif))
    assert image.size == ((32, 16) if orientation < 5 else (16, 32))
    assert tuple(quarters(image)) == TURNED[orientation]
    assert image.getexif().get(0x0112, 1) == 1


def test_transparent_pixels_become_white_not_what_they_hide() -> None:
    clear = Image.new("RGBA", (8, 8), (255, 0, 255, 0))
    image, notes = decode(saved(clear, "PNG"))
    assert image.getpixel((0, 0)) == WHITE
    assert notes == ("transparent: put on white",)
    half, _ = decode(saved(Image.new("LA", (8, 8), (0, 128)), "PNG"))
    assert half.getpixel((0, 0)) == (127, 127, 127)
    opaque, notes = decode(saved(Image.new("RGBA", (8, 8), (9, 8, 7, 255)), "PNG"))
    assert (opaque.getpixel((0, 0)), notes) == ((9, 8, 7), ())


def test_palette_with_transparency() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 255, 10, 20, 30])
    image.paste(0, (0, 0, 4, 8))
    decoded, notes = decode(saved(image, "PNG", transparency=0))
    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((7, 0)) == (10, 20, 30)
    assert notes


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    image, _ = decode(saved(Image.fromarray(np.tile(ramp, (4, 1))), "PNG"))
    levels = np.asarray(image)[0, :, 0]
    assert levels.tolist() == list(range(256))


def test_sixteen_bit_colour_png() -> None:
    """Written by hand: Pillow writes none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + struct.pack(">HHH", 51400, 15420, 10280) * 4
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 2, 16, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(row * 2)) + chunk(b"IEND", b"")
    image, _ = decode(png)
    assert np.abs(np.array(image.getpixel((1, 1))) - (200, 60, 40)).max() <= 1


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


def test_cmyk_without_profile_is_told() -> None:
    """Full cyan ink: no red, all green and blue."""
    image, notes = decode(saved(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=95))
    assert np.abs(np.array(image.getpixel((8, 8))) - (0, 255, 255)).max() < 8
    assert "CMYK" in notes[0]


def test_a_wide_gamut_profile_is_followed() -> None:
    """A profile whose red and green are swapped shows at once whether it is used. Made from sRGB's own bytes."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for index in range(struct.unpack(">I", profile[128:132])[0]):
        at = 132 + 12 * index
        name = bytes(profile[at : at + 4])
        if name in (b"rXYZ", b"gXYZ"):
            profile[at : at + 4] = b"gXYZ" if name == b"rXYZ" else b"rXYZ"
        if name == b"desc":
            place = struct.unpack(">I", profile[at + 4 : at + 8])[0]
            profile[place:] = bytes(profile[place:]).replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be"))
    image, notes = decode(saved(Image.new("RGB", (8, 8), (255, 0, 0)), "PNG", icc_profile=bytes(profile)))
    assert notes == ()
    assert np.abs(np.array(image.getpixel((0, 0))) - GREEN).max() < 8


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
