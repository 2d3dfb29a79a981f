"""TensorBoard behind the page: for those with the password, of the runs on the volume."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from torch.utils.tensorboard import SummaryWriter

from bootstrap.volume import Volume
from entrypoint import curves
from entrypoint.curves import Curves
from entrypoint.page import make_page

AUTH = (b"", b"secret")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[TestClient]:
    volume = Volume(tmp_path)
    writer = SummaryWriter(str(volume.run("flowers").tensorboard))
    writer.add_scalar("train/loss", 0.5, 1)
    writer.close()
    with TestClient(make_page(volume, os.environ | {"FLUXPOD_PASSWORD": "secret"}, tmp_path)) as client:
        yield client


def test_runs_are_shown_to_those_with_the_password(page: TestClient) -> None:
    assert page.get("/tensorboard/").status_code == 401
    assert page.post("/tensorboard/data/plugin/scalars/scalars_multirun").status_code == 401
    answer = page.get("/tensorboard/", auth=AUTH)
    assert answer.status_code == 200
    assert "<title>TensorBoard</title>" in answer.text
    assert answer.headers["content-security-policy"]
    assert json.loads(page.get("/tensorboard/data/runs", auth=AUTH).text) in (["flowers/tensorboard"], [])
    assert page.get("/tensorboard/nothing", auth=AUTH).status_code == 404
    assert page.delete("/tensorboard/", auth=AUTH).status_code == 405
    assert page.get("/tensorboard", auth=AUTH, follow_redirects=False).headers["location"].endswith("/tensorboard/")


def test_what_does_not_come_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: begin(["false"], **how))
    found = Curves(tmp_path, {}).ask("GET", "/tensorboard/", {}, b"")
    assert (found.status, found.body) == (
        503,
        b"TensorBoard does not answer (it ended at once, with code 1). Reload this page in a minute.\n",
    )
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: begin(["sleep", "60"], **how))
    monkeypatch.setattr(curves, "START_LIMIT", 0.2)
    slow = Curves(tmp_path, {})
    assert b"not up after" in slow.ask("GET", "/tensorboard/", {}, b"").body
    slow.close()
    Curves(tmp_path, {}).close()
