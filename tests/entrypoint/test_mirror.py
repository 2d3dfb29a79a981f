"""What of a run is passed on to Weights & Biases, once each, and that nothing of it reaches a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from bootstrap.run_file import RunFile
from bootstrap.validation import Round
from bootstrap.volume import RunFolder, read_json
from entrypoint import mirror as mirroring
from entrypoint.mirror import Mirror, Position, inode_of, mirror, mirrored, settings_of
from tests.runs import make_job, make_run
from trainer.metrics import cut_after

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    run = make_run(tmp_path, make_job(notify={"ntfy": "https://ntfy.sh/secret"}))
    run.write(())
    return run


@dataclass
class There:
    """A run at W&B."""

    lines: list[Mapping[str, Any]] = field(default_factory=list)

    def mirror(self, run: RunFile, start: int = 0, **keys: Any) -> Mirror:
        position = Position.read(replace(run, job=make_job(**keys)), start)
        stale = inode_of(run.folder.metrics)
        return Mirror(run.folder, position, self.lines.append, lambda path: path.name, stale)

    @property
    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines]


def begin_trainer(folder: RunFolder, start: int) -> None:
    """What it does first of all with the metrics."""
    cut_after(folder.metrics, start)


def add_steps(folder: RunFolder, *steps: int) -> None:
    with folder.metrics.open("a") as file:
        for step in steps:
            line = {"step": step, "loss": step / 10, "loss_by_level": [0.5, None, None, 1.0], "memory_gib": [4.0, 5.0]}
            line["images_by_level"] = [1.0, 0.0, 0.0, 3.0]
            file.write(json.dumps(line) + "\n")


def test_steps_rounds_and_samples_are_passed_on_once(run: RunFile) -> None:
    there, folder = There(), run.folder
    passing = there.mirror(run)
    passing.pass_on()
    assert there.lines == []
    add_steps(folder, 1, 2)
    folder.samples.mkdir()
    (folder.samples / "step-000002-00.png").touch()
    folder.validation.write_text(Round(2, 0.5, (0.5, None, 0.25, 0.75), (), (), "a", 1.0).line())
    passing.pass_on()
    passing.pass_on()
    assert there.lines == [
        {"step": 1, "train/loss": 0.1} | LISTS,
        {"step": 2, "train/loss": 0.2} | LISTS,
        {
            "step": 2,
            "validation/loss": 0.5,
            "validation/loss/0.00-0.25": 0.5,
            "validation/loss/0.50-0.75": 0.25,
            "validation/loss/0.75-1.00": 0.75,
        },
        {"step": 2, "samples/00": "step-000002-00.png"},
    ]


LISTS = {
    "train/loss_by_level/0.00-0.25": 0.5,
    "train/loss_by_level/0.75-1.00": 1.0,
    "train/memory_gib/gpu-0": 4.0,
    "train/memory_gib/gpu-1": 5.0,
}


def test_a_run_that_goes_on_is_the_same_run_there_and_repeats_nothing(run: RunFile) -> None:
    there, folder = There(), run.folder
    first = there.mirror(run)
    add_steps(folder, 1, 2, 3)
    first.pass_on()
    again = there.mirror(run, start=2, save={"every": 7})  # killed; going on at 2
    assert again.position.id == first.position.id
    begin_trainer(folder, 2)
    add_steps(folder, 3, 4)
    again.pass_on()
    assert there.steps == [1, 2, 3, 4]
    assert there.mirror(run, start=4, learning_rate=3e-5).position.id == first.position.id  # nothing is done twice


def test_steps_that_an_edited_job_does_again_are_another_run_there(run: RunFile) -> None:
    there, folder = There(), run.folder
    first = there.mirror(run)
    add_steps(folder, 1, 2, 3)
    first.pass_on()
    edited: dict[str, Any] = {"start": 2, "learning_rate": 3e-5}
    branch = there.mirror(run, **edited)
    assert (branch.position.id != first.position.id, branch.position.branch) == (True, 2)
    branch.pass_on()
    assert there.steps == [1, 2, 3]  # step 3 is still that of the old job
    begin_trainer(folder, 2)
    add_steps(folder, 3)
    branch.pass_on()
    assert there.steps == [1, 2, 3, 1, 2, 3]
    assert there.mirror(run, **edited).position == branch.position  # killed before it saved


def test_a_line_that_branches_off_is_another_run_there(run: RunFile) -> None:
    there, folder = There(), run.folder
    first = there.mirror(run)
    add_steps(folder, 1, 2, 3)
    first.pass_on()
    branch = there.mirror(run, start=1, resume_from=1)
    assert branch.position.id != first.position.id
    assert branch.position.branch == 1
    begin_trainer(folder, 1)
    branch.pass_on()
    assert there.steps == [1, 2, 3, 1]
    assert there.mirror(run, start=1, resume_from=1).position == branch.position


def test_damaged_lines_are_passed_over(run: RunFile) -> None:
    there = There()
    run.folder.metrics.write_text('{"step": "x"}\n[]\nnonsense\n{"step": 1, "loss": 0.5}\n{"step": 2')
    run.folder.validation.write_text('{"step": 1}\n')
    run.folder.wandb_position.write_text('{"id": 1}')
    passing = there.mirror(run)
    passing.stale = 0
    passing.pass_on()
    assert there.lines == [{"step": 1, "train/loss": 0.5}]


def test_no_address_goes_there(run: RunFile) -> None:
    links = [{"path": "https://example.org/a.zip?token=secret"}]
    run = replace(run, job=make_job(notify={"ntfy": "https://ntfy.sh/secret"}, datasets=links))
    assert "secret" not in json.dumps(settings_of(run))


def test_a_refusal_is_told_and_tried_again(run: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    tried: list[int] = []

    def refuses(*_: Any) -> None:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("API key\nis wrong")

    monkeypatch.setattr(mirroring, "_mirror", refuses)
    monkeypatch.setattr(mirroring, "AGAIN", 0.01)
    mirror(run, Event(), told.append)
    assert len(tried) == 3
    assert told[0].startswith("wandb: API key is wrong. Training goes on; ")


def test_without_a_key_nothing_is_started(run: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with mirrored(run, {}, lambda: False):
        pass


def test_what_hangs_is_left_alone(run: RunFile, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """W&B never answers: the training ends when it ends."""
    monkeypatch.setattr(mirroring, "LAST_WORDS", 0.2)
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    begin = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: begin(hangs, **how))
    begun = time.monotonic()
    with mirrored(run, os.environ | {"WANDB_API_KEY": SECRET}, lambda: False):
        pass
    assert time.monotonic() - begun < 30
    assert "passed on at the next start" in capfd.readouterr().out


def test_the_real_library_keeps_a_run_and_no_secret(run: RunFile) -> None:
    """Offline, as WANDB_MODE asks: everything lies in the run's folder, to be sent by `wandb sync`."""
    add_steps(run.folder, 1, 2)
    environ = os.environ | {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline", "HF_TOKEN": "hf_secret"}
    with mirrored(run, environ, lambda: False):
        deadline = time.monotonic() + 60
        while not (kept := list(run.folder.wandb.rglob("run-*.wandb"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        begin_trainer(run.folder, 2)
        add_steps(run.folder, 3)
    (file,) = kept
    position = read_json(run.folder.wandb_position)
    assert position["step"] == 3
    assert position["id"] in file.name
    assert "wandb: offline, in" in run.folder.log.read_text()
    everything = b"".join(path.read_bytes() for path in run.folder.root.rglob("*") if path.is_file())
    assert b"train/loss" in everything
    assert SECRET.encode() not in everything
    assert b"hf_secret" not in everything
