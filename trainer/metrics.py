"""One line a step in ``metrics.jsonl``, the same in TensorBoard, and a watch on the loss."""

from __future__ import annotations

import json
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
    seconds: float = 0.0  # since the step before; set by Metrics


class Metrics:
    """Reads each step's loss one step late, so that the GPU never waits for the host.

    Every process reads it (they must agree on stopping); rank 0 writes. Lines beyond the state a run goes on from are
    cut off first: every step stands exactly once.
    """

    def __init__(self, folder: RunFolder, start: int, world: World):
        self.waiting: StepRecord | None = None
        self.last_time = time.monotonic()
        self.writes = world.leads
        if self.writes:
            cut_after(folder.metrics, start)
            self.file = folder.metrics.open("a", encoding="utf-8")
            self.board = SummaryWriter(str(folder.tensorboard), purge_step=start + 1)
        self.on_gpu = world.device.type == "cuda"

    def record(self, record: StepRecord) -> None:
        """Takes a step's figures and writes down those of the step before. Raises NonFiniteLossError for that one."""
        waiting, self.waiting = self.waiting, None
        if waiting:
            self._write(waiting)
        now = time.monotonic()
        self.waiting = replace(record, seconds=now - self.last_time)
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

    def _write(self, record: StepRecord) -> None:
        loss = record.loss.item()  # waits for the step to end, when the next is already queued
        norm = None if record.grad_norm is None else record.grad_norm.item()
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss of step {record.step} is {loss}")
        if norm is not None and not math.isfinite(norm):
            raise NonFiniteLossError(f"the length of the gradient of step {record.step} is {norm}")
        if not self.writes:
            return
        line: dict[str, Any] = {
            "step": record.step,
            "loss": loss,
            "lr": record.learning_rate,
            "images_per_s": round(record.images / max(1e-9, record.seconds), 4),
        }
        if norm is not None:
            line["grad_norm"] = norm
        if self.on_gpu:
            line["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for name, value in line.items():
            if name != "step":
                self.board.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        if self.writes:
            self.file.close()
            self.board.close()


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
