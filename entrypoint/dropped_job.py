"""A job that comes with the pod: FLUXPOD_JOB holds it as YAML, in base64, or as the address of a file.

So a pod can be launched by one API call. The job becomes a file in ``jobs/`` like any other, once: a restart with the
same value leaves the file alone, which its user may have edited or removed since.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import itertools
import re
import threading
import time
import urllib.request
from collections.abc import Mapping

from bootstrap.volume import Volume, read_json, write_atomically, write_json
from jobs.load import parse_job
from jobs.problem import JobError
from jobs.secret import hidden

VARIABLE = "FLUXPOD_JOB"
LARGEST = 1_000_000  # bytes of a job
LIMIT = 30.0  # seconds that an address may be silent
AGAIN = (30.0, 60.0, 300.0)  # seconds before each new try; the last one goes on
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")


class DroppedJobError(ValueError):
    """FLUXPOD_JOB leads to no job; the message says why. ``passing``: the same may succeed later."""

    def __init__(self, message: str, passing: bool = False):
        super().__init__(message)
        self.passing = passing


class Delivery(threading.Thread):
    """Brings the job of the environment into ``jobs/``, in the background: an address may not answer for long."""

    def __init__(self, volume: Volume, environment: Mapping[str, str]):
        super().__init__(name="dropped-job", daemon=True)
        self.volume, self.environment = volume, environment
        self.tried = threading.Event()  # once: what cannot be had now keeps nobody waiting

    def run(self) -> None:
        for wait in itertools.chain(AGAIN, itertools.repeat(AGAIN[-1])):
            again = self._try()
            self.tried.set()
            if not again:
                return
            time.sleep(wait)

    def _try(self) -> bool:
        """Whether another try is worth it."""
        try:
            line = drop_job(self.volume, self.environment)
        except DroppedJobError as error:
            print(f"{error}{' Trying again.' if error.passing else ''}", flush=True)
            return error.passing
        except OSError as error:
            print(f"{VARIABLE} cannot be written to the volume: {error}. Trying again.", flush=True)
            return True
        if line:
            print(line, flush=True)
        return False


def drop_job(volume: Volume, environment: Mapping[str, str]) -> str:
    """Writes the job of the environment into ``jobs/``; gives a line for people, "" where there is nothing to say.

    What was dropped is marked for each job by itself, since several pods with a job each may share the volume. Raises
    DroppedJobError where the value is no job.
    """
    value = environment.get(VARIABLE, "").strip()
    if not value:
        return ""
    marks = volume.root / ".fluxpod" / "dropped"
    digest = hashlib.sha256(value.encode()).hexdigest()
    if any(read_json(mark) == digest for mark in marks.glob("*.json")):
        return ""
    text = job_text(value)
    try:
        name = parse_job(text, VARIABLE).job.name
    except JobError:
        name = "from-environment"  # its problems are told where every job's are: in its status
    file = volume.jobs / f"{name}.yaml"
    write_atomically(file, text)
    write_json(marks / f"{name}.json", digest)
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
    try:
        request = urllib.request.Request(address, headers={"User-Agent": "fluxpod"})
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            data = answer.read(LARGEST + 1)
    except (http.client.InvalidURL, ValueError):
        raise DroppedJobError(f"{VARIABLE}: {shown} is no address that can be asked") from None
    except (http.client.HTTPException, OSError) as error:  # URLError and timeouts are OSErrors
        raise DroppedJobError(f"{VARIABLE}: {shown} cannot be fetched ({error}). Check the address.", True) from None
    if len(data) > LARGEST:
        raise DroppedJobError(f"{VARIABLE}: {shown} is larger than {LARGEST} bytes: that is no job")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DroppedJobError(f"{VARIABLE}: {shown} is not text: that is no job") from None
