"""Crashes of a run, counted on the volume: retried with back-off, then held. A restart of the pod does not forget."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from bootstrap.volume import read_json, write_json

BACK_OFF = (10.0, 60.0, 300.0)  # seconds before each retry; then the job is held
FILE = "attempts.json"


@dataclass(frozen=True)
class Attempts:
    job: str  # digest of the job's text: another job starts anew
    crashes: int  # in a row without a new state in between
    step: int  # of the newest state at the last crash

    @classmethod
    def read(cls, folder: Path, text: str) -> Attempts:
        value, job = read_json(folder / FILE), digest(text)
        try:
            found = cls(**value) if isinstance(value, dict) else None
        except TypeError:
            found = None
        return found if found and found.job == job else cls(job, 0, 0)

    def crashed(self, step: int) -> Attempts:
        """After one more crash; getting further than last time starts the count anew."""
        return Attempts(self.job, 1 if step > self.step else self.crashes + 1, max(step, self.step))

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))

    @property
    def exhausted(self) -> bool:
        return self.crashes > len(BACK_OFF)

    @property
    def wait(self) -> float:
        """Seconds before the next try."""
        return BACK_OFF[self.crashes - 1] if 0 < self.crashes <= len(BACK_OFF) else 0.0


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
