"""What the volume says of a run that ended; light enough for the pod loop to ask every few seconds."""

from __future__ import annotations

from pathlib import Path

from bootstrap.outcome import DONE, Outcome
from bootstrap.volume import RunFolder
from jobs.load import LoadedJob
from jobs.schema import Job


def output_of(folder: RunFolder, job: Job) -> Path:
    return folder.output / f"{job.name}.safetensors"


def already_done(loaded: LoadedJob, folder: RunFolder) -> bool:
    """Whether this very job ended well before."""
    outcome = Outcome.read(folder.outcome)
    same = folder.job.exists() and folder.job.read_bytes() == loaded.text.encode()
    return outcome is not None and outcome.code == DONE and same and output_of(folder, loaded.job).exists()
