"""How a run ended, from the trainer to the entrypoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.outcome import ACCESS_REFUSED, CRASH, DONE, JOB_WRONG, POD_WRONG, STOPPED, Outcome
from bootstrap.shortage import Shortage


def test_the_exit_codes_are_a_promise() -> None:
    assert (DONE, CRASH, JOB_WRONG, POD_WRONG, ACCESS_REFUSED, STOPPED) == (0, 1, 64, 65, 69, 75)


def test_an_outcome_comes_back(tmp_path: Path) -> None:
    outcome = Outcome(STOPPED, "stopped by a signal after step 7", 5)
    outcome.write(tmp_path / "outcome.json")
    assert Outcome.read(tmp_path / "outcome.json") == outcome


def test_a_shortage_of_memory_comes_back(tmp_path: Path) -> None:
    outcome = Outcome(POD_WRONG, "out of GPU memory", 0, Shortage("step 3", 1, 2, 3, 4, 5, 6))
    outcome.write(tmp_path / "outcome.json")
    assert Outcome.read(tmp_path / "outcome.json") == outcome


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        '{"code": 0}',
        '{"code": 0, "reason": "", "step": 1, "x": 2}',
        '{"code": 1, "reason": "", "step": 1, "shortage": {"during": ""}}',
    ],
)
def test_no_outcome_is_a_crash(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    if content is not None:
        path.write_text(content)
    assert Outcome.read(path) is None
