"""The prompts of a job that keeps them in a file of their own."""

from __future__ import annotations

from pathlib import Path

from bootstrap.volume import Volume
from jobs.problem import JobError, Problem
from jobs.prompts import MOST_BYTES, parse_prompts
from jobs.schema import Job

KEY = "sample.prompts_file"


def with_prompts(job: Job, volume: Volume) -> Job:
    """The job with the prompts that its file has now, if it has one. Raises JobError with every problem of the file."""
    if job.sample.prompts_file is None:
        return job
    prompts = read_prompts(volume.resolve(job.sample.prompts_file))
    return job.model_copy(update={"sample": job.sample.model_copy(update={"prompts": prompts})})


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts in a text file, one a line. Raises JobError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise JobError([Problem(f"{path} is too large for prompts", "It is a text of one prompt a line", key=KEY)])
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        told = f"{path} cannot be read: {error.strerror}"
        raise JobError([Problem(told, "It is a text file of one prompt a line, on the volume", key=KEY)]) from None
    except UnicodeDecodeError as error:
        told = f"{path} is no UTF-8 text (byte {error.start})"
        raise JobError([Problem(told, "Save it as UTF-8", key=KEY)]) from None
    if "\0" in text:  # UTF-16 without its mark
        raise JobError([Problem(f"{path} is no UTF-8 text (it holds zero bytes)", "Save it as UTF-8", key=KEY)])
    return parse_prompts(text, path.name)
