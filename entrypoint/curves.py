"""TensorBoard behind the page: started when somebody first looks, on this machine's own address only, and passed on to
those who know the page's password. It has none of its own.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoint.launch import free_port
from jobs.secret import is_secret

PREFIX = "/tensorboard"
START_LIMIT = 60.0  # seconds: its imports come from a slow disk the first time
ANSWER_LIMIT = 60.0
RELOAD = "15"  # seconds between two looks at the volume
# What is passed on of a request and of an answer; the rest is between each two of browser, page and TensorBoard.
ASKED = ("accept", "accept-encoding", "content-type", "if-none-match", "range")
ANSWERED = (
    "content-type",
    "content-encoding",
    "cache-control",
    "content-security-policy",
    "etag",
    "expires",
    "location",
)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Curves:
    """May be used from several threads."""

    def __init__(self, runs: Path, environ: Mapping[str, str]):
        self.runs, self.environ = runs, {name: value for name, value in environ.items() if not is_secret(name)}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._port = 0

    def ask(self, method: str, address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """``address``: path and query, from ``PREFIX`` on."""
        try:
            with self._lock:
                self._start()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT)
            try:
                kept = {name: headers[name] for name in ASKED if name in headers}
                connection.request(method, address, body or None, kept)
                found = connection.getresponse()
                told = {name: value for name in ANSWERED if (value := found.getheader(name)) is not None}
                return Answer(found.status, told, found.read())
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            text = f"TensorBoard does not answer ({why}). Reload this page in a minute.\n"
            return Answer(503, {"content-type": "text/plain; charset=utf-8"}, text.encode())

    def _start(self) -> None:
        """Where it does not run. Raises OSError where it does not come up."""
        if self._child is not None and self._child.poll() is None:
            return
        self._port = free_port()
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "tensorboard.main", "--logdir", str(self.runs), "--host", "127.0.0.1"),
                *("--port", str(self._port), "--path_prefix", PREFIX, "--reload_interval", RELOAD),
            ],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_LIMIT
        while not self._listens():
            if self._child.poll() is not None:
                raise ConnectionError(f"it ended at once, with code {self._child.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not up after {START_LIMIT:.0f} s")
            time.sleep(0.1)

    def _listens(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.connect()
            return True
        except OSError:
            return False
        finally:
            connection.close()

    def close(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._child.wait()
