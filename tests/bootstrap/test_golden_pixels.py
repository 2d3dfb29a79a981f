"""The pixels of each kind of picture, against numbers from elsewhere: files made byte by byte after their formats'
standards, colours worked out from the profiles' own definitions."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bootstrap.images import ImageError, decode

WHITE = (255, 255, 255)
GREY_NOTE, CMYK_NOTE = "transparent: put on white", "CMYK without a colour profile: colours are approximate"


def pixels(data: bytes) -> list[tuple[int, ...]]:
    """The first row."""
    image = decode(data).image
    assert image.mode == "RGB"
    return [image.getpixel((x, 0)) for x in range(image.width)]


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


# ---------------------------------------------------------------- PNG, after its specification


def png(width: int, depth: int, colour: int, row: bytes, **chunks: bytes) -> bytes:
    """One row. ``colour``: 0 grey, 2 RGB, 3 palette, 4 grey with alpha, 6 RGB with alpha."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))
    extra = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "expected", "notes"),
    [
        (png(3, 8, 2, bytes([1, 2, 3, 250, 128, 7, 0, 0, 0])), [(1, 2, 3), (250, 128, 7), (0, 0, 0)], ()),
        (png(2, 8, 0, bytes([9, 200])), [(9, 9, 9), (200, 200, 200)], ()),
        (png(8, 1, 0, bytes([0b10100000])), [WHITE, (0, 0, 0), WHITE, *[(0, 0, 0)] * 5], ()),
        (png(2, 4, 0, bytes([0x1F])), [(17, 17, 17), WHITE], ()),
        (png(3, 16, 0, struct.pack(">3H", 0, 25700, 65535)), [(0, 0, 0), (100, 100, 100), WHITE], ()),
        (png(2, 16, 2, struct.pack(">6H", 51400, 15420, 10280, 257, 514, 65535)), [(200, 60, 40), (1, 2, 255)], ()),
        (png(2, 8, 3, bytes([1, 0]), PLTE=bytes([9, 8, 7, 50, 60, 70])), [(50, 60, 70), (9, 8, 7)], ()),
        # transparency: what lies under a clear pixel (magenta, mostly) never shows
        (
            png(3, 8, 6, bytes([255, 0, 255, 0, 10, 20, 30, 255, 0, 100, 200, 51])),
            [WHITE, (10, 20, 30), (204, 224, 244)],  # 255 + (c - 255) x 51 / 255
            (GREY_NOTE,),
        ),
        (png(2, 8, 4, bytes([0, 0, 100, 51])), [WHITE, (224, 224, 224)], (GREY_NOTE,)),
        (
            png(2, 16, 6, struct.pack(">8H", 65535, 0, 65535, 0, 2570, 5140, 7710, 65535)),
            [WHITE, (10, 20, 30)],
            (GREY_NOTE,),
        ),
        (
            png(
                3, 8, 3, bytes([0, 1, 2]), PLTE=bytes([255, 0, 255, 10, 20, 30, 0, 100, 200]), tRNS=bytes([0, 255, 51])
            ),
            [WHITE, (10, 20, 30), (204, 224, 244)],
            (GREY_NOTE,),
        ),
        (
            png(2, 8, 2, bytes([255, 0, 255, 1, 2, 3]), tRNS=struct.pack(">3H", 255, 0, 255)),
            [WHITE, (1, 2, 3)],
            (GREY_NOTE,),
        ),
        (png(2, 8, 0, bytes([7, 9]), tRNS=struct.pack(">H", 7)), [WHITE, (9, 9, 9)], (GREY_NOTE,)),
        (png(2, 16, 0, struct.pack(">2H", 700, 25700), tRNS=struct.pack(">H", 700)), [WHITE, (100,) * 3], (GREY_NOTE,)),
        # an alpha channel without a transparent pixel is none
        (png(1, 8, 6, bytes([9, 8, 7, 255])), [(9, 8, 7)], ()),
    ],
)
def test_png(data: bytes, expected: list[tuple[int, ...]], notes: tuple[str, ...]) -> None:
    assert pixels(data) == expected
    assert decode(data).notes == notes


# ---------------------------------------------------------------- TIFF, after its specification


def tiff(width: int, bits: int, photometric: int, row: bytes, samples: int = 1, **tags: Sequence[int]) -> bytes:
    """One row, plain. ``photometric``: 0 grey from white to black, 1 grey, 2 RGB, 5 CMYK, 8 Lab."""
    names = {"extra": 338, "format": 339, "planar": 284, "orientation": 274}
    entries = {
        256: (width,),
        257: (1,),
        258: (bits,) * samples,
        259: (1,),
        262: (photometric,),
        273: (8,),
        277: (samples,),
        278: (1,),
        279: (len(row),),
    } | {names[name]: tuple(values) for name, values in tags.items()}
    row += b"\0" * (len(row) % 2)
    start = 8 + len(row)
    after, lists, directory = start + 2 + 12 * len(entries) + 4, b"", struct.pack("<H", len(entries))
    for tag, values in sorted(entries.items()):
        value = struct.pack(f"<{len(values)}H", *values)
        if len(value) > 4:
            lists, value = lists + value, struct.pack("<I", after + len(lists))
        directory += struct.pack("<HHI", tag, 3, len(values)) + value.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", start) + row + directory + b"\0" * 4 + lists


@pytest.mark.parametrize(
    ("data", "expected", "notes"),
    [
        (tiff(2, 8, 2, bytes([1, 2, 3, 4, 5, 6]), 3), [(1, 2, 3), (4, 5, 6)], ()),
        (tiff(8, 1, 0, bytes([0b10100000])), [(0, 0, 0), WHITE, (0, 0, 0), *[WHITE] * 5], ()),
        (tiff(2, 8, 0, bytes([0, 55])), [WHITE, (200, 200, 200)], ()),
        (tiff(2, 16, 1, struct.pack("<2H", 25700, 65535)), [(100, 100, 100), WHITE], ()),
        (tiff(2, 16, 0, struct.pack("<2H", 25700, 65535)), [(155, 155, 155), (0, 0, 0)], ()),
        (tiff(2, 12, 1, bytes([0xFF, 0xF8, 0x00])), [WHITE, (128, 128, 128)], ()),  # FFF, 800
        (tiff(2, 16, 2, struct.pack("<6H", 51400, 15420, 10280, 257, 514, 65535), 3), [(200, 60, 40), (1, 2, 255)], ()),
        (
            tiff(2, 8, 2, bytes([255, 0, 255, 0, 0, 100, 200, 51]), 4, extra=(2,)),
            [WHITE, (204, 224, 244)],
            (GREY_NOTE,),
        ),
        # 1: already multiplied by alpha
        (tiff(2, 8, 2, bytes([0, 0, 0, 0, 0, 20, 40, 51]), 4, extra=(1,)), [WHITE, (204, 224, 244)], (GREY_NOTE,)),
        # inks: (255 - ink) x (255 - black) / 255
        (
            tiff(3, 8, 5, bytes([255, 0, 0, 0, 0, 51, 102, 51, 0, 0, 0, 255]), 4),
            [(0, 255, 255), (204, 163, 122), (0, 0, 0)],
            (CMYK_NOTE,),
        ),
        (tiff(1, 16, 5, struct.pack("<4H", 0, 13107, 26214, 13107), 4), [(204, 163, 122)], (CMYK_NOTE,)),
    ],
)
def test_tiff(data: bytes, expected: list[tuple[int, ...]], notes: tuple[str, ...]) -> None:
    assert np.abs(np.array(pixels(data)) - expected).max() <= 1
    assert decode(data).notes == notes


@pytest.mark.parametrize(
    "data",
    [
        tiff(1, 16, 2, bytes(6), 3, planar=(2,)),  # read wrong by Pillow, in silence
        tiff(1, 32, 2, bytes(12), 3, format=(3, 3, 3)),
    ],
)
def test_a_tiff_that_would_come_out_wrong_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="not read here: save it as PNG"):
        decode(data)


# ---------------------------------------------------------------- BMP, GIF


def test_bmp() -> None:
    rows = bytes([3, 2, 1, 6, 5, 4, 0, 0])  # blue, green, red; padded to four bytes
    header = struct.pack(
        "<2sIHHIIiiHHIIiiII", b"BM", 54 + len(rows), 0, 0, 54, 40, 2, 1, 1, 24, 0, len(rows), 0, 0, 0, 0
    )
    assert pixels(header + rows) == [(1, 2, 3), (4, 5, 6)]


def test_gif() -> None:
    """A palette of four, one of them clear; codes of 3 bits, clear code 4, end 5."""
    palette = bytes([255, 0, 255, 10, 20, 30, 40, 50, 60, 0, 0, 0])
    bits = sum(code << (3 * place) for place, code in enumerate([4, 0, 1, 2, 5]))
    data = b"GIF89a" + struct.pack("<HHBBB", 3, 1, 0b10000001, 0, 0) + palette
    data += (
        b"!\xf9\x04\x01\0\0\0\0" + b"," + struct.pack("<HHHHB", 0, 0, 3, 1, 0) + b"\x02\x02" + struct.pack("<H", bits)
    )
    assert pixels(data + b"\0;") == [WHITE, (10, 20, 30), (40, 50, 60)]


# ---------------------------------------------------------------- CMYK in JPEG


def without_adobe_marker(jpeg: bytes) -> bytes:
    place = jpeg.index(b"\xff\xee")
    return jpeg[:place] + jpeg[place + 2 + struct.unpack(">H", jpeg[place + 2 : place + 4])[0] :]


def test_cmyk_jpeg_with_and_without_adobes_inversion() -> None:
    """Samples are 255 - ink where Adobe's marker stands, and ink where it does not."""
    jpeg = encoded(Image.new("CMYK", (16, 16), (0, 51, 102, 51)), "JPEG", quality=100)
    assert b"Adobe" in jpeg
    assert np.abs(np.array(pixels(jpeg)[0]) - (204, 163, 122)).max() <= 3
    inverted = encoded(Image.new("CMYK", (16, 16), (255, 204, 153, 204)), "JPEG", quality=100)
    plain = without_adobe_marker(inverted)
    assert np.abs(np.array(pixels(plain)[0]) - (204, 163, 122)).max() <= 3
    assert decode(plain).notes == (CMYK_NOTE,)


# ---------------------------------------------------------------- ICC, after its specification


def profile(space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    head = struct.pack(
        ">I4sI4s4s4s", 0, b"none", 0x02400000, b"mntr" if space == b"RGB " else b"prtr", space, connection
    )
    head = head.ljust(36, b"\0") + b"acsp" + bytes(28) + struct.pack(">3i", 63190, 65536, 54061)  # D50
    text = b"desc" + bytes(4) + struct.pack(">I", 5) + b"Test\0" + bytes(78)
    tags = {b"desc": text, b"cprt": b"text" + bytes(4) + b"free\0", b"wtpt": xyz((0.9642, 1, 0.8249))} | tags
    table, body, place = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, data in tags.items():
        data += b"\0" * (-len(data) % 4)
        table += struct.pack(">4sII", name, place + len(body), len(data))
        body += data
    whole = head.ljust(128, b"\0") + table + body
    return struct.pack(">I", len(whole)) + whole[4:]


def xyz(values: Sequence[float]) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))


def gamma(value: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(value * 256))


# Columns: the primaries' XYZ, adapted to D50 (Bradford).
ADOBE_RGB = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
DISPLAY_P3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])


def to_srgb(xyz_d50: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = np.clip(np.linalg.solve(SRGB, xyz_d50), 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("primaries", [ADOBE_RGB, DISPLAY_P3], ids=["Adobe RGB", "Display P3"])
@pytest.mark.parametrize("colour", [(200, 60, 40), (128, 128, 128), (30, 180, 90), (0, 255, 0), (255, 255, 255)])
def test_wide_gamut(primaries: NDArray[np.float64], colour: tuple[int, int, int]) -> None:
    """(0, 255, 0) lies outside sRGB and is clipped to its edge; grey and white are the same in all."""
    columns = {name: xyz(primaries[:, i]) for i, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    curves = dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), gamma(2.2))
    expected = to_srgb(primaries @ (np.array(colour) / 255) ** (563 / 256))  # 2.2 as the profile can write it
    data = encoded(Image.new("RGB", (4, 4), colour), "PNG", icc_profile=profile(b"RGB ", b"XYZ ", columns | curves))
    picture = decode(data)
    assert np.abs(np.array(picture.image.getpixel((0, 0))) - expected).max() <= 2
    assert picture.notes == ()


def test_grey_with_a_grey_profile_and_with_a_colour_profile() -> None:
    expected = to_srgb(np.array([0.9642, 1, 0.8249]) * (100 / 255) ** (461 / 256))
    grey = profile(b"GRAY", b"XYZ ", {b"kTRC": gamma(1.8)})
    columns = {name: xyz(ADOBE_RGB[:, i]) for i, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    colour = profile(b"RGB ", b"XYZ ", columns | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), gamma(1.8)))
    deep = Image.fromarray(np.full((4, 4), 25700, np.uint16))
    for image, icc in (
        (Image.new("L", (4, 4), 100), grey),
        (Image.new("L", (4, 4), 100), colour),
        (Image.new("LA", (4, 4), (100, 255)), grey),
        (deep, grey),
    ):
        picture = decode(encoded(image, "PNG", icc_profile=icc))
        assert np.abs(np.array(picture.image.getpixel((0, 0))) - expected).max() <= 2
        assert picture.notes == ()


LAB = {  # of each combination of full inks, cyan magenta yellow black; black on anything is black
    (0, 0, 0, 0): (100, 0, 0),
    (1, 0, 0, 0): (62, -31, -48),
    (0, 1, 0, 0): (48, 74, -3),
    (0, 0, 1, 0): (89, -5, 93),
    (1, 1, 0, 0): (24, 22, -46),
    (1, 0, 1, 0): (50, -65, 27),
    (0, 1, 1, 0): (47, 68, 48),
}


@pytest.mark.parametrize("inks", LAB)
def test_cmyk_with_a_profile(inks: tuple[int, ...]) -> None:
    """The profile is a table of the sixteen corners, so that full inks need no interpolation."""
    corners = [tuple((index >> (3 - place)) & 1 for place in range(4)) for index in range(16)]
    table = b"".join(bytes([round(L * 2.55), a + 128, b + 128]) for L, a, b in (LAB.get(c, (0, 0, 0)) for c in corners))
    identity = struct.pack(">9i", *(65536 * (i % 4 == 0) for i in range(9)))
    ramp = bytes(range(256))
    lut = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + identity + ramp * 4 + table + ramp * 3
    icc = profile(b"CMYK", b"Lab ", {b"A2B0": lut})
    data = encoded(Image.new("CMYK", (4, 4), tuple(255 * ink for ink in inks)), "TIFF", icc_profile=icc)
    lightness, a, b = LAB[inks]
    f = np.array([(lightness + 16) / 116 + a / 500, (lightness + 16) / 116, (lightness + 16) / 116 - b / 200])
    white = np.array([0.9642, 1, 0.8249])
    expected = to_srgb(white * np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)))
    picture = decode(data)
    assert np.abs(np.array(picture.image.getpixel((0, 0))) - expected).max() <= 4
    assert picture.notes == ()


def test_a_profile_for_other_pixels_is_told() -> None:
    data = encoded(
        Image.new("RGB", (4, 4), (1, 2, 3)), "PNG", icc_profile=profile(b"GRAY", b"XYZ ", {b"kTRC": gamma(1.8)})
    )
    picture = decode(data)
    assert picture.image.getpixel((0, 0)) == (1, 2, 3)
    assert picture.notes == ("its colour profile is for L, its pixels are RGB: taken as sRGB",)


# ---------------------------------------------------------------- which way is up

# What each orientation does to the corners (top left, top right, bottom left, bottom right), from the EXIF standard:
# 1 as it is, 2 mirrored, 3 upside down, 4 flipped, 5 transposed, 6 turned right, 7 transverse, 8 turned left.
TURNED = {1: "RGBW", 2: "GRWB", 3: "WBGR", 4: "BWRG", 5: "RBGW", 6: "BRWG", 7: "WGBR", 8: "GWRB"}
COLOURS = {"R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255), "W": WHITE}


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", TURNED)
def test_orientation(form: str, orientation: int) -> None:
    """AVIF: the encoder makes rotation and mirror boxes of it, which its decoder has applied already."""
    image = Image.new("RGB", (64, 32), WHITE)
    for place, letter in {(0, 0): "R", (32, 0): "G", (0, 16): "B"}.items():
        image.paste(COLOURS[letter], (*place, place[0] + 32, place[1] + 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = decode(encoded(image, form, exif=exif, quality=100)).image
    w, h = picture.size
    assert (w, h) == ((64, 32) if orientation < 5 else (32, 64))
    found = [picture.getpixel((x, y)) for y in (h // 4, 3 * h // 4) for x in (w // 4, 3 * w // 4)]
    for colour, letter in zip(found, TURNED[orientation], strict=True):
        assert np.abs(np.array(colour) - COLOURS[letter]).max() <= 4, (form, orientation)


def test_alpha_and_deep_grey_are_turned_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    picture = decode(encoded(image, "PNG", exif=exif))
    assert picture.alpha is not None
    assert picture.alpha.getpixel((1, 0)) == 0
    assert picture.image.getpixel((1, 0)) == WHITE
    ramp = Image.fromarray(np.array([[0, 65535], [25700, 51400]], np.uint16))
    turned = decode(encoded(ramp, "PNG", exif=exif)).image
    assert [turned.getpixel(place)[0] for place in ((0, 0), (1, 0), (0, 1), (1, 1))] == [100, 0, 200, 255]


def test_damaged_exif_leaves_the_pixels() -> None:
    data = encoded(Image.new("RGB", (16, 16), (200, 60, 40)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert np.abs(np.array(pixels(data)[0]) - (200, 60, 40)).max() <= 3


# ---------------------------------------------------------------- half-arrived files


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "AVIF"])
def test_a_file_whose_second_half_is_zeros_is_damaged(form: str) -> None:
    """As some downloads leave it: its full size from the start, its bytes never all there."""
    noise = np.random.default_rng(1).integers(0, 256, (192, 192, 3), np.uint8)
    thumbnail = encoded(Image.fromarray(noise).resize((16, 16)), "JPEG")  # has an end of its own
    options = {"comment": thumbnail} if form == "JPEG" else {}
    data = encoded(Image.fromarray(noise), form, **options)
    assert decode(data)
    half = data[: len(data) // 2]
    for spoilt in (half, half + bytes(len(data) - len(half))):
        with pytest.raises(ImageError, match="damaged"):
            decode(spoilt)


def test_padding_after_the_end_is_no_damage() -> None:
    assert decode(encoded(Image.new("RGB", (16, 16)), "JPEG") + bytes(10_000))
