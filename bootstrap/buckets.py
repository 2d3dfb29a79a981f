"""Aspect-ratio buckets: the size an image is trained at, and the part of it that is seen there. Pure."""

from __future__ import annotations

import math

Size = tuple[int, int]  # width, height in pixels
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the image

# No side is longer than this times the resolution, or shorter than the resolution divided by it (unless the image is
# that small): beyond 4:1 an image is cropped rather than trained as a strip.
MAX_STRETCH = 2


def bucket_of(width: int, height: int, resolution: int, step: int, upscale: bool = False) -> Size | None:
    """The bucket of an image of ``width`` x ``height`` pixels: sides in multiples of ``step``, area <= resolution^2.

    For every length of one side the other is as long as the area allows; of these sizes the one nearest to the image in
    aspect ratio (by its logarithm, so that wide and tall are alike), of equally near ones the largest. Unless
    ``upscale``, neither side exceeds the image's; None where the image is then smaller than one step.
    """
    step = min(step, resolution)
    longest, shortest = MAX_STRETCH * resolution // step * step, max(step, resolution // MAX_STRETCH // step * step)
    widest = longest if upscale else min(longest, width // step * step)
    tallest = longest if upscale else min(longest, height // step * step)
    if widest < step or tallest < step:
        return None
    area = resolution * resolution
    narrowest, lowest = min(shortest, widest), min(shortest, tallest)
    sizes = [(w, min(tallest, area // w // step * step)) for w in range(narrowest, widest + 1, step)]
    sizes += [(min(widest, area // h // step * step), h) for h in range(lowest, tallest + 1, step)]
    aspect = math.log(width / height)

    def distance(size: Size) -> tuple[float, int, int]:
        w, h = size
        # Rounded, so that two buckets equally far to either side are a tie on every machine.
        return round(abs(math.log(w / h) - aspect), 9), -w * h, w

    return min((size for size in sizes if size[0] >= narrowest and size[1] >= lowest), key=distance)


def crop_box(width: int, height: int, bucket: Size, focus: tuple[float, float] = (0.5, 0.5)) -> Box:
    """The largest part of an image that has the bucket's aspect ratio; resized to the bucket, it just covers it.

    Its middle is at ``focus`` (shares of the width and the height), or as near as the edges of the image let it be.
    """
    scale = max(bucket[0] / width, bucket[1] / height)
    seen_width, seen_height = min(width, bucket[0] / scale), min(height, bucket[1] / scale)
    left = min(max(focus[0] * width - seen_width / 2, 0.0), width - seen_width)
    top = min(max(focus[1] * height - seen_height / 2, 0.0), height - seen_height)
    # Not beyond the edges by a rounding: Pillow refuses such a box.
    return left, top, min(left + seen_width, float(width)), min(top + seen_height, float(height))


def shifted_crop_box(width: int, height: int, bucket: Size, across: float, down: float) -> Box:
    """The part as large as ``crop_box``'s that lies ``across`` and ``down`` of its way from left to right and from top
    to bottom, each from 0 to 1."""
    left, top, right, bottom = crop_box(width, height, bucket, (0.0, 0.0))
    x, y = across * (width - right), down * (height - bottom)
    return left + x, top + y, min(right + x, float(width)), min(bottom + y, float(height))


def cropped_away(width: int, height: int, bucket: Size) -> float:
    """The share of the image's area that lies outside its crop, 0 .. 1."""
    left, top, right, bottom = crop_box(width, height, bucket)
    return 1 - (right - left) * (bottom - top) / (width * height)
