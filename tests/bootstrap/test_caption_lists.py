from __future__ import annotations

import json
import unicodedata

import pytest

from bootstrap.caption_lists import CaptionListError, is_list, list_key, read_list

JSONL, CSV = "metadata.jsonl", "METADATA.CSV"


def test_which_files_are_lists() -> None:
    assert [name for name in ("metadata.jsonl", "Metadata.CSV", "metadata.json", "a.csv") if is_list(name)] == [
        "metadata.jsonl",
        "Metadata.CSV",
    ]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (JSONL, b'{"file_name": "a.jpg", "text": "one, \\"two\\""}\n\n{"file_name": "sub/b.jpg", "text": "x\\ny"}\n'),
        (
            JSONL,
            b'\xef\xbb\xbf{"image": "a.jpg", "caption": "one, \\"two\\""}\r\n{"path":"sub\\\\b.jpg","prompt":"x\\ny"}',
        ),
        (CSV, b'file_name,text\na.jpg,"one, ""two"""\nsub/b.jpg,"x\ny"\n'),
        (CSV, 'file_name;size;text\r\n./a.jpg;3;"one, ""two"""\r\nsub/b.jpg;4;"x\ny"\r\n'.encode("utf-16")),
        (CSV, b'file_name\ttext\na.jpg\t"one, ""two"""\nsub//b.jpg\t"x\ny"\nc.jpg\t\n'),
    ],
)
def test_the_same_captions_from_any_list(name: str, data: bytes) -> None:
    assert read_list(name, data)[0] == {"a.jpg": 'one, "two"', "sub/b.jpg": "x\ny"}


def test_names_match_in_any_unicode_form() -> None:
    row = json.dumps({"file_name": unicodedata.normalize("NFD", "é.jpg"), "text": "t"})
    assert read_list(JSONL, row.encode())[0] == {list_key("é.jpg"): "t"}


def test_a_separator_inside_a_string_is_no_new_line() -> None:
    row = json.dumps({"file_name": "a.jpg", "text": "one\u2028two\x85three"}, ensure_ascii=False)
    assert read_list(JSONL, row.encode())[0] == {"a.jpg": "one\u2028two\x85three"}


def test_another_encoding_is_told() -> None:
    captions, note = read_list(CSV, "file_name,text\na.jpg,a cat’s toy\n".encode("cp1252"))
    assert captions == {"a.jpg": "a cat’s toy"}
    assert "Windows-1252" in note


@pytest.mark.parametrize("empty", [b"", b"\n\n", b"file_name,text\n"])
def test_a_list_without_rows_has_no_captions(empty: bytes) -> None:
    assert read_list(CSV, empty)[0] == {}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (JSONL, b'{"file_name": "a.jpg", "text": "t"}\n{"file_name": ', "line 2 is not JSON"),
        (JSONL, b'["a.jpg", "t"]', "line 1 is not a JSON object"),
        (JSONL, b'{"file_name": "a.jpg", "label": 3}', "line 1 has no text (there are file_name, label)"),
        (JSONL, b'{"text": "t"}', "line 1 has no file_name"),
        (JSONL, b'{"file_name": "a.jpg", "text": 3}', "the caption is not text but 3"),
        (JSONL, b'{"file_name": null, "text": "t"}', "line 1 names no file"),
        (CSV, b"file_name,text\na.jpg,one, two\n", "line 2 has more columns than the head"),
        (CSV, b"file_name,text\na.jpg,one\n./a.jpg,two\n", "line 3: ./a.jpg has another caption above"),
        (CSV, b"name,label\na.jpg,one\n", "line 2 has no file_name (there are name, label)"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(name: str, data: bytes, words: str) -> None:
    with pytest.raises(CaptionListError) as caught:
        read_list(name, data)
    assert words in str(caught.value)
