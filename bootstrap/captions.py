"""Captions beside images: which file belongs to which image, how its bytes become text, and where the trigger goes.

A caption is literal: braces, percent signs and several lines reach the tokenizer as they stand.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

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


def looks_like_choices(caption: str) -> bool:
    """Written for a tool that draws one line, or one word of ``{a|b}``: that it is literal here must be said."""
    return "\n" in caption or re.search(r"\{[^{}]*\|[^{}]*\}", caption) is not None


def shown(names: Sequence[str], most: int = 5) -> str:
    """A list of names for one line of a report."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
