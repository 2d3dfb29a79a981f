"""Image files: found by their content, decoded upright to 8-bit RGB, with a note wherever pixels had to be interpreted.

Endings say little (``.JPG``, ``.jfif``, HTML saved as ``.jpg``), so the first bytes decide what a file is. A file is
good only when every pixel of it has been decoded: headers of truncated files look fine.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageCms, ImageOps, PngImagePlugin

from bootstrap.archives import read_file
from bootstrap.buckets import Box, Size

# Pillow refuses from 179 megapixels and warns from 89; scans and panoramas are larger. Ours is one limit, checked
# before any pixel is decoded: 250 megapixels take 750 MB as RGB.
MAX_PIXELS = 250_000_000
Image.MAX_IMAGE_PIXELS = None
# A PNG may carry a whole workflow as compressed text; Pillow's limit per text (1 MB) refuses the picture with it.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY

BACKGROUND = (255, 255, 255)  # what shows through transparent pixels

# Endings that announce a picture: such a file must decode or be named, while any other foreign file is passed over.
IMAGE_ENDINGS = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".avif", ".heic", ".heif", ".hif", ".gif"),
        *(".bmp", ".dib", ".tif", ".tiff", ".psd", ".jxl", ".jp2", ".svg"),
    }
)
# Camera raws are TIFF by content, but what a TIFF reader finds in them is the thumbnail.
RAW_ENDINGS = frozenset((".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw"))

_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")


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
    transparent: bool = False  # somewhere: what a mask from alpha can be made of


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
    if head[4:8] == b"ftyp":
        if head[8:12] in (b"avif", b"avis"):
            return "AVIF"
        if head[8:12] in _HEIF_BRANDS:
            return "HEIF"
    return None


def inspect(path: Path) -> ImageFacts | None:
    """Decodes the whole picture; None for a file that neither is one nor claims to be one.

    Raises ImageError for a damaged, disguised, oversized or unreadable picture.
    """
    ending = path.suffix.lower()
    try:
        if ending not in IMAGE_ENDINGS | RAW_ENDINGS and image_format(read_file(path, 16)) is None:
            return None
        data = read_file(path)
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror})") from error
    if ending in RAW_ENDINGS:
        raise ImageError("a camera raw file: develop it to JPEG or PNG")
    picture = decode(data)
    width, height = picture.image.size
    return ImageFacts(hashlib.sha256(data).hexdigest(), width, height, picture.notes, picture.alpha is not None)


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
    try:
        with Image.open(io.BytesIO(data), formats=[form]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(
                    f"{image.width} x {image.height} px is more than {MAX_PIXELS // 1_000_000} megapixels: "
                    "make it smaller"
                )
            notes = []
            if getattr(image, "is_animated", False) and image.format not in ("MPO", "TIFF", "PSD"):
                notes.append("animated: the first frame is used")
            image.load()
            upright = ImageOps.exif_transpose(image)
            alpha = _alpha(upright)
            rgb = _to_rgb(upright, alpha, notes)
    except ImageError:
        raise
    except Exception as error:  # decoders raise whatever their library does: OSError, SyntaxError, struct.error, ...
        raise ImageError(f"damaged {form} file ({error})") from error
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
    return "not a picture of a kind that can be read (JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP, TIFF, PSD)"


def _enable_heif() -> None:
    try:
        import pillow_heif
    except ImportError as error:
        raise ImageError("a HEIC picture, and pillow-heif, which reads those, is not installed") from error
    pillow_heif.register_heif_opener()


def _alpha(image: Image.Image) -> Image.Image | None:
    if image.mode in _DEEP_GREY or not image.has_transparency_data:
        return None
    alpha = image.convert("RGBA").getchannel("A")
    return None if alpha.getextrema() == (255, 255) else alpha


def _to_rgb(image: Image.Image, alpha: Image.Image | None, notes: list[str]) -> Image.Image:
    """RGB in sRGB from any mode Pillow decodes to: depth first, then colour space, then transparency."""
    profile = image.info.get("icc_profile")
    if image.mode in _DEEP_GREY:
        return _deep_grey(image, notes).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA").convert("RGB")
    elif image.mode == "P":
        image = image.convert("RGB")
    colour = _to_srgb(image, profile, notes)
    if alpha is None:
        return colour
    notes.append("transparent: put on white")
    return Image.composite(colour, Image.new("RGB", colour.size, BACKGROUND), alpha)


def _to_srgb(image: Image.Image, profile: bytes | None, notes: list[str]) -> Image.Image:
    """Converts by the embedded ICC profile; without one (or with a broken one) the numbers are taken as sRGB."""
    if profile and image.mode in ("RGB", "L", "CMYK", "LAB"):
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if image.mode == "RGB" and ImageCms.getProfileDescription(source).strip().startswith("sRGB"):
                return image  # the usual case; converting would only add rounding
            converted = ImageCms.profileToProfile(
                image,
                source,
                ImageCms.createProfile("sRGB"),
                renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
                outputMode="RGB",
                flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
            )
            assert converted is not None  # only in-place conversion returns None
            return converted
        except (ImageCms.PyCMSError, OSError):
            notes.append("its colour profile cannot be used: taken as sRGB")
    elif image.mode == "CMYK":
        notes.append("CMYK without a colour profile: colours are approximate")
    return image.convert("RGB")


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
    else:
        scale = 65535.0
    return Image.fromarray(np.clip(np.rint(values * (255.0 / scale)), 0, 255).astype(np.uint8), "L")
