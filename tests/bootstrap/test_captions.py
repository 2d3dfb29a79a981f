from __future__ import annotations

import unicodedata
from collections import Counter

import numpy as np
import pytest

from bootstrap.captions import (
    Sidecars,
    decode_text,
    draw_text,
    every_text,
    has_wildcards,
    shown,
    with_trigger,
)
from jobs.schema import DatasetEntry

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


def test_shown_is_short() -> None:
    assert shown(["a", "b"]) == "a, b"
    assert shown(list("abcdefg")) == "a, b, c, d, e and 2 more"


# ---------------------------------------------------------------- what is drawn


def entry(**keys: object) -> DatasetEntry:
    return DatasetEntry.model_validate({"path": "d"} | keys)


def drawn(caption: str, draws: int = 3000, **keys: object) -> dict[str, float]:
    generator = np.random.Generator(np.random.Philox(key=5))
    found = Counter(draw_text(caption, entry(**keys), generator) for _ in range(draws))
    assert set(every_text(caption, entry(**keys), 1000) or ()) == set(found)
    return {text: number / draws for text, number in found.items()}


@pytest.mark.parametrize("caption", ["{a|b} 100% {c}", "two\nlines", "b, a, c", r"\{ {{ }}", "%s {0} $x"])
def test_a_caption_is_literal(caption: str) -> None:
    assert drawn(caption) == {caption: 1}


def test_lines_first_then_wildcards() -> None:
    found = drawn("a {red|blue} car\na bike", wildcards=True, multiline=True)
    assert found == pytest.approx({"a red car": 0.25, "a blue car": 0.25, "a bike": 0.5}, abs=0.03)
    assert drawn("{a|b}\n{c}", multiline=True) == pytest.approx({"{a|b}": 0.5, "{c}": 0.5}, abs=0.03)
    assert set(drawn("{a|b}\nc", wildcards=True)) == {"a\nc", "b\nc"}


def test_tags_in_every_order_but_those_kept() -> None:
    found = drawn("one, a,b , ,c", shuffle_tags=True, keep_tags=1)
    orders = ("a, b, c", "a, c, b", "b, a, c", "b, c, a", "c, a, b", "c, b, a")
    assert found == pytest.approx({f"one, {order}": 1 / 6 for order in orders}, abs=0.03)
    assert drawn("a, b", shuffle_tags=True, keep_tags=5) == {"a, b": 1}


def test_prefix_suffix_and_trigger_come_last() -> None:
    keys = {"prefix": "photo of", "suffix": ", grainy", "trigger": "sks"}
    assert drawn("a cat", **keys) == {"sks photo of a cat , grainy": 1}
    assert drawn("", **keys) == {"sks photo of , grainy": 1}
    assert drawn("", trigger="sks") == {"sks": 1}
    assert set(drawn("a {cat|[trigger]}", wildcards=True, trigger="sks")) == {"sks a cat", "a sks"}
    assert drawn("a cat", prefix="a photo of [trigger],", trigger="sks") == {"a photo of sks, a cat": 1}
    assert set(drawn("x, y", shuffle_tags=True, trigger="sks")) == {"sks x, y", "sks y, x"}
    assert drawn("a cat", trigger="{a|b}", wildcards=True) == {"{a|b} a cat": 1}


def test_more_texts_than_wanted_are_not_listed() -> None:
    assert every_text("{a|b}{c|d}", entry(wildcards=True), 4) == ("ac", "ad", "bc", "bd")
    assert every_text("{a|b}{c|d}", entry(wildcards=True), 3) is None
    assert every_text("{a|b|c|d}" * 40, entry(wildcards=True), 1000) is None
    assert every_text("{a|b}" * 2000, entry(wildcards=True), 1000) is None
    assert every_text("{a}" * 2000, entry(wildcards=True), 1000) == ("a" * 2000,)
    assert every_text(", ".join("abcdefghijklmnopq"), entry(shuffle_tags=True), 1000) is None
    assert every_text("{a|a}{b|b}", entry(wildcards=True), 1) == ("ab",)


@pytest.mark.parametrize(
    ("caption", "expected"), [("{a|b}", True), ("two\nlines", False), ("{a}", False), ("a | b", False)]
)
def test_has_wildcards(caption: str, expected: bool) -> None:
    assert has_wildcards(caption) is expected
