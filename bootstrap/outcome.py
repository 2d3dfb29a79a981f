"""How a run can end: the exit codes, the errors that lead to them, and ``outcome.json``, which the trainer writes last.

The launcher turns every worker's exit code into 1, so the code a run ended with is what this file says; no file means
that the trainer crashed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from bootstrap.shortage import Shortage
from bootstrap.volume import read_json, write_json

DONE = 0
CRASH = 1
JOB_WRONG = 64  # held until the job file changes
POD_WRONG = 65  # held; the message says what to choose
ACCESS_REFUSED = 69  # held; retried when the token or the job changes
STOPPED = 75  # by signal; goes on at the next start


class PodError(Exception):
    """This pod cannot run the job; the message says why and what to choose instead."""


class AccessError(Exception):
    """Weights or data cannot be had with these credentials, or not now; the message says what to do."""


class NotNowError(AccessError):
    """It may go well a little later: the hub is down, or there is no network."""


@dataclass(frozen=True)
class Outcome:
    code: int
    reason: str
    step: int
    shortage: Shortage | None = None  # of a GPU's memory, where that ended the run

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        value = read_json(path)
        try:
            if not isinstance(value, dict):
                return None
            shortage = value.pop("shortage", None)
            return cls(**value, shortage=Shortage(**shortage) if shortage else None)
        except TypeError:  # another program's, or another version's
            return None
