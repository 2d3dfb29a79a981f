"""One HTTP request with a limit on its time and on its answer's size.

Redirects are answers like any other: followed, they would carry a key to another host. Nothing here puts an address
into a message, since addresses may hold secrets.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LIMIT = 10.0  # seconds for a whole request
LARGEST = 4_000_000  # bytes of an answer; a full list of an account's templates is far less
LONGEST_WAIT = 60.0  # seconds that an answer may tell us to wait


def user_agent() -> str:
    """RunPod and Discord refuse requests without a name, and the one that Python gives by itself."""
    try:
        version = importlib.metadata.version("fluxpod")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        version = "0"
    return f"fluxpod/{version}"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    retry_after: float = 0.0  # seconds, at most LONGEST_WAIT

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def passing(self) -> bool:
        """Whether the same request may well succeed a little later."""
        return self.status in (408, 429) or self.status >= 500


class NoAnswerError(Exception):
    """No answer came; the message says why. ``sent``: the request may have arrived and been acted upon."""

    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Not followed: the 3xx itself is the answer."""


def send(method: str, url: str, body: bytes | None, headers: Mapping[str, str], limit: float = LIMIT) -> Answer:
    """The answer to one request, whatever its status. Raises NoAnswerError."""
    deadline = time.monotonic() + limit
    try:
        request = urllib.request.Request(url, data=body, method=method, headers={"User-Agent": user_agent(), **headers})
        # A proxy that the environment names cannot reach this machine's own loopback.
        proxies = urllib.request.ProxyHandler({}) if is_loopback(url) else urllib.request.ProxyHandler()
        opener = urllib.request.build_opener(proxies, _Redirects)
        try:
            with opener.open(request, timeout=limit) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError as response:
            with response:
                return _read(response, deadline)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no address that can be asked
        raise _explained(error, limit) from None


def is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(response: Any, deadline: float) -> Answer:
    """A socket's timeout counts from byte to byte, so that a dripping answer is ended here."""
    body = bytearray()
    while chunk := response.read1(65536):
        body += chunk
        if len(body) > LARGEST:
            raise http.client.HTTPException
        if time.monotonic() > deadline:
            raise TimeoutError
    wait = response.headers.get("Retry-After", "")
    seconds = min(float(wait), LONGEST_WAIT) if wait.isascii() and wait.isdigit() else 0.0
    return Answer(int(response.status), bytes(body), seconds)


def _explained(error: Exception, limit: float) -> NoAnswerError:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return NoAnswerError(f"does not answer within {limit:g} s", sent=True)
    if isinstance(cause, socket.gaierror):
        return NoAnswerError("cannot be found: this pod has no network, or the host's name is wrong", sent=False)
    if isinstance(cause, ConnectionRefusedError):
        return NoAnswerError("takes no connections", sent=False)
    if isinstance(cause, ssl.SSLError):
        return NoAnswerError("shows a certificate that is not accepted", sent=False)
    if isinstance(cause, (ValueError, http.client.InvalidURL)):
        return NoAnswerError("cannot be asked: its address or the key is malformed", sent=False)
    return NoAnswerError(f"broke off ({type(cause).__name__})", sent=True)
