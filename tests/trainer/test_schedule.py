"""Learning-rate curves by hand numbers; a function of the step alone."""

from __future__ import annotations

import math
import sys
import types
from itertools import pairwise
from typing import Any

import pytest

from jobs.problem import JobError
from tests.runs import make_job
from trainer.schedule import SHAPES, imported, make_schedule


def curve(steps: int, **keys: Any) -> list[float]:
    schedule = make_schedule(make_job(**{"warmup": 0, "steps": steps} | keys), steps)
    return [schedule(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "schedule_args": {"end": 0.2}}, [1, 0.8, 0.6, 0.4]),
        ({"schedule": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        (
            {"schedule": "cosine", "schedule_args": {"end": 0.5}},
            [1, 0.75 + math.sqrt(0.5) / 4, 0.75, 0.75 - math.sqrt(0.5) / 4],
        ),
        ({"schedule": "cosine_with_restarts", "schedule_args": {"cycles": 2}}, [1, 0.5, 1, 0.5]),
        ({"schedule": "polynomial"}, [1, 9 / 16, 1 / 4, 1 / 16]),
        ({"schedule": "polynomial", "schedule_args": {"power": 1, "end": 0.5}}, [1, 0.875, 0.75, 0.625]),
    ],
)
def test_each_shape_over_four_steps(keys: dict[str, Any], expected: list[float]) -> None:
    """A quarter further at each; the end of the curve would be the fifth step, so none trains at nothing."""
    assert curve(4, **keys) == pytest.approx(expected)


def test_three_restarts_are_the_default() -> None:
    factors = curve(300, schedule="cosine_with_restarts")
    assert [step for step, factor in enumerate(factors) if factor > 0.9999] == [0, 100, 200]
    assert 0 < factors[299] < 0.001


def test_a_warm_up_of_four_steps() -> None:
    assert curve(8, warmup=4, schedule="linear") == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("schedule", SHAPES)
def test_a_curve_starts_at_one_after_warm_up_falls_and_never_reaches_zero(schedule: str) -> None:
    factors = curve(50, warmup=7, schedule=schedule)
    assert factors[6] == factors[7] == 1
    assert all(0 < factor <= 1 for factor in factors)
    if schedule == "constant":
        assert set(factors[7:]) == {1}
    else:
        assert factors[-1] < 0.05
        assert sum(later > earlier for earlier, later in pairwise(factors[7:])) == (2 if "restarts" in schedule else 0)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3), (5, 100)])
@pytest.mark.parametrize("schedule", SHAPES)
def test_runs_too_short_for_their_warm_up(steps: int, warmup: int, schedule: str) -> None:
    factors = curve(steps, warmup=warmup, schedule=schedule)
    assert all(0 < factor <= 1 for factor in factors)


def test_a_longer_run_changes_only_what_is_to_come() -> None:
    """P21: the curve is a function of the step and the job; nothing of it is restored."""
    short, long = curve(100, warmup=10, schedule="constant"), curve(200, warmup=10, schedule="constant")
    assert long[:100] == short
    assert curve(100, schedule="cosine") == curve(100, schedule="cosine")


def test_a_shape_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_shapes")
    module.steps_down = lambda progress, by: 1.0 if progress < 0.5 else by  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_shapes", module)
    keys = {"schedule": "my_shapes.steps_down", "schedule_args": {"by": 0.1}}
    assert curve(4, **keys) == [1, 1, 0.1, 0.1]


def test_import_paths() -> None:
    assert imported("math.pi", "schedule") == math.pi
    for path in ("no_such_module.shape", "math.no_such_name"):
        with pytest.raises(JobError, match=f"schedule: {path} cannot be imported") as raised:
            imported(path, "schedule")
        assert raised.value.problems[0].key == "schedule"


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": "cosine", "schedule_args": {"cylces": 2}},
        {"schedule": "polynomial", "schedule_args": {"power": "two"}},
        {"schedule": "math.pi"},
        {"schedule": "math.log"},  # of 0
    ],
)
def test_a_shape_that_does_not_take_its_arguments_is_told_before_the_first_step(keys: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="schedule_args"):
        curve(4, **keys)
