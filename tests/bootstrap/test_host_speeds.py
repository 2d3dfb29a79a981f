from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bootstrap.host_speeds import STREAMS, TRIED_FILE, download_rate, hashing_rate


class Hub(BaseHTTPRequestHandler):
    """Answers the one file, a megabyte for each stream; anything else is not there."""

    asked: list[tuple[str, str | None, str | None]]

    def do_GET(self) -> None:
        type(self).asked.append((self.path, self.headers["Range"], self.headers["Authorization"]))
        there = self.path == f"/{TRIED_FILE}"
        body = bytes(1_000_000) if there else b""
        self.send_response(206 if there else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_hashing() -> None:
    assert hashing_rate(1) > 1e6


def test_a_download_is_measured_without_an_account(hub: str) -> None:
    assert download_rate({"HF_ENDPOINT": hub, "HF_TOKEN": "hf_x"}, seconds=0.5) > 0
    assert {path for path, _, _ in Hub.asked} == {f"/{TRIED_FILE}"}
    assert len({place for _, place, _ in Hub.asked}) == STREAMS
    assert {authorization for _, _, authorization in Hub.asked} == {None}


def test_what_is_refused_is_told(hub: str) -> None:
    with pytest.raises(OSError, match="404"):
        download_rate({"HF_ENDPOINT": f"{hub}/other"}, seconds=0.1)
    with pytest.raises(OSError, match="refused"):
        download_rate({"HF_ENDPOINT": "http://127.0.0.1:1"}, seconds=0.1)
    with pytest.raises(OSError, match="unknown url type"):
        download_rate({"HF_ENDPOINT": "no address"}, seconds=0.1)
