"""A job that comes with the pod: FLUXPOD_JOB holds it as YAML, in base64, or as the address of a file.

So a pod can be launched by one API call. The job becomes a file in ``jobs/`` like any other, once: a restart with the
same value leaves the file alone, which its user may have edited since.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from bootstrap.volume import Volume, write_atomically
from jobs.load import parse_job
from jobs.problem import JobError
from jobs.secret import hidden

VARIABLE = "FLUXPOD_JOB"
LARGEST = 1_000_000  # bytes of a job
LIMIT = 30.0  # seconds for fetching one
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")


class DroppedJobError(ValueError):
    """FLUXPOD_JOB leads to no job; the message says why."""


def drop_job(volume: Volume, environment: Mapping[str, str]) -> str:
    """Writes the job of the environment into ``jobs/``; gives a line for people, "" where there is nothing to say.

    Raises DroppedJobError where the value is no job.
    """
    value = environment.get(VARIABLE, "").strip()
    if not value:
        return ""
    mark = volume.root / ".fluxpod" / "dropped-job"
    digest = hashlib.sha256(value.encode()).hexdigest()
    if mark.exists() and mark.read_text(encoding="utf-8").strip() == digest:
        return ""
    text = job_text(value)
    try:
        name = parse_job(text, VARIABLE).job.name
    except JobError:
        name = "from-environment"  # its problems are told where every job's are: in its status
    file = volume.jobs / f"{name}.yaml"
    write_atomically(file, text)
    write_atomically(mark, digest + "\n")
    return f"{VARIABLE}: written to {file}"


def job_text(value: str) -> str:
    """The YAML behind a value of FLUXPOD_JOB."""
    if value.startswith(("http://", "https://")):
        return _fetch(value)
    if _BASE64.fullmatch(value) and ":" not in value:
        try:
            return base64.b64decode("".join(value.split()), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise DroppedJobError(f"{VARIABLE} is neither YAML, nor base64 of YAML, nor an address ({error})") from None
    return value


def _fetch(address: str) -> str:
    shown = hidden(address.split("?", 1)[0])  # a query may hold a key
    request = urllib.request.Request(address, headers={"User-Agent": "fluxpod"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            data = answer.read(LARGEST + 1)
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise DroppedJobError(f"{VARIABLE}: {shown} cannot be fetched ({error}). Check the address.") from None
    if len(data) > LARGEST:
        raise DroppedJobError(f"{VARIABLE}: {shown} is larger than {LARGEST} bytes: that is no job")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DroppedJobError(f"{VARIABLE}: {shown} is not text: that is no job") from None
