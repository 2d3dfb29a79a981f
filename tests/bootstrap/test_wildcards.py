from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.wildcards import Choice, Parts, choose, count, every, parse, unmatched


def texts(written: str, multiline: bool = False) -> list[str]:
    return list(every(parse(written, wildcards=True, multiline=multiline)))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("plain, 100%", ["plain, 100%"]),
        ("a {red|blue} car", ["a red car", "a blue car"]),
        ("{a|b}{c|d}", ["ac", "ad", "bc", "bd"]),
        ("{|bright }red", ["red", "bright red"]),
        ("{a|{b|c}}", ["a", "b", "c"]),
        ("{a|{b|{c|d}}}", ["a", "b", "c", "d"]),
        ("{one}", ["one"]),
        ("a | b", ["a | b"]),
        ("a|b {c|d} e|f", ["a|b c e|f", "a|b d e|f"]),
        ("100% {{wool|silk}}", ["100% {wool|silk}"]),
        ("{{{a|b}}}", ["{a}", "{b}"]),
        (r"\{a|b\} {c\|d|e\}|\\}", ["{a|b} c|d", "{a|b} e}", "{a|b} \\"]),
        (r"a\b", [r"a\b"]),
    ],
)
def test_known_choices(written: str, expected: list[str]) -> None:
    assert texts(written) == expected
    assert count(parse(written, True, False)) == len(expected)
    assert not unmatched(written)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{a|b", ["{a|b"]),
        ("a|b}", ["a|b}"]),
        ("}{", ["}{"]),
        ("x {a|b {c|d} e", ["x {a|b c e", "x {a|b d e"]),
        ("{a|b}}", ["{a|b}"]),
    ],
)
def test_a_brace_without_its_partner_is_plain(written: str, expected: list[str]) -> None:
    assert texts(written) == expected
    assert unmatched(written)


def test_a_line_first_then_its_wildcards() -> None:
    assert texts("a {x|y}\r\n\n  b \n".replace("\r", ""), multiline=True) == ["a x", "a y", "b"]
    drawn = drawn_from("a {x|y}\nb", multiline=True)
    assert drawn == pytest.approx({"a x": 0.25, "a y": 0.25, "b": 0.5}, abs=0.03)


def test_a_choice_over_lines_is_none() -> None:
    assert texts("{a|\nb}", multiline=True) == ["{a|", "b}"]
    assert texts("{a|\nb}") == ["a", "\nb"]


def test_alternatives_are_alike_whatever_they_hold() -> None:
    assert drawn_from("{a|{b|c}|a}") == pytest.approx({"a": 2 / 3, "b": 1 / 6, "c": 1 / 6}, abs=0.03)


def drawn_from(written: str, multiline: bool = False, draws: int = 4000) -> dict[str, float]:
    parts, generator = parse(written, True, multiline), np.random.Generator(np.random.Philox(key=1))
    found = Counter(choose(parts, generator) for _ in range(draws))
    return {text: number / draws for text, number in found.items()}


# ---------------------------------------------------------------- any caption

PLAIN = st.text(alphabet="ab, {}|\\\n", max_size=8)
PARTS = st.recursive(
    PLAIN.map(lambda text: (text,) if text else ()),
    # A letter first: two braces side by side are a plain one.
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda options: ("x", Choice(tuple(options)))),
    max_leaves=6,
)


def written_as(parts: Parts) -> str:
    def plain(text: str) -> str:
        return "".join("\\" + letter if letter in "{|}\\" else letter for letter in text)

    return "".join(
        plain(part) if isinstance(part, str) else "{" + "|".join(written_as(option) for option in part.of) + "}"
        for part in parts
    )


@given(st.lists(PARTS, max_size=3))
def test_what_is_written_is_read(pieces: list[Parts]) -> None:
    parts = tuple(part for piece in pieces for part in piece)
    read = parse(written_as(parts), wildcards=True, multiline=False)
    assert list(every(read)) == list(every(parts))
    assert count(read) == count(parts)


@given(st.text(alphabet="ab{}|\\\n", max_size=40), st.booleans(), st.booleans(), st.integers(0, 2**60))
def test_any_text_has_a_reading(written: str, wildcards: bool, multiline: bool, seed: int) -> None:
    parts = parse(written, wildcards, multiline)
    number = count(parts)
    assert number >= 1
    drawn = choose(parts, np.random.Generator(np.random.Philox(key=seed)))
    if number <= 1000:
        assert drawn in set(every(parts))
    if not wildcards and not multiline:
        assert parts == (written,)


def test_deep_and_long_captions_take_no_time_and_no_stack() -> None:
    for written in ("{a|" * 3000, "{" * 3001 + "a|b" + "}" * 3001, "|" * 30000, "{a|b}" * 1000):
        parts = parse(written, True, False)
        choose(parts, np.random.Generator(np.random.Philox(key=1)))
        assert next(every(parts)) is not None
