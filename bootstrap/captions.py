"""Captions: which file belongs to which image, how its bytes become text, and what training reads of it.

A caption is literal: braces, percent signs and several lines reach the tokenizer as they stand, unless its dataset says
``wildcards``, ``multiline`` or ``shuffle_tags``. Then a text is drawn each time the image is seen: a line of the
caption, in it a word of each choice, then an order of the tags; the trigger, the prefix and the suffix come last.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, permutations
from pathlib import Path

import numpy as np

from bootstrap.wildcards import Parts, choose, count, every, parse
from jobs.schema import DatasetEntry

CAPTION_ENDINGS = (".txt", ".caption")
TRIGGER_TOKEN = "[trigger]"


def decode_text(data: bytes) -> tuple[str, str]:
    """The text in ``data``, without BOM, NULs, CR and outer white space, and a note where its encoding was a guess."""
    note = ""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", errors="replace")
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("cp1252", errors="replace")
            note = "not UTF-8: read as Windows-1252"
    if "\ufffd" in text:
        note = "some of its bytes are no text in any expected encoding: save it as UTF-8"
    # UTF-16 without a BOM is NULs between ASCII letters: without them it is the text.
    text = text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
    return text.strip(), note


class Sidecars:
    """The caption files of one folder, found by image name.

    ``a.jpg.txt`` (made for that very file) goes before ``a.txt``, ``.txt`` before ``.caption``; endings in any case,
    and names match across Unicode forms (a Mac writes decomposed letters, others composed ones).
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._by_name: dict[tuple[str, str], str] = {}
        for name in sorted(files):
            stem, ending = _split(name)
            if ending in CAPTION_ENDINGS:
                self._by_name.setdefault((stem, ending), name)

    def of(self, image: str) -> str | None:
        """The caption file's name for the image file ``image`` of the same folder."""
        for stem in (unicodedata.normalize("NFC", image), _split(image)[0]):
            for ending in CAPTION_ENDINGS:
                if (stem, ending) in self._by_name:
                    return self._by_name[stem, ending]
        return None


def _split(name: str) -> tuple[str, str]:
    path = Path(name)
    return unicodedata.normalize("NFC", path.stem), path.suffix.lower()


def with_trigger(caption: str, trigger: str | None) -> str:
    """``caption`` with the trigger for ``[trigger]``, or else in front unless it holds the trigger as a word."""
    if not trigger:
        return caption
    if TRIGGER_TOKEN in caption:
        return caption.replace(TRIGGER_TOKEN, trigger)
    if re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption):
        return caption
    return f"{trigger} {caption}".strip()


def draw_text(caption: str, entry: DatasetEntry, generator: np.random.Generator) -> str:
    """What an image of the dataset ``entry`` is trained with this time."""
    text = choose(parse(caption, entry.wildcards, entry.multiline), generator).strip()
    if entry.shuffle_tags:
        kept, tags = _tags(text, entry.keep_tags)
        # By sorting raw numbers: numpy may draw other permutations in another version, but never other numbers.
        order = np.argsort(generator.bit_generator.random_raw(len(tags)), kind="stable")
        text = ", ".join([*kept, *(tags[place] for place in order)])
    return dressed(text, entry)


def every_text(caption: str, entry: DatasetEntry, most: int) -> tuple[str, ...] | None:
    """All that ``draw_text`` may give, each text once; None where it is more than ``most``."""
    parts = parse(caption, entry.wildcards, entry.multiline)
    # Alike ones come again and again from {a|a}{a|a}..., so what is looked at is limited too.
    enough = 8 * most
    if count(parts) > enough:
        return None
    looked_at = islice(_texts(parts, entry), enough + 1)
    texts = dict.fromkeys(dressed(text, entry) for text in islice(looked_at, enough))
    return tuple(texts) if len(texts) <= most and next(looked_at, None) is None else None


def _texts(parts: Parts, entry: DatasetEntry) -> Iterator[str]:
    for text in every(parts):
        if entry.shuffle_tags:
            kept, tags = _tags(text, entry.keep_tags)
            yield from (", ".join([*kept, *order]) for order in permutations(tags))
        else:
            yield text.strip()


def _tags(text: str, keep: int) -> tuple[list[str], list[str]]:
    """The parts of ``text`` between commas: those that stay in front, and the others."""
    tags = [tag.strip() for tag in text.split(",")]
    tags = [tag for tag in tags if tag]
    return tags[:keep], tags[keep:]


def dressed(text: str, entry: DatasetEntry) -> str:
    """A drawn text with the dataset's prefix, suffix and trigger."""
    parts = (entry.prefix, text, entry.suffix)
    return with_trigger(" ".join(part.strip() for part in parts if part and part.strip()), entry.trigger)


def has_wildcards(caption: str) -> bool:
    """Written for a tool that draws one word of ``{a|b}``."""
    return re.search(r"\{[^{}]*\|[^{}]*\}", caption) is not None


def shown(names: Sequence[str], most: int = 5) -> str:
    """A list of names for one line of a report."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
