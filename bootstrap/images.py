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
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

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
class ImageFacts:
    """What the scan keeps of a picture it has fully decoded."""

    digest: str  # sha256 of the file's bytes
    width: int  # upright, pixels
    height: int
    notes: tuple[str, ...]


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
    try:
        with path.open("rb") as file:
            head = file.read(16)
            ending = path.suffix.lower()
            if image_format(head) is None and ending not in IMAGE_ENDINGS | RAW_ENDINGS:
                return None
            data = head + file.read()
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror})") from error
    if ending in RAW_ENDINGS:
        raise ImageError("a camera raw file: develop it to JPEG or PNG")
    image, notes = decode(data)
    return ImageFacts(hashlib.sha256(data).hexdigest(), image.width, image.height, notes)


def decode(data: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    """The picture in ``data``, upright, 8-bit RGB in sRGB, and notes on what was interpreted.

    Raises ImageError.
    """
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
            rgb = _to_rgb(ImageOps.exif_transpose(image), notes)
    except ImageError:
        raise
    except Exception as error:  # decoders raise whatever their library does: OSError, SyntaxError, struct.error, ...
        raise ImageError(f"damaged {form} file ({error})") from error
    return rgb, tuple(notes)


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


def _to_rgb(image: Image.Image, notes: list[str]) -> Image.Image:
    """RGB in sRGB from any mode Pillow decodes to: depth first, then colour space, then transparency."""
    profile = image.info.get("icc_profile")
    if image.mode in _DEEP_GREY:
        return _deep_grey(image, notes).convert("RGB")
    if image.has_transparency_data:
        full = image.convert("RGBA")
        alpha = full.getchannel("A")
        colour = _to_srgb(full.convert("RGB"), profile, notes)
        if alpha.getextrema() == (255, 255):
            return colour
        notes.append("transparent: put on white")
        return Image.composite(colour, Image.new("RGB", colour.size, BACKGROUND), alpha)
    if image.mode == "P":
        image = image.convert("RGB")
    return _to_srgb(image, profile, notes)


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
