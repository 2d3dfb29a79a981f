from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from jobs import values

NUMBER = TypeAdapter(values.Number)
COUNT = TypeAdapter(values.Count)


@pytest.mark.parametrize("written", [1e-4, "1e-4", "1E-4", "0.0001", " 1e-4 ", ".0001", "+1e-4"])
def test_spellings_of_one_number(written: Any) -> None:
    assert NUMBER.validate_python(written) == 0.0001


@pytest.mark.parametrize(
    "written",
    ["1,000", "1_000", "1 000", "nan", "inf", "-inf", float("nan"), float("inf"), "1e999", 10**400, True, False, None,
     "", "fast", "1e", "0x10", "١", [1], {}],
)  # fmt: skip
def test_what_is_no_number(written: Any) -> None:
    for kind in (NUMBER, COUNT):
        with pytest.raises(ValidationError):
            kind.validate_python(written)


def test_a_number_with_separators_is_offered_without() -> None:
    with pytest.raises(ValidationError) as caught:
        NUMBER.validate_python("1,000")
    assert caught.value.errors()[0]["ctx"]["remedy"] == "Write a plain number, such as 1000"


@pytest.mark.parametrize(
    ("written", "value"), [(7, 7), ("7", 7), (1e3, 1000), ("1e3", 1000), (2.0, 2), (2**63 - 1, 2**63 - 1)]
)
def test_whole_numbers(written: Any, value: int) -> None:
    read = COUNT.validate_python(written)
    assert (read, type(read)) == (value, int)


@pytest.mark.parametrize("written", [2.5, "2.5", 1e-4, 2**63])
def test_what_is_not_whole_or_too_large(written: Any) -> None:
    with pytest.raises(ValidationError):
        COUNT.validate_python(written)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_back_from_its_text(number: float) -> None:
    assert NUMBER.validate_python(repr(number)) == number


@given(st.integers(min_value=-(2**62), max_value=2**62))
def test_every_whole_number_is_read_back_from_its_text(number: int) -> None:
    assert COUNT.validate_python(str(number)) == number


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (values.Name, ["a", "my-style_2.1", "_x"], ["", ".", "..", "a/b", "-a", ".a", "my style", "é", "a" * 101, 1]),
        (values.Switch, [True, False], ["no", "true", 1, 0, None]),
        (values.Text, ["no", "1"], ["", "  ", 1, True, None, ["a"]]),
        (values.FilePath, ["datasets/x", "/a b/c"], ["", "C:\\x", "c:/x", "a\tb"]),
        (values.Resolution, [512, "512", 64, 2048, [512, 768]], [0, 500, 2064, 48, [], [512, 512], [500], True, "a"]),
        (values.Side, [16 * 64, 4096], [1000, 4112]),
        (values.Targets, ["attention", "all-linear", ["*.to_q"]], ["attn", [], [1], None, 3]),
        (values.KeptWeights, ["all", 1, "3"], [0, -1, "none", "ALL", 1.5, None]),
        (values.Optimizer, ["AdamW", "torch.optim.SGD"], ["adamw", "Adam W", "AdamW8", "a.", "", None, 8]),
        (values.Schedule, ["cosine", "my.curve"], ["cos", None]),
        (values.Options, [{}, {"a": 1}], [[], "a", None]),
    ],
)
def test_kinds_of_values(kind: Any, good: list[Any], bad: list[Any]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    for value in good:
        adapter.validate_python(value)
    for value in bad:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


def test_a_wrong_choice_is_told_what_it_may_have_meant() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(values.Optimizer)
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python("pagedadamw8bit")
    assert "Did you mean PagedAdamW8bit?" in caught.value.errors()[0]["ctx"]["remedy"]


def test_values_are_shown_short() -> None:
    assert values.shown(True) == "true"
    assert values.shown("a") == "'a'"
    assert values.shown([1]) == "a list"
    assert len(values.shown("x" * 1000)) < 80
    assert values.shown(10**5000) == "a very long number"
