"""A Hugging Face hub on the loopback, for as much of its protocol as fetches and uploads use, and its faults.

Point HF_ENDPOINT at ``hub.endpoint`` before huggingface_hub is imported, that is, in a process started for the purpose.
Every request is kept in ``hub.requests``; the bytes of large files come from another path, as from the hub's CDN.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests import loopback_uploads
from tests.loopback_uploads import Store

LFS_FROM = 100_000  # bytes; larger files are LFS objects, as .safetensors are on the hub


@dataclass
class Repo:
    """One repository with one commit, served from a folder."""

    folder: Path
    commit: str = "c0ffee" + "0" * 34
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    readers: tuple[str, ...] = ()  # tokens whose accounts accepted the licence
    private: bool = False
    card: dict[str, str] = field(default_factory=dict)  # what its README.md says of it
    wrong_sums: set[str] = field(default_factory=set)  # paths that a listing of some files shows with another checksum
    history: list[str] = field(default_factory=list)  # of commits made here, their messages
    wrong_bytes: set[str] = field(default_factory=set)  # paths whose content is served spoilt, in its right size

    def files(self) -> dict[str, Path]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in paths}


@dataclass(frozen=True)
class Fault:
    """An answer given in place of the right one to requests whose "METHOD /path" ``match``es."""

    match: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    stall: float = 0.0  # seconds of silence in mid-body, after which the connection ends
    cut: bool = False  # the connection ends in mid-body
    share: float = 1 / 3  # of the body that comes before
    spoil: bool = False  # a byte of the body is another
    whole: bool = False  # 200 and the whole file where a range was asked
    rate: float = 0.0  # bytes a second


class LoopbackHub:
    """A context manager. ``tokens`` are those the hub knows; one it does not know is refused with 401."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: set[str] = set()
        self.restricted: set[str] = set()  # valid tokens without the right to read gated repositories
        self.accounts: dict[str, Any] = {}  # by token: see loopback_uploads.account
        self.store = Store()
        self.xet = ""  # the address that is told to those who would upload by Xet; "" where there is no Xet
        self.made = Path()  # where new repositories go
        self.requests: list[str] = []
        self.ranges: list[tuple[str, str]] = []  # of requests, with the range that each asked for
        self.authorizations: set[str] = set()
        self.faults: list[tuple[Fault, list[int]]] = []
        self._counting, self.writing = threading.Lock(), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.cdn = f"http://localhost:{port}/cdn"  # another host, as on the hub: it is sent no token

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, fault: Fault, times: int = 1_000_000) -> None:
        self.faults.append((fault, [times]))

    def fault_for(self, path: str) -> Fault | None:
        with self._counting:
            for fault, left in self.faults:
                if left[0] > 0 and re.search(fault.match, path):
                    left[0] -= 1
                    return fault
        return None


Body = bytes | Path
Answer = tuple[int, dict[str, str], Body]


def _error(status: int, code: str, message: str) -> Answer:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return status, headers, json.dumps({"error": message}).encode()


def _refusal(hub: LoopbackHub, name: str, repo: Repo | None, token: str | None) -> Answer | None:
    if token is not None and token not in hub.tokens:
        return _error(401, "", "Invalid credentials in Authorization header")
    if repo is None:
        return _error(401 if token is None else 404, "RepoNotFound", "Repository not found")
    if not repo.gated or token in repo.readers:
        return None
    if token is None:
        return _error(401, "GatedRepo", f"Access to model {name} is restricted. You must have access to it.")
    if token in hub.restricted:
        return _error(403, "", "Please enable access to public gated repositories in your fine-grained token settings.")
    return _error(403, "GatedRepo", f"Access to model {name} is restricted and you are not in the authorized list.")


def _answer(hub: LoopbackHub, path: str, token: str | None) -> Answer:
    if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
        return 200, {}, _content(hub.repos[found[1]], found[2])
    if found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/auth-check", path):
        return _refusal(hub, found[1], hub.repos.get(found[1]), token) or (200, {}, b"{}")
    if found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/(revision|tree)/(.+)", path):
        repo = hub.repos.get(found[1])
        if repo is None:  # the list of a gated repository is public
            return _refusal(hub, found[1], repo, token) or (500, {}, b"")
        if found[3] not in (*repo.revisions, repo.commit):
            return _error(404, "RevisionNotFound", f"Invalid rev id: {found[3]}")
        told = listing(found[1], repo, plain=found[2] == "tree")
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
    if found := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
        return _resolve(hub, found[1], found[2], found[3], token)
    return _error(404, "", "No such page")


def listing(name: str, repo: Repo, plain: bool = False) -> Any:
    """What the hub tells of a repository: its files alone (``plain``), or all."""
    entries = [_entry(path, file) for path, file in repo.files().items()]
    if plain:  # where a large file's sha256 has another name
        return [
            {**e, "lfs": {("oid" if k == "sha256" else k): v for k, v in e["lfs"].items()}} if "lfs" in e else e
            for e in entries
        ]
    siblings = [
        {("rfilename" if k == "path" else "blobId" if k == "oid" else k): v for k, v in e.items()} for e in entries
    ]
    facts = {"id": name, "modelId": name, "sha": repo.commit, "gated": repo.gated, "private": repo.private}
    return facts | {"siblings": siblings} | ({"cardData": repo.card} if repo.card else {})


def _resolve(hub: LoopbackHub, name: str, revision: str, file: str, token: str | None) -> Answer:
    repo = hub.repos.get(name)
    if refusal := _refusal(hub, name, repo, token):
        return refusal
    assert repo is not None
    if revision not in (*repo.revisions, repo.commit):
        return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    if not (repo.folder / file).is_file():
        return _error(404, "EntryNotFound", "Entry not found")
    entry = _entry(file, repo.folder / file)
    headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
    if "lfs" not in entry:
        return 200, headers | {"ETag": f'"{entry["oid"]}"'}, _content(repo, file)
    linked = {"X-Linked-Etag": f'"{entry["lfs"]["sha256"]}"', "X-Linked-Size": str(entry["size"])}
    return 302, headers | linked | {"Location": f"{hub.cdn}/{name}/{file}"}, b""


def _content(repo: Repo, file: str) -> Body:
    path = repo.folder / file
    return _spoilt(path.read_bytes()) if file in repo.wrong_bytes else path


def _spoilt(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _entry(name: str, file: Path) -> dict[str, Any]:
    found = file.stat()
    size, blob, sha256 = _sums(file, found.st_size, found.st_mtime_ns)
    entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": blob}
    if size >= LFS_FROM:
        entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
    return entry


@lru_cache(maxsize=1000)
def _sums(file: Path, size: int, modified: int) -> tuple[int, str, str]:
    """Size, git's blob id and sha256. ``modified`` only tells an edited file from what it was."""
    sha1 = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    sha256 = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 24):
            sha256.update(block)
            if size < LFS_FROM:
                sha1.update(block)
    return size, sha1.hexdigest(), sha256.hexdigest()


def _faulty(fault: Fault | None) -> Answer | None:
    return (fault.status, fault.headers, b"{}") if fault and fault.status else None


def _read_body(handler: BaseHTTPRequestHandler, fault: Fault | None) -> bytes | None:
    """What was sent; None where the connection is to end before all of it is read."""
    size = int(handler.headers.get("Content-Length", 0))
    if fault and size and (fault.stall or fault.cut):
        handler.rfile.read(int(size * fault.share))
        time.sleep(fault.stall)
        handler.close_connection = True
        return None
    if fault and fault.rate:
        time.sleep(size / fault.rate)
    return handler.rfile.read(size)


def _handler(hub: LoopbackHub) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            hub.ranges.append((path, self.headers.get("Range", "")))
            given = self.headers.get("Authorization")
            token = given.removeprefix("Bearer ") if given else None
            if given:
                assert not path.startswith(("/cdn/", "/store/")) or path == "/store/verify", "a token went elsewhere"
                hub.authorizations.add(given)
            fault = hub.fault_for(f"{self.command} {path}")
            body = _read_body(self, fault)
            if body is None:
                return
            with hub.writing:
                told = _faulty(fault) or loopback_uploads.answer(hub, self.command, path, body, token)
            self._send(told or _answer(hub, path, token), None if body or _faulty(fault) else fault)

        do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

        def _send(self, answer: Answer, fault: Fault | None) -> None:
            status, headers, body = answer
            size = body.stat().st_size if isinstance(body, Path) else len(body)
            first, last = 0, size - 1
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted and status == 200 and not (fault and fault.whole):
                first, last = int(wanted[1]), int(wanted[2] or size - 1)
                headers = headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
                status = 206
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            self.wfile.flush()
            if self.command == "HEAD" or last < first:
                return
            with suppress(ConnectionError):
                if fault is None and isinstance(body, Path):
                    with body.open("rb") as file:
                        self.connection.sendfile(file, first, last + 1 - first)
                    return
                content = (body.read_bytes() if isinstance(body, Path) else body)[first : last + 1]
                self._send_with(fault, content)

        def _send_with(self, fault: Fault | None, content: bytes) -> None:
            if fault and fault.spoil:
                content = _spoilt(content)
            if fault and (fault.stall or fault.cut):
                self.wfile.write(content[: int(len(content) * fault.share)])
                self.wfile.flush()
                time.sleep(fault.stall)
                self.close_connection = True
            elif fault and fault.rate:
                step = max(1, int(fault.rate / 20))
                for start in range(0, len(content), step):
                    self.wfile.write(content[start : start + step])
                    time.sleep(step / fault.rate)
            else:
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet: ``requests`` holds what was asked."""

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub without repositories; processes started during the test take it for the real one."""
    with LoopbackHub() as running:
        running.made = tmp_path / "hub"
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running
