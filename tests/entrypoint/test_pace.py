"""A process that lags is named, by its own measure of itself; what nvidia-smi says of its card stands beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.nvidia_smi import Health, Load
from bootstrap.whereabouts import Seen
from entrypoint import pace
from entrypoint.pace import IN_A_ROW, WINDOW, PaceWatch, lags

GPUS = (0, 2, 3)
LOADS = {gpu: Load(98.0, 70.5, 1755.0, 650.0, 61.0) for gpu in GPUS}


class Launch:
    """Three processes that train at paces that a test sets: seconds for the same work."""

    def __init__(self, file: Path, gpus: tuple[int, ...] = GPUS, loads: Mapping[int, Load] = LOADS):
        self.seen = [Seen(number) for number in range(3)]
        self.now, self.said = 0.0, list[str]()
        self.file = file
        self.watch = PaceWatch(self, gpus, file, self.said.append, lambda: self.now, lambda: loads)  # type: ignore[arg-type]

    def read(self) -> list[Seen]:
        return list(self.seen)

    def trains(self, *paces: float, steps: int = 100, waited: float = 0.0) -> str:
        """One window; gives the notice after it."""
        for each, seconds in zip(self.seen, paces, strict=True):
            more = {"step": each.step + steps, "work": each.work + 1, "seconds": each.seconds + seconds}
            self.seen[each.number] = replace(each, waited=each.waited + waited, **more)
        self.now += WINDOW
        self.watch.look()
        if self.watch.measuring:
            self.watch.measuring.join()
        return self.watch.notice

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def test_one_that_lags_is_named_and_forgotten_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = Health(slowed=("hardware thermal slowdown: it is far too hot",))
    monkeypatch.setattr(pace, "read_health", lambda gpu: hot if gpu == 2 else Health())
    launch = Launch(tmp_path / "pace.jsonl")
    for _ in range(IN_A_ROW - 1):
        assert launch.trains(1.0, 1.31, 1.0) == ""
    named = "process 1 on GPU 2 is 31% slower than the others: hardware thermal slowdown: it is far too hot"
    assert launch.trains(1.0, 1.31, 1.0) == f" ({named})"
    launch.trains(1.0, 1.31, 1.0)
    assert launch.said == [f"warning: {named}. All wait for the slowest: `fluxpod probe` on this pod, or another pod"]
    assert launch.trains(1.0, 1.05, 1.0) == ""
    assert launch.said[1:] == ["no process lags behind the others any more"]


def test_a_hiccup_is_none(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "pace.jsonl")
    for paces in [(1.0, 1.0, 2.0), (1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.19, 1.0), (1.0, 1.19, 1.0)]:
        assert launch.trains(*paces) == ""
    assert launch.said == []


def test_each_window_is_a_line(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "pace.jsonl")
    launch.watch.look()  # none is over
    launch.trains(1.0, 1.0, 1.1, steps=120, waited=12.0)
    (line,) = launch.lines
    assert (line["step"], line["s_per_step"]) == (120, 0.5)
    assert line["processes"][2] == {  # type: ignore[index]
        "process": 2, "gpu": 3, "slower": 0.1, "data_wait_s": 0.1,
        "utilisation": 98.0, "memory_gib": 70.5, "clock_mhz": 1755.0, "power_w": 650.0, "temperature_c": 61.0,
    }  # fmt: skip


def test_without_steps_there_is_nothing_to_say(tmp_path: Path) -> None:
    """It compiles, say, or is paused."""
    launch = Launch(tmp_path / "pace.jsonl")
    launch.trains(1.0, 9.0, 1.0, steps=0)
    assert not launch.file.exists()


def test_on_a_cpu_and_without_nvidia_smi(tmp_path: Path) -> None:
    for name, launch in {"cpu": Launch(tmp_path / "a", ()), "none": Launch(tmp_path / "b", GPUS, {})}.items():
        launch.trains(1.0, 1.0, 1.5)
        assert "process 2" in launch.trains(1.0, 1.0, 1.5), name
        processes = launch.lines[0]["processes"]
        assert processes[2].keys() == {"process", "gpu", "slower", "data_wait_s"}  # type: ignore[index]


def test_a_volume_that_fails_ends_nothing(tmp_path: Path) -> None:
    launch = Launch(tmp_path)  # a folder
    launch.trains(1.0, 1.0, 1.0)


def test_lags() -> None:
    zero = [Seen(0), Seen(1)]
    assert lags(zero[:1], [Seen(0, work=1.0, seconds=1.0)]) == {}
    assert lags(zero, [Seen(0, work=1.0, seconds=1.0), Seen(1)]) == {}
    found = lags(zero, [Seen(0, work=3.0, seconds=3.0), Seen(1, work=1.0, seconds=2.0)])  # smaller shares, slower
    assert found == pytest.approx({0: -0.5, 1: 1.0})
