"""``status.json``: what a run is doing, for people and for the page; replaced whole, with a heartbeat."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bootstrap.volume import read_json, write_json

Phase = Literal["pending", "preparing", "training", "stopping", "uploading", "done", "held", "failed"]


@dataclass(frozen=True)
class Figures:
    """How a training goes."""

    loss: float | None = None  # mean of the newest steps, up to entrypoint.progress.MEAN_OF of them
    images_per_s: float | None = None
    left_s: float | None = None  # seconds to the end, samples, validation and saves included
    validation: str = ""  # what the last round found, in words


@dataclass(frozen=True)
class Status:
    phase: Phase
    message: str
    step: int = 0
    steps: int = 0
    code: int | None = None  # of the outcome, once there is one
    figures: Figures = Figures()
    heartbeat: int = 0  # grows while the run is worked on; clocks of two machines never agree
    updated: str = ""  # UTC, for people

    @classmethod
    def read(cls, path: Path) -> Status | None:
        value = read_json(path)
        try:
            return cls(**value | {"figures": Figures(**value.get("figures", {}))}) if isinstance(value, dict) else None
        except (TypeError, AttributeError):
            return None


class StatusFile:
    """Writes a run's status; every write is one heartbeat. May be used from several threads."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._last = Status.read(path)

    def tell(
        self,
        phase: Phase,
        message: str,
        *,
        step: int | None = None,
        steps: int | None = None,
        code: int | None = None,
        figures: Figures | None = None,
    ) -> None:
        """How far the run is (``step`` of ``steps``) and its figures stay as they were told last where they are not
        told anew; the time left goes with the training."""
        with self._lock:
            last = self._last or Status(phase, message)
            step, steps = (last.step if step is None else step), (last.steps if steps is None else steps)
            figures = figures or replace(last.figures, left_s=None, images_per_s=None)
            self._write(Status(phase, message, step, steps, code, figures))

    def beat(self) -> None:
        """Says again what was said last, to show that somebody lives; nothing where nothing was said yet."""
        with self._lock:
            if self._last:
                self._write(self._last)

    def _write(self, status: Status) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._last = replace(status, heartbeat=self._last.heartbeat + 1 if self._last else 1, updated=now)
        try:
            write_json(self.path, asdict(self._last))
        except OSError as error:  # a full disk must not end a healthy training for want of a status
            print(f"status: {self.path} was not written: {error}", flush=True)
