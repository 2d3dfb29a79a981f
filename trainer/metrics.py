"""One line a step in ``metrics.jsonl``, the same in TensorBoard, and a watch on the loss."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from bootstrap.figures import curves_of
from bootstrap.validation import BANDS
from bootstrap.volume import RunFolder, write_atomically
from trainer.time_left import Pause, TimeLeft, compiling_seconds
from trainer.world import World

log = logging.getLogger(__name__)


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became NaN or infinite; the message says at which step."""


class StepSums:
    """What a step adds up over its passes and, in one message, over the processes; on the device, where nothing waits
    for it. What each process has to tell of itself stands in a place of its own.

    ``values``: the loss; of each band of noise levels the sum of weight x loss, and of the weights; of each process its
    memory in GiB, and the seconds it waited for data.
    """

    def __init__(self, world: World, waited: float = 0.0):
        self.values = torch.zeros(1 + 2 * BANDS + 2 * world.size, device=world.device)
        if world.device.type == "cuda":
            self.values[1 + 2 * BANDS + world.rank] = torch.cuda.max_memory_allocated(world.device) / 2**30
        self.values[1 + 2 * BANDS + world.size + world.rank] = waited

    @property
    def loss(self) -> torch.Tensor:
        return self.values[0]

    def add(self, loss: torch.Tensor, each: torch.Tensor, weights: torch.Tensor, sigma: torch.Tensor) -> None:
        """One pass: its share of the step's loss, and of each image its loss, weight and noise level, all [batch]."""
        self.values[0] += loss.detach()
        band = (sigma * BANDS).long().clamp(0, BANDS - 1)
        # Not by a product with 0 and 1: a loss that is no number stays in its own band. A dummy weighs nothing.
        mine = (band[None] == torch.arange(BANDS, device=band.device)[:, None]) & (weights > 0)
        self.values[1 : 1 + BANDS] += torch.where(mine, each.detach() * weights, 0.0).sum(dim=1)
        self.values[1 + BANDS : 1 + 2 * BANDS] += torch.where(mine, weights, 0.0).sum(dim=1)


@dataclass(frozen=True)
class StepRecord:
    """What is known of a step when the next one is already under way."""

    step: int  # updates done, this one included
    loss: torch.Tensor  # mean over the step's images; a scalar, still on its device
    grad_norm: torch.Tensor | None
    learning_rate: float
    images: int
    skipped: torch.Tensor  # parts of tensors whose gradient was no number, over all processes; a scalar, on its device
    sums: torch.Tensor | None = None  # the values of its StepSums, over all processes
    pixels: int = 0  # of all images of the step
    seconds: float = 0.0  # since the step before; set by Metrics
    left: float | None = None  # seconds to the end of the run; set by Metrics


@dataclass(frozen=True)
class _Figures:
    """A step's numbers on their way to the host: loss, gradient's length (0 where there is none), skipped parts, and
    its sums."""

    record: StepRecord
    numbers: torch.Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def send(cls, record: StepRecord) -> _Figures:
        """Not by ``item()``, which waits for everything that is queued behind them too: the whole next step."""
        norm = torch.zeros_like(record.loss) if record.grad_norm is None else record.grad_norm
        numbers = torch.stack([record.loss.float(), norm.float(), record.skipped.float()])
        if record.sums is not None:
            numbers = torch.cat([numbers, record.sums])
        if numbers.device.type != "cuda":
            return cls(record, numbers, None)
        numbers = numbers.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(record, numbers, arrived)

    def read(self) -> tuple[float, float | None, int, list[float]]:
        if self.arrived:
            self.arrived.synchronize()
        loss, norm, skipped, *sums = self.numbers.tolist()
        return loss, None if self.record.grad_norm is None else norm, int(skipped), sums[1:]


class Metrics:
    """Reads each step's loss one step late, so that the GPU never waits for the host.

    Every process reads it (they must agree on stopping); rank 0 writes. Lines beyond the state a run goes on from are
    cut off first: every step stands exactly once. A volume that takes no line ends no training: what it lacks is kept
    and written with a later one.
    """

    def __init__(
        self, folder: RunFolder, start: int, world: World, most_in_a_row: int, time_left: TimeLeft | None = None
    ):
        self.most_in_a_row = most_in_a_row
        self.in_a_row = 0  # steps up to the last one read whose loss or gradient was no number
        self.wrong = ""  # what was no number in the last one read, in words
        self.waiting: _Figures | None = None
        self.time_left = time_left
        self.last_time, self.compiled = time.monotonic(), compiling_seconds()
        self.writes = world.leads
        if self.writes:
            cut_after(folder.metrics, start)
            self.path, self.samples = folder.metrics, folder.samples
            self.file = folder.metrics.open("ab", buffering=0)
            self.unwritten, self.refused = b"", False  # what the volume has not taken, and whether that was told
            self.meant = (0, 0)  # up to which step, and which byte, the lines went into means
            self.board: SummaryWriter | None = SummaryWriter(str(folder.tensorboard), purge_step=start + 1)
        self.on_gpu = world.device.type == "cuda"

    def record(self, record: StepRecord) -> None:
        """Takes a step's figures and writes down those of the step before. Raises NonFiniteLossError where that one
        is one too many in a row whose loss or gradient was no number."""
        waiting, self.waiting = self.waiting, None
        if waiting:
            self._write(waiting)
        seconds, compiling = self._since_last()
        left = None
        if self.time_left:
            self.time_left.step(seconds - compiling, record.pixels)
            left = self.time_left.after(record.step)
        self.waiting = _Figures.send(replace(record, seconds=seconds, left=left))

    def _since_last(self) -> tuple[float, float]:
        """Seconds since the last step or pause, and how many of them went into compiling."""
        now, compiled = time.monotonic(), compiling_seconds()
        passed = now - self.last_time, compiled - self.compiled
        self.last_time, self.compiled = now, compiled
        return passed

    def flush(self) -> None:
        """Writes down the last step too; on disk when it returns."""
        waiting, self.waiting = self.waiting, None
        if waiting:
            self._write(waiting)
        if self.writes:
            self._put("")
            with self._told_when_refused():
                os.fsync(self.file.fileno())

    def means_since(self, step: int) -> tuple[tuple[float | None, ...], tuple[float, ...]]:
        """Of all steps after ``step`` that are written down: the mean loss of each band of levels, and the images that
        it is of. Read from the file, which a run that goes on has, too; but for the first time, only what is new."""
        sums, images = [0.0] * BANDS, [0.0] * BANDS
        last, begin = self.meant if self.meant[0] <= step else (0, 0)
        with self.path.open("rb") as file:
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0]
        for line in _lines(whole):
            last = max(last, line["step"])
            losses, counts = line.get("loss_by_level", ()), line.get("images_by_level", ())
            for band, (loss, count) in enumerate(zip(losses, counts, strict=True)):
                if loss is not None and line["step"] > step and "skipped" not in line:
                    sums[band] += loss * count
                    images[band] += count
        self.meant = last, begin + len(whole)
        means = (total / count if count else None for total, count in zip(sums, images, strict=True))
        return tuple(means), tuple(round(count, 4) for count in images)

    def pictures(self, step: int) -> None:
        """The samples of a step in TensorBoard, as they stand in their files."""
        for path in sorted(self.samples.glob(f"step-{step:06d}-*.png")) if self.writes and self.board else ():
            try:
                with Image.open(path) as image:
                    size = {"width": image.width, "height": image.height, "colorspace": len(image.getbands())}
                picture = Summary.Image(encoded_image_string=path.read_bytes(), **size)
            except OSError as error:
                log.warning("%s is not shown in TensorBoard: %s", path.name, error)
                continue
            tag = f"samples/{path.stem.rpartition('-')[2]}"
            summary = Summary(value=[Summary.Value(tag=tag, image=picture)])
            self._show(lambda board, summary=summary: board.file_writer.add_summary(summary, step))  # type: ignore[misc]

    def curve(self, name: str, value: float, step: int) -> None:
        """A point in TensorBoard."""
        self._show(lambda board: board.add_scalar(name, value, step))

    def _show(self, what: Callable[[Any], None]) -> None:
        if self.board is None:
            return
        try:
            what(self.board)
        except OSError as error:  # its own thread has ended with it
            log.warning("TensorBoard shows nothing more of this start: %s. metrics.jsonl has it all.", error)
            self.board = None

    def restart_clock(self, spent_on: Pause | None = None) -> None:
        """Leaves out of images_per_s what was spent on something else since the last step."""
        seconds, compiling = self._since_last()
        if spent_on:
            self.took(spent_on, seconds - compiling)

    def took(self, pause: Pause, seconds: float) -> None:
        """What time is left depends on it."""
        if self.time_left:
            self.time_left.pause(pause, seconds)

    def _write(self, figures: _Figures) -> None:
        record = figures.record
        loss, norm, skipped, sums = figures.read()
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
        if record.left is not None:
            line["left_s"] = round(record.left, 1)
        if norm is not None:
            line["grad_norm"] = norm if math.isfinite(norm) else None
        if wrong:
            line["skipped"] = wrong
        if sums:
            line |= self._of_sums(sums)
        self._put(json.dumps(line) + "\n")
        for name, value in curves_of(line):
            self.curve(name, value, record.step)

    def _put(self, text: str) -> None:
        self.unwritten += text.encode()
        with self._told_when_refused():
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
            self.refused = False

    @contextmanager
    def _told_when_refused(self) -> Iterator[None]:
        """Once, until the volume takes something again."""
        try:
            yield
        except OSError as error:
            if not self.refused:
                log.warning("the volume does not take the metrics: %s. They are written when it does.", error)
            self.refused = True

    def _of_sums(self, sums: list[float]) -> dict[str, Any]:
        losses, weights, told = sums[:BANDS], sums[BANDS : 2 * BANDS], sums[2 * BANDS :]
        memory, waited = told[: len(told) // 2], told[len(told) // 2 :]
        means = [loss / weight if weight > 0 else None for loss, weight in zip(losses, weights, strict=True)]
        line: dict[str, Any] = {
            "loss_by_level": [mean if mean is not None and math.isfinite(mean) else None for mean in means],
            "images_by_level": [round(weight, 4) for weight in weights],
            "data_wait_s": round(max(waited), 4),
        }
        if self.on_gpu:
            line["memory_gib"] = [round(gib, 2) for gib in memory]
        return line

    def close(self) -> None:
        if self.writes:
            with suppress(OSError):
                self.file.close()
            self._show(lambda board: board.close())


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
    write_atomically(
        path, "".join(json.dumps(line) + "\n" for line in _lines(path.read_bytes()) if line["step"] <= step)
    )


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines that have a step."""
    for text in content.decode("utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if isinstance(line["step"], int):
                yield line
        except (ValueError, KeyError, TypeError):
            continue
