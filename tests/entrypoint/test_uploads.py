"""Results that leave the pod: beside training, at its end, after a kill, and by hand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootstrap.outcome import ACCESS_REFUSED, DONE, JOB_WRONG, STOPPED, AccessError, Outcome
from bootstrap.run_file import RunFile
from bootstrap.transfers import Patience
from bootstrap.uploads import Record, all_uploaded
from bootstrap.volume import Volume
from entrypoint import uploads
from entrypoint.check import check
from entrypoint.launch import Stop
from entrypoint.run import run_job
from entrypoint.status import Status
from entrypoint.uploads import BackgroundUploads, upload
from jobs.load import load_job
from tests.finished_run import finish_run, save_state
from tests.loopback_hub import Fault, LoopbackHub
from tests.loopback_uploads import account

ROOT = Path(__file__).parents[2]
GOOD = "hf_good0123456789"
RESULT = "flowers.safetensors"


@pytest.fixture
def writable(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    hub.accounts, hub.tokens = {GOOD: account()}, {GOOD}
    monkeypatch.setenv("HF_TOKEN", GOOD)
    monkeypatch.setattr(uploads, "PATIENCE", Patience(waits=(0.05,)))
    monkeypatch.setattr(uploads, "BESIDE_TRAINING", Patience(waits=()))
    monkeypatch.setattr(uploads, "LOOK_EVERY", 0.05)
    return hub


def status_of(volume: Volume) -> Status:
    status = Status.read(volume.run("flowers").status)
    assert status
    return status


def wait_until(condition: Callable[[], object], limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_finished_run_is_uploaded_once(
    writable: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume, file = finish_run(tmp_path / "volume")
    assert run_job(file, volume.root, Stop()) == DONE
    files = writable.repos["me/flowers"].files()
    assert set(files) == {
        *(".gitattributes", "README.md", RESULT),
        *("samples/step-000010-00.png", "samples/step-000000-00.png"),
    }
    assert files[RESULT].read_bytes() == (volume.run("flowers").output / RESULT).read_bytes()
    assert "Trigger word: `pprflwr`" in files["README.md"].read_text()
    assert writable.repos["me/flowers"].private
    assert (status_of(volume).phase, status_of(volume).step) == ("done", 10)
    assert "sha256 verified" in volume.run("flowers").log.read_text()

    writable.requests.clear()
    assert run_job(file, volume.root, Stop()) == DONE
    assert writable.requests == []
    told = capsys.readouterr().out
    assert "is done already" in told
    for path in volume.root.rglob("*"):
        assert not path.is_file() or GOOD.encode() not in path.read_bytes()
    assert GOOD not in told


def test_what_the_hub_refuses_is_held_and_gone_on_with(
    writable: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, file = finish_run(tmp_path / "volume")
    folder = volume.run("flowers")
    writable.fail(Fault("POST .*/commit/", 403, {"X-Error-Message": "storage limit reached"}), times=1)
    assert run_job(file, volume.root, Stop()) == ACCESS_REFUSED
    status = status_of(volume)
    assert status.phase == "held"
    assert "all steps are done and the result is on the volume, but not on me/flowers" in status.message
    assert "store no more" in status.message
    assert Outcome.read(folder.outcome) == Outcome(DONE, "all 10 steps are done", 10)
    assert not all_uploaded(folder, load_job(file).job)

    sent = sum(writable.store.received)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_UPLOAD_TOKEN", GOOD)
    assert run_job(file, volume.root, Stop()) == DONE
    assert all_uploaded(folder, load_job(file).job)
    assert sum(writable.store.received) == sent  # the store had it


def test_the_card_is_that_of_the_finished_file(writable: LoopbackHub, tmp_path: Path) -> None:
    """Of the best state and its own samples, whatever else is uploaded after it."""
    volume, file = finish_run(tmp_path / "volume", output={"hub": "me/flowers", "states": True})
    folder = volume.run("flowers")
    (folder.output / RESULT).unlink()
    os.link(folder.states / "step-000005" / "model.safetensors", folder.output / RESULT)
    assert run_job(file, volume.root, Stop()) == DONE
    files = writable.repos["me/flowers"].files()
    assert "states/flowers-000010.safetensors" in files
    card = files["README.md"].read_text()
    assert "after 5 steps" in card
    assert "samples/step-000005-00.png" in card
    assert "step-000010" not in card
    assert "was edited there" not in folder.log.read_text()


def test_a_result_that_is_cut_short_is_not_told_as_done(writable: LoopbackHub, tmp_path: Path) -> None:
    volume, file = finish_run(tmp_path / "volume", output={"hub": "me/flowers", "states": True})
    folder = volume.run("flowers")
    output, state = folder.output / RESULT, folder.states / "step-000005" / "model.safetensors"
    whole = output.read_bytes()
    output.unlink()  # a link to the last state's
    output.write_bytes(whole[:-1000])
    state.write_bytes(b"")
    for _ in range(2):
        assert run_job(file, volume.root, Stop()) == ACCESS_REFUSED
        status = status_of(volume)
        assert status.phase == "held"
        assert f"but not on me/flowers: {output} and {state} cannot be read: damaged, or cut short." in status.message
        assert not all_uploaded(folder, load_job(file).job)
    assert "states/flowers-000010.safetensors" in writable.repos["me/flowers"].files()  # what is whole is there
    output.write_bytes(whole)
    shutil.rmtree(state.parent)
    assert run_job(file, volume.root, Stop()) == DONE
    assert all_uploaded(folder, load_job(file).job)


def begin(file: Path, volume: Volume) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "entrypoint.cli", "run", str(file), "--volume", str(volume.root)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


def test_a_kill_in_the_middle_costs_no_file_that_was_verified(writable: LoopbackHub, tmp_path: Path) -> None:
    volume, file = finish_run(tmp_path / "volume", output={"hub": "me/flowers", "states": True})
    folder, state = volume.run("flowers"), "states/flowers-000005.safetensors"
    writable.fail(Fault("PUT /store/.*/3$", rate=1e9), times=1)  # of the finished file; then comes the state's third
    writable.fail(Fault("PUT /store/.*/3$", stall=60.0), times=1)
    process = begin(file, volume)
    wait_until(lambda: len(writable.store.received) >= 6)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    record = Record.read(folder, "me/flowers")
    assert RESULT in record.files
    assert state not in record.files
    assert writable.repos["me/flowers"].history == ["flowers: 10 steps"]

    writable.store.received.clear()
    assert run_job(file, volume.root, Stop()) == DONE
    size = (folder.states / "step-000005" / "model.safetensors").stat().st_size
    assert sum(writable.store.received) == size  # the finished file, which is the last state, was not sent again
    assert set(Record.read(folder, "me/flowers").files) == {RESULT, state, "states/flowers-000010.safetensors"}
    assert writable.repos["me/flowers"].history == ["flowers: 10 steps", "flowers: 5 steps", "flowers: 10 steps"]


def test_a_stop_ends_an_upload_at_once(writable: LoopbackHub, tmp_path: Path) -> None:
    volume, file = finish_run(tmp_path / "volume")
    writable.fail(Fault("PUT /store/", stall=60.0))
    stop = Stop()

    def ask() -> None:
        wait_until(lambda: any("PUT" in request for request in writable.requests))
        stop.requested = True

    asking = threading.Thread(target=ask)
    asking.start()
    assert run_job(file, volume.root, stop) == STOPPED
    asking.join()
    assert "the upload, which goes on at the next start" in status_of(volume).message
    assert status_of(volume).phase == "pending"


# ---------------------------------------------------------------- while training goes on


def test_states_are_uploaded_beside_training_and_trouble_is_a_warning(
    writable: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(uploads, "AGAIN", 0.2)
    volume, file = finish_run(tmp_path / "volume", output={"hub": "me/flowers", "states": True})
    folder = volume.run("flowers")
    writable.fail(Fault("POST .*/commit/", 500), times=2)  # one, after bytes that arrived, counts as none
    beside = BackgroundUploads(RunFile.read(folder.run_file), load_job(file).job, folder.log)
    try:
        wait_until(lambda: len(Record.read(folder, "me/flowers").files) == 2)
        save_state(folder, 15)
        wait_until(lambda: "states/flowers-000015.safetensors" in Record.read(folder, "me/flowers").files)
        assert RESULT not in writable.repos["me/flowers"].files()
        beside.training_is_over(finished=True)
        beside.wait(60.0)
        assert not beside.busy
        assert beside.refused is None
    finally:
        beside.end()
    assert RESULT in writable.repos["me/flowers"].files()
    told = capfd.readouterr().out
    assert "warning: upload: The hub is down (500) and did not take" in told
    assert "Training goes on; it is tried again" in told


def test_without_a_repository_nothing_runs(tmp_path: Path) -> None:
    volume, file = finish_run(tmp_path / "volume", output={})
    folder = volume.run("flowers")
    beside = BackgroundUploads(RunFile.read(folder.run_file), load_job(file).job, folder.log)
    beside.training_is_over(finished=True)
    assert not beside.busy
    beside.end()


# ---------------------------------------------------------------- by hand


def test_by_hand(writable: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume, _ = finish_run(tmp_path / "volume", output={})
    environ = {"HF_TOKEN": f'"{GOOD}"\n'}
    assert upload(volume, "nothing", None, False, environ) == JOB_WRONG
    assert upload(volume, "flowers", None, False, environ) == JOB_WRONG
    assert upload(volume, "flowers", "no owner", False, environ) == JOB_WRONG
    assert upload(volume, "flowers/7", "me/other", False, environ) == JOB_WRONG
    assert upload(volume, "/", "me/other", False, environ) == JOB_WRONG
    told = capsys.readouterr().out
    assert "there is no run nothing" in told
    assert "write --repo owner/name" in told
    assert "flowers/7 has nothing to upload" in told

    assert upload(volume, "flowers/5", "me/other", True, environ) == DONE
    repo = writable.repos["me/other"]
    assert not repo.private
    assert "states/flowers-000005.safetensors" in repo.files()
    for named in ("runs/flowers/step-000005", str(volume.run("flowers").states / "step-000005")):
        assert upload(volume, named, "me/other", True, environ) == DONE
    assert "is on https://huggingface.co/me/other already, verified" in capsys.readouterr().out
    for named in ("flowers/output", str(volume.run("flowers").output / RESULT)):
        assert upload(volume, named, "me/other", True, environ) == DONE
    assert RESULT in repo.files()
    (volume.run("flowers").output / RESULT).unlink()
    assert upload(volume, "flowers/output", "me/other", True, environ) == JOB_WRONG
    assert "flowers/output has nothing to upload" in capsys.readouterr().out
    assert upload(volume, "flowers", "me/other", True, {}) == ACCESS_REFUSED
    assert "neither HF_UPLOAD_TOKEN nor HF_TOKEN is set" in capsys.readouterr().out


def test_a_hub_that_is_down_stops_no_training(
    writable: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BEFORE_TRAINING", Patience(waits=(0.05,)))
    _, file = finish_run(tmp_path / "volume")
    writable.fail(Fault("whoami", 503), times=2)
    lines: list[str] = []
    uploads.refuse_unwritable(load_job(file).job, {"HF_TOKEN": GOOD}, lines.append)
    assert lines[-1].startswith("warning: output: The hub is down (503)")
    with pytest.raises(AccessError, match="does not know the token"):
        uploads.refuse_unwritable(load_job(file).job, {"HF_TOKEN": "hf_unknown0123456"}, lines.append)


@pytest.mark.parametrize(("token", "code"), [(GOOD, DONE), ("hf_unknown0123456", ACCESS_REFUSED)])
def test_check_asks_for_the_right_to_write(
    token: str,
    code: int,
    writable: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tiny.drawn import draw_dataset

    volume, file = finish_run(tmp_path / "volume")
    draw_dataset(volume.datasets / "d", 2)
    monkeypatch.setenv("HF_TOKEN", token)
    assert check(file, volume) == code
    told = capsys.readouterr()
    assert ("output: me/flowers will be made, private" in told.out) == (code == DONE)
    assert ("output.hub: The hub does not know the token" in " ".join(told.err.split())) == (code != DONE)
    assert "me/flowers" not in writable.repos
