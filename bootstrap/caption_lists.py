"""Captions of many images in one file, ``metadata.jsonl`` or ``metadata.csv``, as Hugging Face's imagefolder has them.

Each row names an image, by its path below the list's own folder, and its caption.
"""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from bootstrap.captions import decode_text, shown

LIST_NAMES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMNS = ("file_name", "file", "filename", "image", "path")
TEXT_COLUMNS = ("text", "caption", "prompt", "captions", "description")


class CaptionListError(ValueError):
    """A list that cannot be read; the message says where and why, without the file's name."""


def is_list(name: str) -> bool:
    return name.lower() in LIST_NAMES


def read_list(name: str, data: bytes) -> tuple[dict[str, str], str]:
    """The captions in the file ``name`` with the bytes ``data``, by ``list_key`` of the image; and a note or "".

    A row without a caption (or with null) is none. Raises CaptionListError.
    """
    text, note = decode_text(data)
    rows = _json_lines(text) if name.lower().endswith(".jsonl") else _csv_rows(text)
    captions: dict[str, str] = {}
    for line, row in rows:
        path, caption = _column(row, FILE_COLUMNS, line), _column(row, TEXT_COLUMNS, line)
        if not isinstance(path, str) or not path.strip():
            raise CaptionListError(f"line {line} names no file")
        if caption is not None and not isinstance(caption, str):
            raise CaptionListError(f"line {line}: the caption is not text but {caption!r:.60}")
        key = list_key(path)
        if caption and captions.setdefault(key, caption.strip()) != caption.strip():
            raise CaptionListError(f"line {line}: {path} has another caption above")
    return captions, note


def list_key(path: str) -> str:
    """One name for an image, however its path is written."""
    return unicodedata.normalize("NFC", str(PurePosixPath(path.strip().replace("\\", "/"))))


def _column(row: Mapping[str, Any], names: tuple[str, ...], line: int) -> Any:
    found = next((name for name in names if name in row), None)
    if found is None:
        raise CaptionListError(f"line {line} has no {names[0]} (there are {shown([str(name) for name in row])})")
    return row[found]


def _json_lines(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Not splitlines(), which also cuts at letters that JSON leaves as they are (U+2028, U+0085).
    for line, written in enumerate(text.split("\n"), start=1):
        if not written.strip():
            continue
        try:
            row = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise CaptionListError(f"line {line} is not JSON ({error})") from error
        if not isinstance(row, Mapping):
            raise CaptionListError(f"line {line} is not a JSON object")
        yield line, row


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Spreadsheets of some countries write ; or tabs.
    head = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    try:
        for row in reader:
            if None in row:
                raise CaptionListError(f"line {reader.line_num} has more columns than the head: put the text in quotes")
            yield reader.line_num, row
    except csv.Error as error:
        raise CaptionListError(f"line {reader.line_num}: {error}") from error
