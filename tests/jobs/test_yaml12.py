from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import yaml12
from jobs.problem import JobError, Problem


def refused(text: str) -> Problem:
    """The first problem of a text that cannot be read, or can be read only around it."""
    try:
        return yaml12.parse(text, "job.yaml").problems[0]
    except JobError as error:
        return error.problems[0]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 0.0001),
        ("1E-4", 0.0001),
        ("1.e3", 1000.0),
        (".5", 0.5),
        ("-0.0", -0.0),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("+7", 7),
        ("1_000", "1_000"),
        ("1,000", "1,000"),
        ("12:30", "12:30"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("nan", "nan"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ('"\\u00e9"', "é"),
        ("!!str 1", "1"),
        ("'C:\\new'", "C:\\new"),
        ('"C:\\\\new"', "C:\\new"),
        ("9" * 5000, math.inf),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(written: str, value: Any) -> None:
    document = yaml12.parse(f"x: {written}\n")
    assert document.problems == []
    assert document.value["x"] == value
    assert type(document.value["x"]) is type(value)


def test_not_a_number_is_read() -> None:
    assert math.isnan(yaml12.parse("x: .nan").value["x"])


def test_every_key_and_value_has_its_place() -> None:
    document = yaml12.parse("a: 1\nb:\n  - c: x\n    d: {e: 2}\n")
    assert document.keys["b", 0, "d", "e"] == yaml12.Place(4, 9)
    assert document.values["b", 0] == yaml12.Place(3, 5)
    assert document.place(("b", 0, "missing", "deep")) == yaml12.Place(3, 5)
    assert document.place(("missing",)) == yaml12.Place(1, 1)


def test_aliases_and_merges_are_read_and_what_is_written_wins() -> None:
    document = yaml12.parse("a: &a {x: 1, y: 2}\nb: *a\nc:\n  <<: *a\n  x: 3\n")
    assert document.value == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}, "c": {"x": 3, "y": 2}}
    assert document.place(("c", "x")).line == 5


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("", 1, 1, "empty"),
        ("# a remark\n", 1, 1, "empty"),
        ("---\n", 1, 1, "empty"),
        ("- a\n- b\n", 1, 1, "a list"),
        ("hello", 1, 1, "one piece of text"),
        ("a:1", 1, 1, "space after the colon"),
        ("a: 1\n---\nb: 2\n", 2, 1, "second document"),
        ("a:\n\tb: 1\n", 2, 1, "a tab"),
        ("a:\n  b: 1\n\tc: 1\n", 3, 1, "a tab"),
        ("a:\n\u00a0\u00a0b: 1\n", 2, 1, "looks like a space (U+00A0)"),
        ("a:\n  - b: 1\n \u3000  c: 1\n", 3, 2, "looks like a space (U+3000)"),
        ('p: "C:\\Users\\me"\n', 1, 9, "single quotes"),
        ('a: 1\np: "C:\\new\\table"\n', 2, 4, "Windows path"),
        ("a: 1\nb: 2\na: 3\n", 3, 1, "line 1"),
        ("a: {b: 1, b: 2}\n", 1, 11, "line 1"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, 2, "bracket"),
        ("a: 1\nb: 'x\nc: 3\n", 2, 4, "never closed"),
        ("a: b: c\n", 1, 5, "colon"),
        ("a:\n  b: 1\n c: 2\n", 3, 2, "indented otherwise"),
        ("a: x\nfoo\nb: 1\n", 3, 1, "without a colon"),
        ("a: *.safetensors\n", 1, 5, "quotes"),
        ("a: @x\n", 1, 4, "quotes"),
        ("a: %x\n", 1, 4, "quotes"),
        ("a: !!python/object:os.system x\n", 1, 4, "cannot be read as"),
        ("a: !!set {x}\n", 1, 4, "cannot be read as !!set"),
        ("a: !!int x\n", 1, 4, "cannot be read as !!int"),
        ("a\x00: 1\n", 1, 2, "U+0000"),
        ("{a: 1}: 2\n", 1, 1, "where a key is needed"),
        ("<<: 3\n", 1, 5, "group of keys"),
        ("a: &a [*a]\n", 1, 4, "without end"),
        ("[" * 5000, 1, 1, "nested too deeply"),
        ("a: " + "x" * yaml12.MOST_CHARACTERS, 1, 1, "too long"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(text: str, line: int, column: int, words: str) -> None:
    problem = refused(text)
    assert (problem.line, problem.column) == (line, column)
    assert words in f"{problem.message} {problem.remedy}"
    assert problem.remedy
    assert "Traceback" not in str(problem)


def test_the_excerpt_shows_the_line_and_a_caret_below_the_column() -> None:
    assert refused("a: 1\nb: 2\na: 3\n").excerpt == "     3 | a: 3\n       | ^"
    assert refused("a:\n\tb: 1\n").excerpt == "     2 | →b: 1\n       | ^"
    caret = refused("a: " + "x" * 300 + ": b\n").excerpt.splitlines()[1]
    assert len(caret) < 120


def test_odd_spaces_in_block_text_and_quotes_are_text() -> None:
    document = yaml12.parse("a: |\n  \u00a0x\nb: 'c\n  \u00a0d'\n")
    assert document.problems == []
    assert document.value["a"] == "\u00a0x\n"


def test_a_billion_aliases_are_refused_at_once() -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    assert "without end" in refused("\n".join(lines)).message


@pytest.mark.parametrize("data", ["a: é".encode(), "a: é".encode("utf-8-sig"), "a: é".encode("utf-16")])
def test_text_is_decoded(data: bytes) -> None:
    assert yaml12.parse(yaml12.decode(data, "job.yaml")).value == {"a": "é"}


def test_bytes_that_are_no_text_are_told_with_their_place() -> None:
    with pytest.raises(JobError) as caught:
        yaml12.decode(b"a: 1\nb: it\x92s\n", "job.yaml")
    problem = caught.value.problems[0]
    assert (problem.file, problem.line, problem.column) == ("job.yaml", 2, 6)
    assert "0x92" in problem.message
    assert "UTF-8" in problem.remedy


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1:-[]{}'\"\\&*!|>%@#,?<~. \t\n\r\u00a0\u2028\x00é"), max_size=40))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    try:
        document = yaml12.parse(text)
    except JobError as error:
        for problem in error.problems:
            assert problem.line is not None
            assert problem.column is not None
            assert problem.remedy
    else:
        assert isinstance(document.value, dict)
