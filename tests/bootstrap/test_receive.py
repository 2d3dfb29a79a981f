"""One file to the volume: what the volume refuses, and what Xet is asked and tells."""

from __future__ import annotations

import errno
import inspect
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap import receive
from bootstrap.outcome import AccessError, PodError
from bootstrap.receive import Order, VolumeError
from bootstrap.transfers import Patience, Transfers, _Task
from tests.loopback_hub import LoopbackHub, Repo


@pytest.fixture
def order(hub: LoopbackHub, tmp_path: Path) -> Order:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "file").write_bytes(os.urandom(3_000_000))
    hub.repos["a/b"] = Repo(tmp_path / "repo")
    return Order(str(tmp_path / "part"), size=3_000_000, url=f"{hub.endpoint}/cdn/a/b/file")


def events() -> tuple[list[dict[str, Any]], receive.Tell]:
    heard: list[dict[str, Any]] = []
    return heard, lambda **event: heard.append(event)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "volume"), (errno.EROFS, "volume")]
)
def test_a_volume_that_refuses(number: int, kind: str, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(VolumeError) as caught:
        receive.receive(order, None, lambda **_: None)
    told = receive._told(caught.value, {"get": vars(order)}, None)
    assert told == {"failed": kind, "message": os.strerror(number)}


def test_lost_writes_are_noticed_when_they_are_flushed(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells once that bytes of an earlier write did not arrive."""

    told = []

    def lose(_: int) -> None:
        told.append(1)
        if len(told) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(receive, "FLUSH_EVERY", 100_000)
    monkeypatch.setattr(os, "fdatasync", lose)
    monkeypatch.setattr(os, "fsync", lose)  # a busy machine may not get to flush before
    with pytest.raises(VolumeError, match="Input/output error"):
        receive.receive(order, None, lambda **_: None)


@pytest.mark.parametrize("path", ["Blüten.zip?sig=SECRET", "my pics.zip?sig=SECRET"])
def test_an_address_that_no_request_can_hold(path: str, tmp_path: Path) -> None:
    """A share may lead on to one. Asking again is in vain, and the address is as good as a password."""
    request = {"get": {"part": str(tmp_path / "part"), "url": f"http://127.0.0.1:9/{path}"}}
    answer = receive._answer(request, None, lambda **_: None)
    assert answer["failed"] == "access"
    assert "is malformed" in answer["message"]
    assert "SECRET" not in str(answer)


def failing(order: Order, waits: tuple[float, ...]) -> tuple[Transfers, _Task, list[str]]:
    lines: list[str] = []
    task = _Task({"get": vars(order) | {}}, "file", size=3_000_000)
    return Transfers(None, lines.append, lambda: None, Patience(waits=waits)), task, lines


def test_a_full_volume_is_told_with_what_to_do(order: Order) -> None:
    transfers, task, _ = failing(order, ())
    with pytest.raises(PodError, match=r"the volume is full \(Disk quota exceeded\).*Make the volume larger"):
        transfers._fail(task, {"failed": "full", "message": "Disk quota exceeded"})


def test_input_output_errors_are_tried_again_from_the_beginning_and_then_the_pods(order: Order) -> None:
    transfers, task, lines = failing(order, (0.0, 0.0))
    Path(order.part).write_bytes(b"what may be wrong")
    for _ in range(2):
        transfers._fail(task, {"failed": "volume", "message": "Input/output error"})
    assert not Path(order.part).exists()
    assert "cannot be written to the volume: Input/output error. Trying again" in lines[0]
    with pytest.raises(PodError, match="cannot be written"):
        transfers._fail(task, {"failed": "volume", "message": "Input/output error"})


def test_a_volume_that_lets_nothing_be_removed_is_tried_again(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    transfers, task, lines = failing(order, (0.0,))
    monkeypatch.setattr(Path, "unlink", refuse)
    transfers._fail(task, {"failed": "volume", "message": "Read-only file system"})
    assert "Read-only file system. Trying again" in lines[0]


def test_after_two_failures_it_is_plain_http_and_then_it_is_over(order: Order) -> None:
    transfers, task, _ = failing(order, (0.0, 0.0, 0.0))
    plain = []
    for _ in range(3):
        transfers._fail(task, {"failed": "passing", "message": "stalled"})
        plain.append(task.request["get"]["plain"])
    assert plain == [False, True, True]
    with pytest.raises(AccessError, match="stalled"):
        transfers._fail(task, {"failed": "passing", "message": "stalled"})


def test_a_hub_that_asks_to_wait_is_heard_within_reason(order: Order) -> None:
    transfers, task, lines = failing(order, (1.0, 1.0))
    transfers._fail(task, {"failed": "passing", "message": "busy (429).", "after": 40.0})
    transfers._fail(task, {"failed": "passing", "message": "still busy (429).", "after": 1e6})
    assert [line.rpartition(". ")[2].strip() for line in lines] == ["Trying again in 40 s.", "Trying again in 300 s."]


def test_xet_is_asked_as_huggingface_hub_wants_it() -> None:
    from huggingface_hub.file_download import xet_get

    asked = {"incomplete_path", "xet_file_data", "headers", "expected_size", "_tqdm_bar"}
    assert asked <= set(inspect.signature(xet_get).parameters)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, PermissionError])
def test_xet_that_fails_is_tried_again(
    error: type[Exception], order: Order, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*, incomplete_path: Path, **_: object) -> None:
        incomplete_path.write_bytes(b"some")
        raise error("sending for url (https://xet.example/x?sig=SECRET) failed")

    monkeypatch.setattr("huggingface_hub.file_download.xet_get", fail)
    monkeypatch.setattr(receive, "_locate", lambda *_: ("", {}, object()))
    request = {"get": vars(replace(order, url="", repo="a/b", commit="c", path="file"))}
    answer = receive._answer(request, None, lambda **_: None)
    assert answer["failed"] == "passing"
    assert "file of a/b: Xet: sending for url (https://xet.example/x?..." in answer["message"]
    assert "SECRET" not in f"{answer}{capfd.readouterr()}"
    assert list(Path(order.part).parent.glob("part*")) == []


def test_xet_tells_of_its_bytes_through_our_bar() -> None:
    from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

    heard, tell = events()
    bar: Any = receive._XetBar(tell)
    with XetDownloadProgressReporter(
        reconstruction_desc="x", total=10, log_level=20, external_reconstruction_bar=bar
    ) as reporter:
        report = SimpleNamespace(
            total_bytes=10,
            total_bytes_completed=4,
            total_transfer_bytes_completed=6,
            total_bytes_completion_rate=1.0,
            total_transfer_bytes_completion_rate=1.0,
        )
        reporter.update_progress(report)
    assert heard == [{"bytes": 4, "moved": 4}, {"bytes": 4, "moved": 10}]
