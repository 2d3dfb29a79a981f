"""Brings files of the hub, or of any address, to the volume: one after another, resumed and verified.

It is a process of its own (``python -m bootstrap.receive``), of which ``bootstrap.transfers`` runs several: a Xet
transfer that hangs cannot be ended from inside a process. It reads orders from its standard input, one JSON object a
line, and tells on its standard output how far it is and how each order ended.

Where a file lies and whether this token may have it, huggingface_hub says, and its Xet client brings large files. Plain
HTTP goes through the standard library: 0.9 s of CPU time for 2 GB, huggingface_hub's own client takes 9 s. Nothing here
ever gives a file its final name: bytes go to ``Order.part``, and only their hash comes back.
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import ssl
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bootstrap import hub
from bootstrap.outcome import AccessError
from bootstrap.worker import Tell, serve

RECEIVE = 256 * 1024  # bytes of one read from the wire at most
BLOCK = 16 * 1024 * 1024  # bytes of one read from the disk
FLUSH_EVERY = 256 * 1024 * 1024  # bytes: the disk works while the wire does, and the last flush is short
TELL_EVERY = 64 * 1024 * 1024  # bytes hashed between two signs of life
QUIET_LIMIT = 15.0  # seconds without a byte, after which the connection is given up and opened anew
# What hf_xet raises of the network, its servers, an expired login of its own, and a full disk.
XET_ERRORS = (RuntimeError, ValueError, PermissionError, FileNotFoundError, ConnectionError, TimeoutError)
XET = ".xet"  # after the name of a partial file
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Order:
    """One file to bring. Of the hub (``repo``, ``commit``, ``path``) or at ``url``."""

    part: str  # where its bytes go; what lies there already is gone on with
    size: int | None = None  # bytes; None where only the server knows
    sha256: str | None = None
    blob: str | None = None  # git's id of a small file, instead of a sha256
    repo: str = ""
    kind: str = "model"  # or dataset
    commit: str = ""
    path: str = ""
    url: str = ""
    most: int | None = None  # bytes at a url; a larger file is refused
    plain: bool = False  # HTTP even where the hub offers Xet


class DamagedError(Exception):
    """What arrived is not what was announced. ``from_start``: nothing older than this transfer is in it."""

    def __init__(self, from_start: bool):
        super().__init__("other bytes than announced")
        self.from_start = from_start


class BrokenOffError(ConnectionError):
    """The connection ended before the file did."""


class VolumeError(OSError):
    """Reading or writing the volume failed, not the network. ``errno`` says how."""


@contextmanager
def _on_volume() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise VolumeError(error.errno, error.strerror or str(error)) from error


class _Sums:
    """The hash of a file whose bytes pass by: sha256, and the git blob's sha1 where the hub knows no other."""

    def __init__(self, order: Order):
        self.order = order
        self.sha256 = hashlib.sha256()
        self.sha1 = hashlib.sha1(f"blob {order.size}\0".encode(), usedforsecurity=False)
        self.size = 0

    def update(self, block: bytes) -> None:
        self.sha256.update(block)
        if self.order.blob and not self.order.sha256:
            self.sha1.update(block)
        self.size += len(block)

    def right(self) -> bool:
        if self.order.size is not None and self.size != self.order.size:
            return False
        if self.order.sha256:
            return self.sha256.hexdigest() == self.order.sha256
        return not self.order.blob or self.sha1.hexdigest() == self.order.blob


def hash_file(path: Path, order: Order, tell: Tell) -> str | None:
    """The sha256 of ``path`` where it is what ``order`` announces, else None. Raises VolumeError."""
    sums = _Sums(order)
    with _on_volume(), path.open("rb", buffering=0) as file:
        _hash_some(file, sums, None, tell)
    return sums.sha256.hexdigest() if sums.right() else None


def _hash_some(file: Any, sums: _Sums, limit: int | None, tell: Tell) -> None:
    told = 0
    while block := file.read(BLOCK if limit is None else min(BLOCK, limit - sums.size)):
        sums.update(block)
        if sums.size - told >= TELL_EVERY:
            told = sums.size
            tell(checked=told)


class _Partial:
    """A partial file that grows: bytes are written at once, hashed on a second thread and flushed on a third."""

    def __init__(self, order: Order, tell: Tell):
        self.order, self.tell = order, tell
        self.begun_at = 0  # bytes that an earlier transfer left
        self.sums = _Sums(order)
        self._blocks: queue.Queue[bytes | None] = queue.Queue(64)
        self._flushed, self._wake, self._over = 0, threading.Event(), False
        with _on_volume():
            self._file = os.open(order.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._hash, self._flush)]
        self._trouble: list[OSError] = []

    def take_up(self) -> int:
        """Hashes what is there; gives its size, where the transfer goes on. What is too long is begun anew."""
        with _on_volume():
            there = os.fstat(self._file).st_size
            if self.order.size is not None and there > self.order.size:
                there = 0
            os.ftruncate(self._file, there)
            with open(self._file, "rb", buffering=0, closefd=False) as file:
                _hash_some(file, self.sums, there, self.tell)
        self.begun_at = self.sums.size
        return self.begun_at

    def start_over(self) -> None:
        with _on_volume():
            os.ftruncate(self._file, 0)
        self.sums, self.begun_at = _Sums(self.order), 0

    def receive(self, blocks: Iterator[bytes]) -> None:
        position = self.sums.size
        for thread in self._threads:
            thread.start()
        try:
            for block in blocks:
                self._write(block, position)
                position += len(block)
                self._blocks.put(block)
                self.tell(bytes=position)
                if position - self._flushed >= FLUSH_EVERY:
                    self._wake.set()
        finally:
            self._blocks.put(None)
            self._threads[0].join()

    def _write(self, block: bytes, position: int) -> None:
        if self._trouble:
            raise VolumeError(self._trouble[0].errno, self._trouble[0].strerror)
        with _on_volume():
            view = memoryview(block)
            while view:
                count = os.pwrite(self._file, view, position)
                view, position = view[count:], position + count

    def _hash(self) -> None:
        while (block := self._blocks.get()) is not None:
            self.sums.update(block)

    def _flush(self) -> None:
        while self._wake.wait() and not self._over:
            self._wake.clear()
            self._flushed = self.sums.size
            try:
                os.fdatasync(self._file)
            except OSError as error:
                self._trouble.append(error)

    def close(self, flush: bool) -> None:
        self._over = True
        self._wake.set()
        if self._threads[1].is_alive():
            self._threads[1].join()
        try:
            if self._trouble:  # the kernel tells of lost bytes once, and then no more
                raise VolumeError(self._trouble[0].errno, self._trouble[0].strerror)
            if flush:
                self.tell(flushing=True)
                with _on_volume():
                    os.fsync(self._file)
        finally:
            os.close(self._file)


def receive(order: Order, token: str | None, tell: Tell) -> str:
    """Brings one file to ``order.part``; gives its sha256 once every byte is there, right and flushed.

    Raises DamagedError where it is not right (nothing is left of it), VolumeError, and whatever the network does.
    """
    url, headers, xet = _locate(order, token)
    if xet is not None:
        return _by_xet(order, xet, headers, tell)
    partial = _Partial(order, tell)
    whole = False
    try:
        there = partial.take_up()
        if order.size is None or there < order.size:
            _by_http(order, url, headers, there, partial)
        whole = partial.sums.right()
    finally:
        partial.close(flush=whole)
    if not whole:
        Path(order.part).unlink(missing_ok=True)
        raise DamagedError(from_start=partial.begun_at == 0)
    return partial.sums.sha256.hexdigest()


def _locate(order: Order, token: str | None) -> tuple[str, dict[str, str], Any]:
    """The address of the bytes, the headers that it needs, and how Xet knows the file, where it does and is wanted."""
    if order.url:
        if urlsplit(order.url).scheme not in ("http", "https"):
            raise AccessError(f"{hub.shown_address(order.url)} is no address that begins with https:// or http://.")
        return order.url, {}, None
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._runtime import is_xet_available

    url = hf_hub_url(order.repo, order.path, repo_type=order.kind, revision=order.commit)
    headers = build_hf_headers(token=token or False)
    found = get_hf_file_metadata(url, token=token or False)
    if found.xet_file_data and not order.plain and is_xet_available():
        return url, headers, found.xet_file_data
    # Another host is the hub's store behind an address that is signed: it needs no token and gets none.
    same = urlsplit(found.location)[:2] == urlsplit(url)[:2]
    return found.location, headers if same else {}, None


# ---- plain HTTP


def _by_http(order: Order, url: str, headers: dict[str, str], there: int, partial: _Partial) -> None:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", "User-Agent": "fluxpod"})
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    note = Path(f"{order.part}.tag")  # of a file whose content nothing announces: what the server called it
    if there:
        request.add_header("Range", f"bytes={there}-")
        if order.url:
            request.add_header("If-Range", note.read_text() if note.exists() else '"none"')
    with _opened(request, order) as response:
        announced = _announced(response, there)
        if there and response.status != 206:
            partial.start_over()  # it sends the file from its beginning
        if order.url and (tag := response.headers.get("ETag", "")) and not tag.startswith("W/"):
            note.write_text(tag)
        _require_room_for(announced or 0, order)
        partial.tell(total=announced)
        partial.receive(_blocks(response, order, there if response.status == 206 else 0))
    if announced is not None and partial.sums.size < announced:
        raise BrokenOffError(f"ended at byte {partial.sums.size} of {announced}")
    note.unlink(missing_ok=True)


def _opened(request: urllib.request.Request, order: Order) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=QUIET_LIMIT, context=_tls())
    except urllib.error.HTTPError as error:
        if error.code == 416:  # there is no such range: what lies here is of another file
            Path(order.part).unlink(missing_ok=True)
        raise


def _announced(response: HTTPResponse, there: int) -> int | None:
    """Bytes of the whole file, as the server says. Raises BrokenOffError where it sends another range than asked."""
    length = response.headers.get("Content-Length")
    if response.status != 206:
        return int(length) if length and length.isdecimal() else None
    first, _, total = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")
    if first != str(there):
        raise BrokenOffError(f"asked for bytes from {there}, and bytes from {first or 'nowhere'} came")
    total = total.partition("/")[2]
    return int(total) if total.isdigit() else None


def _blocks(response: HTTPResponse, order: Order, there: int) -> Iterator[bytes]:
    """What arrives, as it arrives; no more than one block beyond the size, which is then plainly wrong."""
    received = 0
    while block := response.read1(RECEIVE):
        received += len(block)
        _require_room_for(there + received, order)
        yield block
        if order.size is not None and received > order.size:
            return


def _require_room_for(size: int, order: Order) -> None:
    """Raises AccessError where the file is larger than may be."""
    if order.most is not None and size > order.most:
        raise AccessError(
            f"{hub.shown_address(order.url)} is larger than {order.most / 1e9:.0f} GB, the most that is fetched."
        )


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """Trusts what this machine trusts, and what certifi lists: a slim image trusts nobody."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


# ---- Xet


class _XetBar:
    """Takes the place of huggingface_hub's progress bar and tells of bytes instead of drawing."""

    def __init__(self, tell: Tell):
        self.tell, self.total, self.received, self.written = tell, 0, 0, 0

    def update(self, count: float | None = 1) -> None:
        self.written += int(count or 0)
        self.tell(bytes=self.written, moved=self.received + self.written)

    def update_transfer(self, count: float) -> None:
        self.received += int(count)
        self.tell(bytes=self.written, moved=self.received + self.written)

    def set_postfix_str(self, *_: object, **__: object) -> None:
        """A rate, which the one who watches several transfers knows better."""

    set_transfer_postfix_str = set_postfix_str


def _by_xet(order: Order, xet: Any, headers: dict[str, str], tell: Tell) -> str:
    """Xet writes its parts in any order: nothing of a broken transfer can be gone on with, so it has another name."""
    from huggingface_hub.file_download import xet_get

    part, bar = Path(f"{order.part}{XET}"), _XetBar(tell)
    with _on_volume():
        part.unlink(missing_ok=True)
    try:
        xet_get(incomplete_path=part, xet_file_data=xet, headers=headers, expected_size=order.size, _tqdm_bar=bar)
    except XET_ERRORS as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise BrokenOffError(f"Xet: {hub.without_signatures(str(error))}") from error
    sha256 = hash_file(part, order, tell)
    if sha256 is None:
        part.unlink(missing_ok=True)
        raise DamagedError(from_start=True)
    tell(flushing=True)
    with _on_volume(), part.open("rb+") as file:
        os.fsync(file.fileno())
        part.replace(order.part)
    return sha256


# ---- the process


def _answer(request: dict[str, Any], token: str | None, tell: Tell) -> dict[str, Any]:
    """What became of one request: {"listed"}, {"done"}, or {"failed": kind, "message": ...}."""
    try:
        if "list" in request:
            commit, files = hub.list_files(**request["list"], token=token)
            return {"listed": [commit, [vars(file) for file in files]]}
        order = Order(**request["get"])
        return {"done": receive(order, token, tell)}
    except Exception as error:
        return {"failed": "", **_told(error, request, token)}


def _told(error: Exception, request: dict[str, Any], token: str | None) -> dict[str, Any]:
    """What a failure is: access (asking again changes nothing), passing, damaged, full, volume, fault (ours)."""
    if isinstance(error, DamagedError):
        return {"failed": "damaged", "from_start": error.from_start, "message": str(error)}
    if isinstance(error, VolumeError):
        return {"failed": "full" if error.errno in FULL else "volume", "message": error.strerror}
    if isinstance(error, AccessError):
        return {"failed": "access", "message": str(error)}
    what = request.get("list") or request["get"]
    shown = (
        hub.shown_address(what["url"])
        if what.get("url")
        else f"{what['path']} of {what['repo']}"
        if "path" in what
        else what["repo"]
    )
    explained = (
        None
        if what.get("url")
        else hub.explain(error, what["repo"], what.get("revision") or what["commit"], token, what["kind"])
    )
    if explained:
        kind, message = "passing" if hub.is_passing(error) else "access", explained
    elif isinstance(error, urllib.error.HTTPError) and what.get("url"):
        kind, message = _told_of_status(error.code, shown)
    elif isinstance(error, urllib.error.HTTPError):  # the store behind the hub; its addresses are good for an hour
        kind, message = "passing", f"The hub's store did not give {shown} (status {error.code})."
    elif what.get("url") and isinstance(error, (InvalidURL, ValueError)) and not isinstance(error, OSError):
        # Without its text, which repeats the address; a certificate's error is both an OSError and a ValueError.
        kind, message = "access", f"{shown} is malformed, or leads on to an address that is. Check the address."
    elif isinstance(error, (OSError, HTTPException)):
        kind, message = "passing", f"{shown}: {getattr(error, 'reason', None) or error or type(error).__name__}."
    else:
        traceback.print_exception(error)
        kind, message = "fault", f"{shown}: {type(error).__name__}: {error}"
    return {"failed": kind, "message": hub.without_token(message, token), "after": hub.retry_after(error)}


def _told_of_status(code: int, shown: str) -> tuple[str, str]:
    if code in (408, 416, 429) or code >= 500:
        return "passing", f"{shown} is not given for now (status {code})."
    if code in (401, 403):
        return "access", f"{shown} asks for a login (status {code}). Give an address that anyone may read."
    if code in (404, 410):
        return "access", f"{shown} is not there (status {code}). Check the address."
    return "access", f"{shown} was refused (status {code})."


def _get_ready() -> None:
    import huggingface_hub.file_download
    import huggingface_hub.hf_api  # noqa: F401


if __name__ == "__main__":
    serve(_answer, _get_ready)
