"""The verdict of the bench: what validation must rank how."""

from __future__ import annotations

from bench.validation import RUNS, Result, table, wrong
from bootstrap.validation import Round


def result(name: str, losses: list[float]) -> Result:
    """Training's own loss falls all the time."""
    rounds = [
        Round(10 * i, loss, (loss,) * 4, (1.0 - i / 10, None, None, None), (float(i > 0), 0.0, 0.0, 0.0), "a", 1.0)
        for i, loss in enumerate(losses)
    ]
    return Result(name, RUNS[name], rounds)


UNDER, WELL = result("under", [1.6, 1.5]), result("well", [1.6, 1.4, 1.3])
OVER = result("over", [1.6, 1.4, 1.3, 1.35, 1.36, 1.37])


def test_ranked_rightly() -> None:
    assert wrong([UNDER, WELL, OVER]) == []
    lines = table([UNDER, WELL, OVER]).splitlines()
    assert [line.split()[0] for line in lines] == ["run", "well", "over", "under"]
    assert lines[2].split() == ["over", "120", "0.5000", "1.3700", "1.3000", "at", "step", "20"]


def test_ranked_wrongly() -> None:
    better = result("over", [1.6, 1.4, 1.3, 1.2])
    assert wrong([UNDER, WELL, better]) == [
        "over has no higher validation loss than well",
        "over is not said to overfit: validation 1.2000 at step 30",
    ]
    parted = result("well", [1.3, 1.4, 1.4, 1.4])
    assert wrong([UNDER, parted, OVER])[1].startswith("well is said to overfit: validation 1.4000 at step 30, lowest")
