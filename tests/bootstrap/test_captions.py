from __future__ import annotations

import unicodedata

import pytest

from bootstrap.captions import Sidecars, decode_text, looks_like_choices, shown, with_trigger

TEXT = "a cat’s toy"


@pytest.mark.parametrize(
    ("data", "noted"),
    [
        (TEXT.encode(), False),
        (TEXT.encode("utf-8-sig"), False),
        (TEXT.encode("utf-16"), False),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), False),
        (TEXT.encode("cp1252"), True),
        (TEXT.encode() + b"\r\n", False),
        (b"\0" + TEXT.encode() + b"\0  \n", False),
    ],
)
def test_the_same_text_in_any_encoding(data: bytes, noted: bool) -> None:
    text, note = decode_text(data)
    assert text == TEXT
    assert bool(note) == noted


def test_inner_lines_braces_and_percent_signs_stay() -> None:
    text, _ = decode_text(b"{a|b} 100% wool\r\nsecond {line}\r\n")
    assert text == "{a|b} 100% wool\nsecond {line}"


def test_bytes_that_are_no_text_are_told() -> None:
    assert "UTF-8" in decode_text(b"a \x81 b")[1]


def test_utf16_without_bom() -> None:
    assert decode_text("a cat".encode("utf-16-le"))[0] == "a cat"


@pytest.mark.parametrize(
    ("files", "image", "expected"),
    [
        (["a.txt"], "a.jpg", "a.txt"),
        (["a.caption"], "a.jpg", "a.caption"),
        (["a.jpg.txt"], "a.jpg", "a.jpg.txt"),
        (["a.jpg.txt", "a.txt", "a.caption"], "a.jpg", "a.jpg.txt"),
        (["a.jpg.txt", "a.txt"], "a.png", "a.txt"),
        (["a.TXT"], "a.JPG", "a.TXT"),
        (["A.txt"], "a.jpg", None),
        (["b.txt", "a.json"], "a.jpg", None),
        (["a.b.txt"], "a.b.png", "a.b.txt"),
    ],
)
def test_which_caption_belongs_to_an_image(files: list[str], image: str, expected: str | None) -> None:
    assert Sidecars(files).of(image) == expected


def test_names_match_across_unicode_forms() -> None:
    mac, pc = unicodedata.normalize("NFD", "é.txt"), unicodedata.normalize("NFC", "é.jpg")
    assert Sidecars([mac]).of(pc) == mac


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a flower", "sks a flower"),
        ("a sks flower", "a sks flower"),
        ("risks", "sks risks"),
        ("", "sks"),
        ("a [trigger] here", "a sks here"),
        ("sks", "sks"),
        ("SKS", "sks SKS"),
    ],
)
def test_trigger(caption: str, expected: str) -> None:
    assert with_trigger(caption, "sks") == expected
    assert with_trigger(caption, None) == caption


def test_a_trigger_is_no_pattern() -> None:
    assert with_trigger("a cat", "c.t") == "c.t a cat"


@pytest.mark.parametrize(
    ("caption", "expected"), [("{a|b}", True), ("two\nlines", True), ("{a}", False), ("a | b", False), ("plain", False)]
)
def test_looks_like_choices(caption: str, expected: bool) -> None:
    assert looks_like_choices(caption) is expected


def test_shown_is_short() -> None:
    assert shown(["a", "b"]) == "a, b"
    assert shown(list("abcdefg")) == "a, b, c, d, e and 2 more"
