"""Every step stands exactly once, one step late, and a broken number stops the run."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bootstrap.volume import RunFolder
from tests.runs import make_world
from trainer import metrics as writing
from trainer.metrics import Metrics, NonFiniteLossError, StepRecord, StepSums, cut_after
from trainer.world import World


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def world(control: dist.ProcessGroup) -> World:
    return make_world(control)


def record(step: int, loss: float = 0.5, norm: float | None = None) -> StepRecord:
    return StepRecord(step, torch.tensor(loss), None if norm is None else torch.tensor(norm), 1e-4, 4, torch.tensor(0))


def lines(folder: RunFolder) -> list[dict[str, float]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_a_step_is_written_when_the_next_is_under_way(folder: RunFolder, world: World) -> None:
    metrics = Metrics(folder, 0, world, 1)
    metrics.record(record(1, 0.5, 2.0))
    assert lines(folder) == []
    metrics.record(record(2, 0.25, 1.0))
    (line,) = lines(folder)
    assert line.keys() == {"step", "loss", "lr", "images_per_s", "grad_norm"}
    assert (line["step"], line["loss"], line["lr"], line["grad_norm"]) == (1, 0.5, 1e-4, 2.0)
    metrics.flush()
    metrics.flush()
    assert [line["step"] for line in lines(folder)] == [1, 2]
    metrics.close()


def test_speed_counts_the_time_between_steps(folder: RunFolder, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 103.0, 163.0, 165.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    metrics = Metrics(folder, 0, world, 1)  # 100
    metrics.record(record(1))  # 101: 4 images in a second
    metrics.record(record(2))  # 103: 4 in two
    metrics.restart_clock()  # 163: a minute of sampling
    metrics.record(record(3))  # 165
    metrics.flush()
    metrics.close()
    assert [line["images_per_s"] for line in lines(folder)] == [4, 2, 2]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_the_run_and_is_not_written(
    loss: float, folder: RunFolder, world: World
) -> None:
    metrics = Metrics(folder, 0, world, 1)
    metrics.record(record(1))
    metrics.record(record(2, loss))
    with pytest.raises(NonFiniteLossError, match="the loss of step 2 is"):
        metrics.record(record(3))
    metrics.close()
    assert [line["step"] for line in lines(folder)] == [1]


def test_a_flush_before_a_save_stops_it_too(folder: RunFolder, world: World) -> None:
    metrics = Metrics(folder, 0, world, 1)
    metrics.record(record(1, math.nan))
    with pytest.raises(NonFiniteLossError):
        metrics.flush()
    metrics.close()


def test_so_does_a_gradient(folder: RunFolder, world: World) -> None:
    metrics = Metrics(folder, 0, world, 1)
    metrics.record(record(1, 0.5, math.inf))
    with pytest.raises(NonFiniteLossError, match="gradient of step 1 is inf"):
        metrics.flush()
    metrics.close()


def test_a_few_in_a_row_are_told_and_skipped(folder: RunFolder, world: World) -> None:
    metrics = Metrics(folder, 0, world, 3)
    bad = (math.nan, math.nan, 0.5, math.inf, 0.5)
    for step, loss in enumerate(bad, start=1):
        metrics.record(record(step, loss))
    metrics.record(replace(record(6), skipped=torch.tensor(7)))
    metrics.flush()
    assert metrics.wrong == "the gradients of 7 parts of tensors of step 6 are no numbers"
    assert [line["loss"] for line in lines(folder)] == [None, None, 0.5, None, 0.5, 0.5]
    assert [line["step"] for line in lines(folder) if "skipped" in line] == [1, 2, 4, 6]
    metrics.record(record(7, math.nan))
    metrics.record(record(8, 0.5, math.nan))
    with pytest.raises(NonFiniteLossError, match="the gradient of step 8 is nan, 3 steps in a row"):
        metrics.flush()
    metrics.close()


def test_other_processes_read_and_do_not_write(folder: RunFolder, control: dist.ProcessGroup) -> None:
    metrics = Metrics(folder, 0, make_world(control, rank=1, size=2), 1)
    metrics.record(record(1))
    metrics.record(record(2, math.nan))
    with pytest.raises(NonFiniteLossError):
        metrics.flush()
    metrics.close()
    assert list(folder.root.iterdir()) == []


def test_going_on_from_a_state_cuts_what_lies_beyond_it(folder: RunFolder, world: World) -> None:
    metrics = Metrics(folder, 0, world, 1)
    for step in range(1, 8):
        metrics.record(record(step, loss=step))
    metrics.flush()
    metrics.close()
    with folder.metrics.open("a") as file:
        file.write('{"step": 8, "lo')  # killed there
    metrics = Metrics(folder, 5, world, 1)
    metrics.record(record(6, loss=60.0))
    metrics.flush()
    metrics.close()
    assert [(line["step"], line["loss"]) for line in lines(folder)] == [*((s, s) for s in range(1, 6)), (6, 60)]
    board = EventAccumulator(str(folder.tensorboard))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [*((s, s) for s in range(1, 6)), (6, 60)]


@pytest.mark.parametrize("content", ["", "\n\n", "nonsense\n", "[]\n7\n{}\n"])
def test_cutting_a_file_that_holds_no_steps(content: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    cut_after(path, 5)
    assert path.read_text() == ""


def test_cutting_no_file(tmp_path: Path) -> None:
    cut_after(tmp_path / "metrics.jsonl", 5)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_samples_are_shown_in_tensorboard(folder: RunFolder, world: World, caplog: pytest.LogCaptureFixture) -> None:
    folder.samples.mkdir()
    Image.new("RGB", (6, 4), "red").save(folder.samples / "step-000010-01.png")
    Image.new("RGB", (6, 4), "blue").save(folder.samples / "step-000020-01.png")
    (folder.samples / "step-000010-02.png").write_bytes(b"cut off")
    metrics = Metrics(folder, 0, world, 1)
    metrics.pictures(10)
    metrics.pictures(11)
    metrics.close()
    board = EventAccumulator(str(folder.tensorboard))
    board.Reload()
    assert board.Tags()["images"] == ["samples/01"]
    (shown,) = board.Images("samples/01")
    assert (shown.step, shown.width, shown.height) == (10, 6, 4)
    assert shown.encoded_image_string == (folder.samples / "step-000010-01.png").read_bytes()
    assert "step-000010-02.png is not shown in TensorBoard" in caplog.text


def test_losses_by_level_waits_and_memory(folder: RunFolder, world: World) -> None:
    """The dummy of a process without work, of weight 0, counts nowhere; a loss that is no number in its own band."""
    sums = StepSums(world, waited=0.25)
    losses, weights = torch.tensor([0.5, 1.0, 3.0, math.nan]), torch.tensor([1.0, 0.5, 0.0, 1.0])
    sums.add(torch.tensor(0.5), losses, weights, torch.tensor([0.1, 0.2, 0.3, 1.0]))
    sums.add(torch.tensor(0.25), torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0.6]))
    assert sums.loss == 0.75
    metrics = Metrics(folder, 0, world, 1)
    metrics.record(replace(record(1), sums=sums.values))
    metrics.record(replace(record(2), sums=sums.values))
    metrics.flush()
    line: dict[str, Any] = lines(folder)[0]
    assert line["loss_by_level"] == [pytest.approx(1.0 / 1.5), None, 2.0, None]
    assert line["images_by_level"] == [1.5, 0.0, 1.0, 1.0]
    assert line["data_wait_s"] == 0.25
    assert "memory_gib" not in line  # of a GPU
    assert metrics.means_since(1) == ((pytest.approx(1.0 / 1.5), None, 2.0, None), (1.5, 0.0, 1.0, 0.0))
    assert metrics.means_since(2)[1] == (0.0,) * 4
    metrics.close()
    board = EventAccumulator(str(folder.tensorboard))
    board.Reload()
    assert [event.value for event in board.Scalars("train/loss_by_level/0.50-0.75")] == [2.0, 2.0]


def test_means_take_what_is_new_of_a_long_file(
    folder: RunFolder, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = StepSums(world)
    one = torch.ones(1)
    sums.add(torch.tensor(0.5), one, one, torch.tensor([0.1]))
    metrics = Metrics(folder, 0, world, 1)
    for step in (1, 2, 3):
        metrics.record(replace(record(step), sums=sums.values))
    assert metrics.means_since(0)[1] == (2.0, 0.0, 0.0, 0.0)
    read: list[int] = []
    lines_of = writing._lines
    monkeypatch.setattr(writing, "_lines", lambda content: read.append(len(content)) or lines_of(content))
    metrics.flush()
    assert metrics.means_since(2)[1] == (1.0, 0.0, 0.0, 0.0)
    assert metrics.means_since(3)[1] == (0.0,) * 4
    assert read[0] < folder.metrics.stat().st_size / 2
    assert read[1] == 0
    assert metrics.means_since(0)[1] == (3.0, 0.0, 0.0, 0.0)  # the round before was of other pictures
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 4, "loss_by')  # a full volume took half a line
    assert metrics.means_since(3)[1] == (0.0,) * 4
    with folder.metrics.open("ab") as file:
        file.write(b'_level": [1.0], "images_by_level": [2.0]}\n')
    assert metrics.means_since(3)[1] == (2.0, 0.0, 0.0, 0.0)
    metrics.close()


class FullVolume:
    """A file that takes ``room`` bytes, and what comes when there is room again."""

    def __init__(self, file: Any, room: int):
        self.file, self.room = file, room

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return int(taken)

    def fileno(self) -> int:
        return int(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def test_a_full_volume_ends_no_training_and_costs_no_line(
    folder: RunFolder, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(folder, 0, world, 1)
    full = FullVolume(metrics.file, room=30)
    metrics.file = full  # type: ignore[assignment]
    for step in (1, 2, 3):
        metrics.record(record(step))
    metrics.flush()
    assert len(folder.metrics.read_bytes()) == 30
    assert caplog.text.count("does not take the metrics") == 1  # not at each step
    full.room = 10**6
    metrics.record(record(4))
    metrics.flush()
    metrics.close()
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4]


def test_tensorboard_that_cannot_write_ends_no_training(
    folder: RunFolder, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics(folder, 0, world, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics.board, "add_scalar", full)
    for step in (1, 2):
        metrics.record(record(step))
    metrics.flush()
    metrics.pictures(2)
    metrics.close()
    assert [line["step"] for line in lines(folder)] == [1, 2]
