"""The table of the bench: what each kind of base loses against the first."""

from __future__ import annotations

from bench.base_precisions import Result, table


def test_gaps_are_against_the_first() -> None:
    lines = table([Result("bf16", 0.2, 0.1), Result("nf4", 0.21, 0.1005)]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["bf16", "0.2000", "0.1000"],
        ["nf4", "0.2100", "+5.0", "%", "0.1005", "+0.5", "%"],
    ]
