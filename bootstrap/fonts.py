"""The letters of pictures with text in them."""

from __future__ import annotations

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def font(size: int) -> Font:
    """DejaVu where it is installed (the image has it); Pillow's own has English letters only."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size + 1)


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
