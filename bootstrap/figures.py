"""The lines of ``metrics.jsonl`` as curves: the same names in TensorBoard and on Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bootstrap.validation import band_name

NO_CURVES = ("step", "images_by_level")


def curves_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line by name; a list is a curve for each band of noise levels, or for each GPU."""
    for name, value in line.items():
        if name in NO_CURVES:
            continue
        for place, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(each, (int, float)):
                of = "" if place is None else f"/{band_name(place) if name == 'loss_by_level' else f'gpu-{place}'}"
                yield f"train/{name}{of}", each
