"""What a person sees of a run, from files that grow, are cut and are rewritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bootstrap.volume import write_atomically
from entrypoint.progress import Tail, TrainingProgress, as_clock


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def step(number: int, loss: float = 0.5, left: float | None = None) -> str:
    known = {} if left is None else {"left_s": left}
    return json.dumps({"step": number, "loss": loss, "lr": 1e-4, "images_per_s": 2.0} | known) + "\n"


# ---------------------------------------------------------------- a growing file


def test_whole_lines_only(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x")
    assert tail.lines() == []
    append(tmp_path / "x", "one\ntw")
    assert tail.lines() == ["one"]
    append(tmp_path / "x", "o\nthree\n")
    assert tail.lines() == ["two", "three"]
    assert tail.lines() == []


def test_from_the_end(tmp_path: Path) -> None:
    append(tmp_path / "x", "old\n")
    tail = Tail(tmp_path / "x", from_end=True)
    append(tmp_path / "x", "new\n")
    assert tail.lines() == ["new"]


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    append(tmp_path / "x", "one\ntwo\nhal")
    tail = Tail(tmp_path / "x")
    tail.lines()
    (tmp_path / "x").write_text("1\n")
    assert tail.lines() == ["1"]


def test_a_file_that_was_replaced_is_read_anew_however_long_it_is(tmp_path: Path) -> None:
    append(tmp_path / "x", "one\nhal")
    tail = Tail(tmp_path / "x")
    tail.lines()
    write_atomically(tmp_path / "x", "1\n2\n3\n4\n5\n6\n")
    assert tail.lines() == ["1", "2", "3", "4", "5", "6"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\n")
    assert Tail(tmp_path / "x").lines() == ["\ufffd"]


# ---------------------------------------------------------------- a run


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = 1000.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.monotonic", lambda: now)
    return advance


def test_plain_lines_now_and_then_and_at_the_end(
    metrics: Path, log: Path, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = TrainingProgress(metrics, log, 0, 100)
    assert not progress.look()
    append(metrics, step(1))
    clock(5)
    assert progress.look()
    assert capsys.readouterr().out == "", "too soon"
    append(metrics, step(2, 0.25, left=490))
    clock(5)
    assert progress.look()
    assert capsys.readouterr().out == "step 2/100  loss 0.2500  2.0 images/s  8:10 left\n"
    append(metrics, "".join(step(number, left=0.2) for number in range(3, 101)))
    clock(1)
    assert progress.look()
    assert capsys.readouterr().out == "step 100/100  loss 0.5000  2.0 images/s  0:00 left\n"
    told = "step 2/100  loss 0.2500  2.0 images/s  8:10 left\nstep 100/100  loss 0.5000  2.0 images/s  0:00 left\n"
    assert log.read_text() == told  # a killed run's log says how far it was
    progress.look()
    assert capsys.readouterr().out == ""
    progress.close()


def test_the_trainers_own_lines_are_shown_and_no_others(
    metrics: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(log, "12:00:00 of the start before\n")
    progress = TrainingProgress(metrics, log, 0, 100)
    append(log, "12:34:56 saved the state of step 10 in 0.1 s\nW1130 torch/distributed: noise\n[rank0]: 12:00:00\n")
    assert not progress.look()
    assert capsys.readouterr().out == "12:34:56 saved the state of step 10 in 0.1 s\n"


def test_going_on_counts_from_the_state_and_not_from_what_a_kill_left(
    metrics: Path, log: Path, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at step 47, going on from 40: the trainer cuts seven lines off the metrics."""
    append(metrics, "".join(step(number) for number in range(1, 48)))
    progress = TrainingProgress(metrics, log, 40, 50)
    clock(60)
    assert not progress.look()
    assert progress.step == 40
    write_atomically(metrics, "".join(step(number) for number in range(1, 41)))
    assert not progress.look()
    append(metrics, step(41))
    clock(60)
    assert progress.look()
    assert progress.step == 41
    assert (
        capsys.readouterr().out == "step 41/50  loss 0.5000  2.0 images/s\n"
    )  # how long a step takes is not known yet
    append(metrics, step(42, left=480.0))
    clock(60)
    progress.look()
    assert capsys.readouterr().out == "step 42/50  loss 0.5000  2.0 images/s  8:00 left\n"


def test_a_damaged_line_is_passed_over(metrics: Path, log: Path) -> None:
    progress = TrainingProgress(metrics, log, 0, 10)
    append(metrics, step(1) + "\x00\x00\n" + step(2))
    assert progress.look()
    assert progress.step == 2


class Bar:
    """What tqdm is told."""

    def __init__(self, total: int, initial: int, unit: str) -> None:
        self.n, self.total, self.lines, self.closed = initial, total, [], False  # type: ignore[var-annotated]

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def update(self, count: int) -> None:
        self.n += count

    def write(self, line: str) -> None:
        self.lines.append(line)

    def close(self) -> None:
        self.closed = True


def test_a_bar_on_a_terminal(
    metrics: Path, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("entrypoint.progress.tqdm", Bar)
    progress = TrainingProgress(metrics, log, 40, 50)
    append(metrics, step(41) + step(42))
    append(log, "12:34:56 saved\n")
    progress.look()
    progress.close()
    bar = progress.bar
    assert isinstance(bar, Bar)
    assert (bar.n, bar.total, bar.text, bar.closed) == (42, 50, "loss 0.5000, 2.0 images/s", True)
    assert bar.lines == ["12:34:56 saved"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (36_000, "10:00:00")])
def test_time_left(seconds: float, shown: str) -> None:
    assert as_clock(seconds) == shown


def test_figures_for_the_status(metrics: Path, log: Path) -> None:
    from bootstrap.validation import Round
    from entrypoint.status import Figures

    progress = TrainingProgress(metrics, log, 0, 10)
    assert progress.figures == Figures()
    append(
        metrics, step(1, 0.5) + json.dumps({"step": 2, "loss": None, "images_per_s": 1.0}) + "\n" + step(3, 0.75, 7.0)
    )
    append(metrics.with_name("validation.jsonl"), Round(2, 0.25, (0.25,) * 4, (0.5,) * 4, (1.0,) * 4, "a", 1.0).line())
    progress.look()
    assert progress.figures == Figures(0.625, 2.0, 7.0, "validation 0.2500 at step 2")
