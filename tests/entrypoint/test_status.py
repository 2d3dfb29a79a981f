"""status.json: whole at any moment, and alive."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bootstrap.volume import read_json
from entrypoint.status import Figures, Status, StatusFile


def test_a_status_is_told_and_read(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "test" / "status.json"
    StatusFile(path).tell("training", "training", step=7, steps=20)
    status = Status.read(path)
    assert status is not None
    assert (status.phase, status.message, status.step, status.steps, status.code) == (
        "training",
        "training",
        7,
        20,
        None,
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status.updated)


def test_every_write_is_a_heartbeat_over_restarts_too(tmp_path: Path) -> None:
    """Clocks of two machines never agree; a counter that grows does."""
    path = tmp_path / "status.json"
    beats = []
    for _ in range(2):
        file = StatusFile(path)
        for _ in range(3):
            file.tell("preparing", "data")
            beats.append(read_json(path)["heartbeat"])
    assert beats == [1, 2, 3, 4, 5, 6]


def test_the_end_has_its_code(tmp_path: Path) -> None:
    StatusFile(tmp_path / "status.json").tell("held", "the job is wrong", code=64)
    assert read_json(tmp_path / "status.json")["code"] == 64


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"phase": "done"}', '{"phase": "done", "message": "", "mood": 1}']
)
def test_a_damaged_status_is_none_and_is_replaced(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    if content is not None:
        path.write_text(content)
    assert Status.read(path) is None
    StatusFile(path).tell("pending", "")
    status = Status.read(path)
    assert status is not None
    assert status.heartbeat == 1


def test_a_disk_that_does_not_take_it_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = StatusFile(tmp_path / "status.json")
    with monkeypatch.context() as patch:
        patch.setattr("entrypoint.status.write_json", full)
        file.tell("training", "training", step=1, steps=2)
    assert "status.json was not written: [Errno 28] No space left" in capsys.readouterr().out
    file.tell("training", "training", step=2, steps=2)
    status = Status.read(file.path)
    assert status is not None
    assert (status.step, status.heartbeat) == (2, 2)


def test_figures_stay_and_the_time_left_goes_with_the_training(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = StatusFile(path)
    figures = Figures(0.5, 2.0, 60.0, "validation 0.4000 at step 5")
    status.tell("training", "training", step=5, steps=10, figures=figures)
    assert (read := Status.read(path)) is not None
    assert read.figures == figures
    StatusFile(path).tell("held", "no room")
    assert (read := Status.read(path)) is not None
    assert (read.step, read.figures) == (5, Figures(0.5, None, None, "validation 0.4000 at step 5"))
    path.write_text('{"phase": "done", "message": "by an older program"}')
    assert (read := Status.read(path)) is not None
    assert read.figures == Figures()
    path.write_text('{"phase": "done", "message": "", "figures": []}')
    assert Status.read(path) is None
