"""One line a step in ``metrics.jsonl``, the same in TensorBoard, and a watch on the loss."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from bootstrap.volume import RunFolder, write_atomically
from trainer.world import World

log = logging.getLogger(__name__)


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became NaN or infinite; the message says at which step."""


@dataclass(frozen=True)
class StepRecord:
    """What is known of a step when the next one is already under way."""

    step: int  # updates done, this one included
    loss: torch.Tensor  # mean over the step's images; a scalar, still on its device
    grad_norm: torch.Tensor | None
    learning_rate: float
    images: int
    skipped: torch.Tensor  # parts of tensors whose gradient was no number, over all processes; a scalar, on its device
    seconds: float = 0.0  # since the step before; set by Metrics


@dataclass(frozen=True)
class _Figures:
    """A step's numbers on their way to the host: loss, gradient's length (0 where there is none), skipped parts."""

    record: StepRecord
    numbers: torch.Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def send(cls, record: StepRecord) -> _Figures:
        """Not by ``item()``, which waits for everything that is queued behind them too: the whole next step."""
        norm = torch.zeros_like(record.loss) if record.grad_norm is None else record.grad_norm
        numbers = torch.stack([record.loss.float(), norm.float(), record.skipped.float()])
        if numbers.device.type != "cuda":
            return cls(record, numbers, None)
        numbers = numbers.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(record, numbers, arrived)

    def read(self) -> tuple[float, float | None, int]:
        if self.arrived:
            self.arrived.synchronize()
        loss, norm, skipped = self.numbers.tolist()
        return loss, None if self.record.grad_norm is None else norm, int(skipped)


class Metrics:
    """Reads each step's loss one step late, so that the GPU never waits for the host.

    Every process reads it (they must agree on stopping); rank 0 writes. Lines beyond the state a run goes on from are
    cut off first: every step stands exactly once.
    """

    def __init__(self, folder: RunFolder, start: int, world: World, most_in_a_row: int):
        self.most_in_a_row = most_in_a_row
        self.in_a_row = 0  # steps up to the last one read whose loss or gradient was no number
        self.wrong = ""  # what was no number in the last one read, in words
        self.waiting: _Figures | None = None
        self.last_time = time.monotonic()
        self.writes = world.leads
        if self.writes:
            cut_after(folder.metrics, start)
            self.file = folder.metrics.open("a", encoding="utf-8")
            self.board = SummaryWriter(str(folder.tensorboard), purge_step=start + 1)
        self.on_gpu = world.device.type == "cuda"

    def record(self, record: StepRecord) -> None:
        """Takes a step's figures and writes down those of the step before. Raises NonFiniteLossError where that one
        is one too many in a row whose loss or gradient was no number."""
        waiting, self.waiting = self.waiting, None
        if waiting:
            self._write(waiting)
        now = time.monotonic()
        self.waiting = _Figures.send(replace(record, seconds=now - self.last_time))
        self.last_time = now

    def flush(self) -> None:
        """Writes down the last step too; on disk when it returns."""
        waiting, self.waiting = self.waiting, None
        if waiting:
            self._write(waiting)
        if self.writes:
            self.file.flush()
            os.fsync(self.file.fileno())

    def restart_clock(self) -> None:
        """Leaves out of images_per_s what was spent on saving or sampling since the last step."""
        self.last_time = time.monotonic()

    def _write(self, figures: _Figures) -> None:
        record = figures.record
        loss, norm, skipped = figures.read()
        self.wrong = wrong = what_is_wrong(record.step, loss, norm, skipped)
        self.in_a_row = self.in_a_row + 1 if wrong else 0
        if wrong and self.writes:
            log.warning("%s: nothing was learned from it (%d in a row)", wrong, self.in_a_row)
        if self.in_a_row >= self.most_in_a_row:
            raise NonFiniteLossError(f"{wrong}{f', {self.in_a_row} steps in a row' if self.in_a_row > 1 else ''}")
        if not self.writes:
            return
        line: dict[str, Any] = {
            "step": record.step,
            "loss": loss if math.isfinite(loss) else None,  # JSON has no NaN
            "lr": record.learning_rate,
            "images_per_s": round(record.images / max(1e-9, record.seconds), 4),
        }
        if norm is not None:
            line["grad_norm"] = norm if math.isfinite(norm) else None
        if wrong:
            line["skipped"] = wrong
        if self.on_gpu:
            line["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for name, value in line.items():
            if name != "step" and isinstance(value, (int, float)):
                self.board.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        if self.writes:
            self.file.close()
            self.board.close()


def what_is_wrong(step: int, loss: float, norm: float | None, skipped: int) -> str:
    """In words, for a step whose loss or gradient is no number; else ""."""
    if not math.isfinite(loss):
        return f"the loss of step {step} is {loss}"
    if norm is not None and not math.isfinite(norm):
        return f"the length of the gradient of step {step} is {norm}"
    if skipped:
        return f"the gradients of {skipped} parts of tensors of step {step} are no numbers"
    return ""


def cut_after(path: Path, step: int) -> None:
    """Drops the lines of steps beyond ``step``, and a last line that a kill left half-written."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(text)["step"] <= step:
                kept.append(text + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    write_atomically(path, "".join(kept))
