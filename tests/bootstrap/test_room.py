"""A run whose states cannot fit is refused before it begins."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.outcome import PodError
from bootstrap.room import can_link, refuse_without_room
from bootstrap.volume import RunFolder
from tests.runs import PLAN, make_job
from tests.states import make_state

PLANNED = replace(PLAN, state_bytes=48 * 10**9, weights_bytes=24 * 10**9, disk_bytes=120 * 10**9)


def test_too_little_room_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(PodError, match=r"will take 120\.0 GB more .* and 100\.0 GB are free"):
        refuse_without_room(PLANNED, make_job(), RunFolder(tmp_path), 100 * 10**9)
    refuse_without_room(PLANNED, make_job(), RunFolder(tmp_path), 120 * 10**9)


def test_what_is_not_known_refuses_nothing(tmp_path: Path) -> None:
    refuse_without_room(PLANNED, make_job(), RunFolder(tmp_path), 0)
    everything = make_job(save={"every": "30m", "weights": "all"})
    refuse_without_room(PLANNED, everything, RunFolder(tmp_path), 1)


def test_states_that_are_there_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    make_state(run.states, 500)
    plan = replace(PLAN, disk_bytes=3000)
    with pytest.raises(PodError, match="which are there already"):
        refuse_without_room(plan, make_job(), run, 500)
    refuse_without_room(plan, make_job(), run, 1000)


def test_a_volume_without_links_needs_room_for_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_link(tmp_path)
    assert can_link(tmp_path / "not-there-yet")

    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert not can_link(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PodError, match=r"144\.0 GB more .*24\.0 GB for the output, since the volume has no links"):
        refuse_without_room(PLANNED, make_job(), RunFolder(tmp_path), 130 * 10**9)
