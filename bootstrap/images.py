"""Image files: found by their content, decoded upright to 8-bit RGB, with a note wherever pixels had to be interpreted.

Endings say little (``.JPG``, ``.jfif``, HTML saved as ``.jpg``), so the first bytes decide what a file is. A file is
good only when every pixel of it has been decoded: headers of truncated files look fine.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageChops, ImageCms, ImageOps, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from bootstrap.archives import read_file, stamp
from bootstrap.buckets import Box, Size

# Raise when pixels or facts come out otherwise than before: what was remembered of pictures is then looked at anew. For
# other pixels raise wanted.LATENT_VERSION, too.
VERSION = 2

# Pillow refuses from 179 megapixels and warns from 89; scans and panoramas are larger. Ours is one limit, checked
# before any pixel is decoded: 250 megapixels take 750 MB as RGB, and about 3 GB while transparency is seen to.
MAX_PIXELS = 250_000_000
Image.MAX_IMAGE_PIXELS = None
# What Pillow wonders at in a file's metadata is no news to who brought it, and goes to the terminal without its name.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Larger ones are decoded one at a time: sixteen threads with smaller ones hold 5 GB at the very most.
LARGE_PIXELS = 25_000_000
_one_large = threading.Lock()
MOST_BYTES = 2_000_000_000  # of a file: 250 megapixels of 16-bit RGBA, plain
MIN_SIDE = 16  # pixels: what one token of the model covers; a smaller picture is an icon or an accident
MAX_ASPECT = 20  # a side of 20 times the other is a separator line or a strip of frames: four fifths would be cropped
# A PNG may carry a whole workflow as compressed text; Pillow's limit per text (1 MB) refuses the picture with it.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY

BACKGROUND = (255, 255, 255)  # what shows through transparent pixels

# Endings that announce a picture: such a file must decode or be named, while any other foreign file is passed over.
IMAGE_ENDINGS = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".avif", ".heic", ".heif", ".hif", ".gif"),
        *(".bmp", ".dib", ".tif", ".tiff", ".psd", ".jxl", ".jp2", ".j2k", ".jpx", ".svg"),
    }
)
# Camera raws are TIFF by content, but what a TIFF reader finds in them is the thumbnail.
RAW_ENDINGS = frozenset((".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw"))

_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
# Between two markers of a JPEG's compressed data: FF is followed by 00, by a restart, or by more FF.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


class ImageError(Exception):
    """A file that cannot be used as a picture; the message says why, without the file's name."""


@dataclass(frozen=True)
class Picture:
    """A file's pixels: upright, 8 bits, sRGB."""

    image: Image.Image  # RGB; what is transparent lies on BACKGROUND
    alpha: Image.Image | None  # L, 0 transparent .. 255 opaque; None where every pixel is opaque
    notes: tuple[str, ...]  # what had to be interpreted


@dataclass(frozen=True)
class View:
    """What training sees of a picture in a bucket."""

    pixels: NDArray[np.uint8]  # [height, width, 3]
    mask: NDArray[np.uint8] | None  # [height, width], 0 not learned .. 255 learned wholly; None without a mask


@dataclass(frozen=True)
class ImageFacts:
    """What the scan keeps of a picture it has fully decoded."""

    digest: str  # sha256 of the file's bytes
    width: int  # upright, pixels
    height: int
    notes: tuple[str, ...]
    transparent: bool  # somewhere: what a mask from alpha can be made of
    black: bool  # all over: as a mask it would hide everything


def image_format(head: bytes) -> str | None:
    """Pillow's name of the format of a file that begins with ``head`` (16 bytes or more); None for a foreign file."""
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    if head[:2] == b"BM":
        return "BMP"
    if head[:4] == b"8BPS":
        return "PSD"
    if head.startswith((b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")):
        return "JPEG2000"
    if head[4:8] == b"ftyp":
        if head[8:12] in (b"avif", b"avis"):
            return "AVIF"
        if head[8:12] in _HEIF_BRANDS:
            return "HEIF"
    return None


def inspect(path: Path) -> ImageFacts | None:
    """Decodes the whole picture; None for a file that neither is one nor claims to be one.

    Raises ImageError for a damaged, disguised or unreadable picture, and for one absurdly large, small or long.
    """
    ending = path.suffix.lower()
    try:
        if ending not in IMAGE_ENDINGS | RAW_ENDINGS and image_format(read_file(path, 16)) is None:
            return None
        if (size := stamp(path).size) > MOST_BYTES:
            raise ImageError(f"its file has {size / 1e9:.1f} GB, and {MOST_BYTES / 1e9:.0f} GB is the most")
        data = read_file(path)
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror})") from error
    if ending in RAW_ENDINGS:
        raise ImageError("a camera raw file: develop it to JPEG or PNG")
    picture = decode(data)
    width, height = picture.image.size
    if min(width, height) < MIN_SIDE:
        raise ImageError(f"{width} x {height} px is too small to learn from: each side needs {MIN_SIDE}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{width} x {height} px is too long: one side is more than {MAX_ASPECT} times the other")
    return ImageFacts(
        digest=hashlib.sha256(data).hexdigest(),
        width=width,
        height=height,
        notes=picture.notes,
        transparent=picture.alpha is not None,
        black=luminance(picture).getbbox() is None,
    )


def view(picture: Picture, bucket: Size, box: Box, mask: Image.Image | None = None) -> View:
    """The part ``box`` of the picture at the size of the bucket, and the same part of ``mask``, each in one step.

    ``mask`` is L and may be of another size than the picture, in the same proportions (``masks.read_mask`` holds it to
    that); a picture's own ``alpha`` is one.
    """
    pixels = picture.image.resize(bucket, Image.Resampling.LANCZOS, box=box)
    if mask is None:
        return View(np.array(pixels), None)
    across, down = mask.width / picture.image.width, mask.height / picture.image.height
    same = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    # Areas are averaged: Lanczos would overshoot, and a pixel outside the mask would count a little.
    return View(np.array(pixels), np.array(mask.resize(bucket, Image.Resampling.BOX, box=same)))


def decode(data: bytes) -> Picture:
    """The picture in ``data``. Raises ImageError."""
    form = image_format(data[:16])
    if form is None:
        raise ImageError(_what_instead(data))
    if form == "HEIF":
        _enable_heif()
    _require_end(data, form)
    try:
        with Image.open(io.BytesIO(data), formats=[form]) as image:
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                raise ImageError(
                    f"{image.width} x {image.height} px is more than {MAX_PIXELS // 1_000_000} megapixels: "
                    "make it smaller"
                )
            if _is_deep_planar(image):
                raise ImageError("TIFF of 16 bits in separate planes is not read here: save it as PNG")
            with _one_large if pixels > LARGE_PIXELS else nullcontext():
                return _picture(image)
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"damaged, or {form} of a kind that is not read here: save it as PNG") from error
    except Exception as error:  # decoders raise whatever their library does: OSError, SyntaxError, struct.error, ...
        raise ImageError(f"damaged {form} file ({error})") from error


def _require_end(data: bytes, form: str) -> None:
    """Raises ImageError for a file whose end never arrived though it has its full size, as some downloads leave it.

    Decoders fill such a picture with grey, or with noise, and say nothing. A PNG or GIF they do refuse; of plain pixels
    (BMP, TIFF) nobody can tell.
    """
    ended = True
    if form == "JPEG":
        ended = _jpeg_has_end(data)
    elif form in ("WEBP", "AVIF", "HEIF"):
        # Compressed data hold no such run of zeros; metadata at the end may be padded, by a few KiB.
        tail = max(4096, len(data) // 8)
        ended = data[-tail:].count(0) < tail
    if not ended:
        raise ImageError(f"damaged {form} file (its end is missing: a transfer that was cut off?)")


def _jpeg_has_end(data: bytes) -> bool:
    """Whether the end marker comes where the markers lead, not only in an embedded thumbnail. Of JPEGs without one
    Pillow refuses those that end early, and takes those that are filled up."""
    place = 2
    while found := _JPEG_MARKER.search(data, place):
        kind, place = data[found.start() + 1], found.end()
        if kind == 0xD9:
            return True
        if kind not in (0x01, 0xD8):
            place += int.from_bytes(data[place : place + 2], "big")
    return False


def _is_deep_planar(image: Image.Image) -> bool:
    """Pillow reads these as if they had 8 bits, and does not say so."""
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    return (
        tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2 and max(tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,))) > 8
    )


def _picture(image: Image.Image) -> Picture:
    """All of an opened file's pixels, in the order depth, uprightness, colour space, transparency."""
    notes: list[str] = []
    if getattr(image, "n_frames", 1) > 1 and image.format not in ("MPO", "PSD"):
        notes.append(
            "several pages: the first is used" if image.format == "TIFF" else "animated: the first frame is used"
        )
    image.load()
    profile = image.info.get("icc_profile")
    _turn_upright(image, notes)
    alpha = _alpha(image)
    colour: Image.Image = image
    if image.mode in _DEEP_GREY:
        colour = _deep_grey(image, notes)
    elif image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        # Adobe's CMYK JPEGs, marked by an APP14 segment, hold inverted inks. Pillow takes all to be theirs.
        colour = ImageChops.invert(image)
    elif image.mode in ("LA", "La"):
        colour = image.convert("LA").convert("L")
    elif image.mode in ("P", "PA", "RGBA", "RGBa"):
        colour = image.convert("RGBA").convert("RGB")
    rgb = _to_srgb(colour, profile, notes)
    if alpha is not None:
        notes.append("transparent: put on white")
        rgb = Image.composite(rgb, Image.new("RGB", rgb.size, BACKGROUND), alpha)
    return Picture(rgb, alpha, tuple(notes))


def luminance(picture: Picture) -> Image.Image:
    """The picture as grey on black (L), as masks are read: transparent is black there, whatever lies below it."""
    grey = picture.image.convert("L")
    if picture.alpha is None:
        return grey
    # It was put on white, which adds 255 - alpha.
    return ImageChops.subtract(grey, ImageOps.invert(picture.alpha))


def _what_instead(data: bytes) -> str:
    if not data:
        return "an empty file"
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "a web page, not a picture (a download that failed?)"
    if b"<svg" in start:
        return "a vector drawing (SVG): export it as PNG"
    return "not a picture of a kind that can be read (JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP, TIFF, PSD, JPEG 2000)"


def _enable_heif() -> None:
    try:
        import pillow_heif
    except ImportError as error:
        raise ImageError("a HEIC picture, and pillow-heif, which reads those, is not installed") from error
    pillow_heif.register_heif_opener()


def _alpha(image: Image.Image) -> Image.Image | None:
    if image.mode in _DEEP_GREY:
        clear = image.info.get("transparency")  # one value of a grey PNG that stands for nothing
        if not isinstance(clear, int):
            return None
        alpha = Image.fromarray(np.where(np.asarray(image) == clear, 0, 255).astype(np.uint8))
    elif image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
    else:
        return None
    return None if alpha.getextrema() == (255, 255) else alpha


def _turn_upright(image: Image.Image, notes: list[str]) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
        interoperability = image.getexif().get_ifd(ExifTags.IFD.Interop)
    except Exception:  # a broken block, of which Pillow's parser raises whatever it stumbles over
        notes.append("its EXIF data are damaged: taken as upright")
        return
    if interoperability.get(1) == "R03" and "icc_profile" not in image.info:
        notes.append("marked as Adobe RGB without a colour profile: taken as sRGB, a little pale")


def _to_srgb(image: Image.Image, profile: bytes | None, notes: list[str]) -> Image.Image:
    """RGB by the embedded ICC profile; without one (or with a broken one) the numbers are taken as sRGB."""
    if image.mode == "1":
        image = image.convert("L")
    conversion = _conversion(profile) if profile else None
    if conversion is None:
        if profile:
            notes.append("its colour profile cannot be used: taken as sRGB")
        elif image.mode == "CMYK":
            notes.append("CMYK without a colour profile: colours are approximate")
        return image.convert("RGB")
    mode, transform = conversion
    if image.mode == "L" and mode == "RGB":
        image = image.convert("RGB")  # grey under a colour profile: as much of its red, green and blue
    if image.mode != mode:
        notes.append(f"its colour profile is for {mode}, its pixels are {image.mode}: taken as sRGB")
        return image.convert("RGB")
    return transform.apply(image) if transform else image


@lru_cache(maxsize=64)
def _conversion(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None] | None:
    """Which pixels an ICC profile is for (Pillow's mode), and how they become sRGB: None where they are that already.

    None for a profile that is broken or for other pixels than ours.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK", "Lab": "LAB"}.get(source.profile.xcolor_space.strip())
        if mode is None:
            return None
        if mode == "RGB" and ImageCms.getProfileDescription(source).strip().startswith("sRGB"):
            return mode, None  # the usual case; converting would only add rounding
        transform = ImageCms.ImageCmsTransform(
            source,
            ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return None
    return mode, transform


def _deep_grey(image: Image.Image, notes: list[str]) -> Image.Image:
    """Grey of 16 or 32 bits or of floats, scaled (not clipped) to 8 bits."""
    values = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
        top = float(values.max())
        scale = 1.0 if top <= 1 else 255.0 if top <= 255 else top
        notes.append(f"float grey values: 0..{scale:g} taken as black..white")
    elif image.mode == "I":
        top = float(values.max())
        scale = 255.0 if top <= 255 else 65535.0 if top <= 65535 else top
        notes.append(f"grey values of 32 bits: 0..{scale:g} taken as black..white")
    else:
        tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
        scale = 4095.0 if tags.get(TiffImagePlugin.BITSPERSAMPLE) == (12,) else 65535.0
        if tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:  # white is zero, which Pillow overlooks here
            values = scale - values
    return Image.fromarray(np.clip(np.rint(values * (255.0 / scale)), 0, 255).astype(np.uint8), "L")
