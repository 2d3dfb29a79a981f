"""A GPU's memory that ran out: what the trainer saw of it, and what the next plan makes of that.

The trainer measures (``Shortage``, in ``outcome.json``), the entrypoint keeps it with the plan that failed
(``FailedPlan``, in ``memory.json``), and the plan leaves more room. What is learned holds for the job and the cards
that it was learned with: another resolution, optimizer or card begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bootstrap.estimate import CONTEXT, NCCL, Work, in_gib
from bootstrap.gpus import GIB
from bootstrap.pod import Gpu
from bootstrap.precision import Precision
from bootstrap.volume import read_json, write_json
from jobs.schema import Job

RETRIES = 3  # plans that are tried by themselves after one that failed; each leaves 5 % more room at least
MARGIN = 0.05  # of what torch was planned to hold, which the next plan's estimate stays below


@dataclass(frozen=True)
class Shortage:
    """What a process saw when its GPU's memory ran out, in bytes."""

    during: str  # "step 12", for people
    process: int
    asked: int  # by the request that failed; 0 where the error does not say
    held: int  # given out by torch's allocator at that moment
    spare: int  # kept by it in pieces that did not fit
    outside: int  # in use on this GPU beside it: the CUDA context, NCCL, other programs
    total: int  # of the GPU

    @property
    def needed(self) -> int:
        """At least; what would have been asked for next is not known."""
        return self.held + self.asked + self.outside

    @property
    def foreign(self) -> int:
        """What other programs probably hold."""
        return max(0, self.outside - CONTEXT - NCCL - GIB)

    def __str__(self) -> str:
        asked = f"asked for {in_gib(self.asked)} more" if self.asked else "asked for more"
        told = (
            f"in {self.during} process {self.process} held {in_gib(self.held)} and {asked}; {in_gib(self.outside)} of "
            f"the GPU's {in_gib(self.total)} were in use beside torch, {in_gib(self.spare)} lay in pieces too small"
        )
        if self.foreign:
            told += f". Other programs seem to hold about {in_gib(self.foreign)} of this GPU: end them"
        return told


@dataclass(frozen=True)
class FailedPlan:
    """A plan that ran out of a GPU's memory."""

    setting: str  # what it was made for: see ``setting_of``
    planned: int  # its estimated peak, bytes
    needed: int  # what it needed at least, bytes
    base: Precision
    told: str  # the shortage, for people


def setting_of(job: Job, work: Work, gpus: Sequence[Gpu]) -> str:
    """A digest of all that decides what a plan needs and how much there is."""
    trained = (work.shape, work.lora, work.trained, work.optimizer, work.ema, work.assistant)
    shown = (work.tokens, work.sample_pixels)
    wish = job.plan.model_dump(exclude={"retry"})
    cards = [(gpu.name, gpu.memory) for gpu in gpus]
    parts = repr((trained, shown, job.images_per_step, job.optimizer, job.max_grad_norm, wish, cards))
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def room_after(room: int, failed: Sequence[FailedPlan]) -> int:
    """The bytes that the next plan's estimate may come to, where ``room`` would be safe by the estimate alone.

    An estimate that was too low by some gigabytes is taken to be so again; one that was not met fell to pieces too
    small to use, or to a neighbour.
    """
    for each in failed:
        less = max(MARGIN * (each.planned - CONTEXT), each.needed - each.planned, 1)
        room = min(room, int(each.planned - less))
    return room


def read_failed(path: Path) -> tuple[FailedPlan, ...]:
    """Those on record, the oldest first; none where there is no record, or one that cannot be read."""
    value = read_json(path)
    try:
        return tuple(FailedPlan(**each) for each in value["failed"]) if isinstance(value, dict) else ()
    except (KeyError, TypeError):
        return ()


def write_failed(path: Path, failed: Sequence[FailedPlan]) -> None:
    write_json(path, {"failed": [asdict(each) for each in failed]})
