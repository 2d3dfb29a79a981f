"""The page: nothing of the volume without the password, and runs, warnings and odd names with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bootstrap.volume import Volume, write_json
from entrypoint.page import NO_PASSWORD, make_page
from entrypoint.status import Figures, StatusFile
from entrypoint.when_done import StillBilling, banner_path

PASSWORD = "pässword with: a colon"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path)
    StatusFile(volume.run("flowers").status).tell("training", "<b>loss</b> & more", step=7, steps=20)
    (volume.runs / "damaged").mkdir()
    (volume.runs / "damaged" / "status.json").write_text("{")
    (volume.runs / "file").touch()
    return volume


def client(volume: Volume, environ: dict[str, str], notes: str = "[]") -> TestClient:
    (volume.root / "notes.json").write_text(notes)
    return TestClient(make_page(volume, environ, volume.root))


@pytest.mark.parametrize("name", ["FLUXPOD_PASSWORD", "JUPYTER_PASSWORD"])
def test_the_password_opens_the_page(volume: Volume, name: str) -> None:
    page = client(volume, {name: PASSWORD})
    answer = page.get("/", auth=(b"anyone", PASSWORD.encode()))
    assert answer.status_code == 200
    assert "flowers" in answer.text
    assert "7/20" in answer.text
    assert "&lt;b&gt;loss&lt;/b&gt; &amp; more" in answer.text
    assert "damaged" not in answer.text


@pytest.mark.parametrize("header", [None, "Basic", "Basic !!", "Basic YTpi", "Basic /////w==", "Bearer x", "Basic é"])
def test_anything_else_opens_nothing(volume: Volume, header: str | None) -> None:
    page = client(volume, {"FLUXPOD_PASSWORD": PASSWORD})
    answer = page.get("/", headers={"Authorization": header.encode()} if header else {})
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic")
    assert "flowers" not in answer.text


def test_the_pages_own_password_comes_first(volume: Volume) -> None:
    page = client(volume, {"FLUXPOD_PASSWORD": "page", "JUPYTER_PASSWORD": "jupyter"})
    assert page.get("/", auth=("", "page")).status_code == 200
    assert page.get("/", auth=("", "jupyter")).status_code == 401


@pytest.mark.parametrize("environ", [{}, {"FLUXPOD_PASSWORD": "", "JUPYTER_PASSWORD": ""}])
def test_without_a_password_there_is_no_data(volume: Volume, environ: dict[str, str]) -> None:
    for auth in (None, ("", "")):
        answer = client(volume, environ).get("/", auth=auth)
        assert answer.text == NO_PASSWORD


def test_health_needs_no_password(volume: Volume) -> None:
    assert client(volume, {"FLUXPOD_PASSWORD": PASSWORD}).get("/health").text == "ok\n"


def test_warnings_come_first(volume: Volume) -> None:
    for pod in ("mine", "another"):  # on one volume
        banner = StillBilling(f"RunPod said <no> to {pod}", pod, "flowers", "stop", "today")
        write_json(banner_path(volume, {"RUNPOD_POD_ID": pod}), asdict(banner))
    (volume.root / "pod.json").write_text('["GPUs: none"]')
    environ = {"FLUXPOD_PASSWORD": "p", "RUNPOD_POD_ID": "mine"}
    text = client(volume, environ, '["HF_TOKEN is literally ..."]').get("/", auth=("", "p")).text
    assert "STILL BILLING: RunPod said &lt;no&gt; to mine" in text
    assert "another" not in text
    assert "GPUs: none" in text
    assert (
        text.index("STILL BILLING") < text.index("nothing is mounted") < text.index("HF_TOKEN") < text.index("flowers")
    )


@pytest.mark.parametrize("notes", ["", "{", "{}", "null"])
def test_a_page_without_anything(tmp_path: Path, notes: str) -> None:
    answer = client(Volume(tmp_path), {"FLUXPOD_PASSWORD": "p"}, notes).get("/", auth=("", "p"))
    assert answer.status_code == 200
    assert "No run yet" in answer.text


def test_figures_of_a_training(volume: Volume) -> None:
    status = StatusFile(volume.run("flowers").status)
    figures = Figures(0.43214, 2.0, 3725.0, "validation 0.4000 at step 5")
    status.tell("training", "training", step=7, steps=20, figures=figures)
    page = client(volume, {"FLUXPOD_PASSWORD": PASSWORD})
    text = page.get("/", auth=(b"", PASSWORD.encode())).text
    assert all(told in text for told in ("<td>1:02:05</td>", "<td>0.4321</td>", "validation 0.4000 at step 5"))
