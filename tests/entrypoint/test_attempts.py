from __future__ import annotations

from pathlib import Path

from entrypoint.attempts import BACK_OFF, Attempts


def test_crashes_are_retried_with_back_off_then_held(tmp_path: Path) -> None:
    waits = []
    for _ in range(len(BACK_OFF)):
        attempts = Attempts.read(tmp_path, "job").crashed(0)
        attempts.write(tmp_path)
        waits.append(attempts.wait)
        assert not attempts.exhausted
    assert waits == list(BACK_OFF)
    assert Attempts.read(tmp_path, "job").crashed(0).exhausted


def test_getting_further_starts_the_count_anew(tmp_path: Path) -> None:
    attempts = Attempts.read(tmp_path, "job")
    for _ in range(3):
        attempts = attempts.crashed(100)
    assert attempts.crashed(100).exhausted
    assert attempts.crashed(200).crashes == 1


def test_another_job_text_starts_anew(tmp_path: Path) -> None:
    Attempts.read(tmp_path, "job").crashed(0).crashed(0).write(tmp_path)
    assert Attempts.read(tmp_path, "job").crashes == 2
    assert Attempts.read(tmp_path, "edited job").crashes == 0
    (tmp_path / "attempts.json").write_text("[]", encoding="utf-8")
    assert Attempts.read(tmp_path, "job").crashes == 0
