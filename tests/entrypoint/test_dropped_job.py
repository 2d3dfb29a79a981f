from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bootstrap.volume import Volume
from entrypoint import dropped_job
from entrypoint.dropped_job import VARIABLE, Delivery, DroppedJobError, drop_job

JOB = "name: flowers\nbase: flux-tiny\nmethod: lora\ndatasets:\n  - path: datasets/flowers\n"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path)
    volume.create()
    return volume


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.startswith("/job.yaml") else 404)
            self.end_headers()
            self.wfile.write(JOB.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize("encode", [str, lambda text: base64.b64encode(text.encode()).decode()])
def test_yaml_and_base64_become_a_job_file(volume: Volume, encode: object) -> None:
    assert callable(encode)
    assert "flowers.yaml" in drop_job(volume, {VARIABLE: encode(JOB)})
    assert (volume.jobs / "flowers.yaml").read_text(encoding="utf-8").strip() == JOB.strip()


def test_an_address_is_fetched(volume: Volume, server: str) -> None:
    drop_job(volume, {VARIABLE: f"{server}/job.yaml?token=abc"})
    assert (volume.jobs / "flowers.yaml").read_text(encoding="utf-8") == JOB


def test_a_restart_leaves_the_edited_file_alone(volume: Volume) -> None:
    drop_job(volume, {VARIABLE: JOB})
    file = volume.jobs / "flowers.yaml"
    file.write_text(JOB + "steps: 5\n", encoding="utf-8")
    assert drop_job(volume, {VARIABLE: JOB}) == ""
    assert "steps: 5" in file.read_text(encoding="utf-8")
    drop_job(volume, {VARIABLE: JOB + "steps: 9\n"})  # another value is another wish
    assert "steps: 9" in file.read_text(encoding="utf-8")


def test_two_pods_on_one_volume_each_bring_their_own_job(volume: Volume) -> None:
    other = JOB.replace("name: flowers", "name: trees")
    for value in (JOB, other):
        assert drop_job(volume, {VARIABLE: value})
    for file in volume.jobs.iterdir():
        file.unlink()  # their user has had enough of them
    for value in (JOB, other):  # both pods are restarted
        assert drop_job(volume, {VARIABLE: value}) == ""
    assert not list(volume.jobs.iterdir())


def test_an_address_that_does_not_answer_is_asked_again(
    volume: Volume, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            environment[VARIABLE] = f"{server}/job.yaml"  # it answers at last

    monkeypatch.setattr(dropped_job.time, "sleep", sleep)
    environment = {VARIABLE: f"{server}/none?token=secret"}
    delivery = Delivery(volume, environment)
    delivery.run()
    assert waits == [30, 60, 300, 300]
    assert (volume.jobs / "flowers.yaml").exists()
    assert delivery.tried.is_set()
    assert "secret" not in capsys.readouterr().out


@pytest.mark.parametrize("value", ["abc", "http://[", "http://x:port/y", "http://exämple.invalid:99999/ä ö"])
def test_what_will_never_be_a_job_is_told_once(
    volume: Volume, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dropped_job.time, "sleep", lambda seconds: pytest.fail("waits"))
    Delivery(volume, {VARIABLE: value}).run()
    assert VARIABLE in capsys.readouterr().out


def test_nothing_set_is_nothing_done(volume: Volume) -> None:
    assert drop_job(volume, {}) == ""
    assert drop_job(volume, {VARIABLE: "  "}) == ""
    assert not list(volume.jobs.iterdir())


def test_a_wrong_job_still_becomes_a_file_whose_problems_are_told(volume: Volume) -> None:
    drop_job(volume, {VARIABLE: "name: [\n"})
    assert (volume.jobs / "from-environment.yaml").exists()


def test_what_is_no_job_is_said(volume: Volume, server: str) -> None:
    with pytest.raises(DroppedJobError, match="neither YAML, nor base64"):
        drop_job(volume, {VARIABLE: "abc"})
    with pytest.raises(DroppedJobError, match="cannot be fetched") as error:
        drop_job(volume, {VARIABLE: f"{server}/none?token=secret"})
    assert "secret" not in str(error.value)
