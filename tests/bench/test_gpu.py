"""The benchmark's table: what was asked for beside what was found. What was found is made up here."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases import CASES
from bench.gpu import good, head, row

FOUND: dict[str, Any] = {
    "seconds_per_step": 0.479,
    "images_per_second": 2.09,
    "model_tflops": 466.0,
    "ceiling_tflops": 803.0,
    "share_of_ceiling": 0.58,
    "peak_allocated_gib": 72.7,
    "peak_reserved_gib": 74.0,
    "outside_torch_gib": 1.3,
    "planned_gib": 74.5,
    "first_step_seconds": 41.2,
    "losses_finite": True,
    "attention": "cudnn",
}


def cells(name: str, **found: Any) -> dict[str, str]:
    columns, line = (text.strip("| ").split(" | ") for text in (head()[0], row(CASES[name], FOUND | found)))
    return dict(zip(columns, line, strict=True))


def test_a_row_says_what_was_asked_and_whether_it_holds() -> None:
    found = cells("full-1024")
    assert (found["s/step"], found["at least"], found["aim"], found["holds"]) == ("0.479", "0.480", "0.400", "yes")
    assert (found["kohya"], found["share"], found["planned"]) == ("1.37", "58.0%", "74.5 (+0.7%)")
    assert cells("full-1024", seconds_per_step=0.5)["holds"] == "NO"
    assert cells("full-1024", seconds_per_step=0.39)["holds"] == "yes, the aim too"
    assert cells("lora-1024-fp8")["holds"] == "-"


@pytest.mark.parametrize(
    ("found", "is_good"),
    [
        ({}, True),
        ({"seconds_per_step": 0.481}, False),
        ({"losses_finite": False}, False),
        ({"planned_gib": 78.0}, False),
        ({"planned_gib": 70.0}, False),
    ],
)
def test_what_fails_the_benchmark(found: dict[str, Any], is_good: bool) -> None:
    assert good(CASES["full-1024"], FOUND | found) is is_good


def test_targets_are_the_issues() -> None:
    rates = {name: case.images / case.at_least for name, case in CASES.items() if case.at_least and case.images > 1}
    assert rates == {"full-512x4": pytest.approx(7.8), "full-512x8-48gb": pytest.approx(6)}
    assert all(case.aim < case.at_least for case in CASES.values() if case.aim and case.at_least)
