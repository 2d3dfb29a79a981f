"""The pod loop's decisions, with children that are no real runs; real ones are in tests/image."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bootstrap import clocks, quiet
from bootstrap.lease import Lease
from bootstrap.outcome import ACCESS_REFUSED, DONE, JOB_WRONG, POD_WRONG, STOPPED, Outcome
from bootstrap.pod import Gpu, Pod
from bootstrap.uploads import Record, Uploaded
from bootstrap.volume import Volume, write_atomically, write_json
from entrypoint import end_of_work
from entrypoint import pod as pod_module
from entrypoint.attempts import Attempts, digest
from entrypoint.end_of_work import EndOfWork
from entrypoint.job_files import JobFile
from entrypoint.launch import SHARE
from entrypoint.pod import PodLoop, Waiting, choose, create_patiently
from entrypoint.status import Status, StatusFile
from entrypoint.when_done import Finish
from jobs.load import load_job, parse_job
from jobs.schema import Job
from tests.loopback_runpod import LoopbackRunPod

GIB = 1 << 30
CARD = Gpu(0, "NVIDIA H100", 80 * GIB, 80 * GIB, "580.1", (9, 0))


def job_text(name: str, *more: str) -> str:
    lines = [f"name: {name}", "base: flux-tiny", "method: lora", "datasets:", "  - path: datasets/d", *more]
    return "\n".join(lines) + "\n"


def waiting(name: str, gpus: int | None) -> Waiting:
    text = job_text(name)
    return Waiting(JobFile(Path(f"{name}.yaml"), text, parse_job(text, name)), gpus)


def starts(
    jobs: list[tuple[str, int | None]], free: list[int], total: int, running: int = 0
) -> dict[str, tuple[int, ...]]:
    return {job.file.name: gpus for job, gpus in choose([waiting(*job) for job in jobs], free, total, running)}


@pytest.mark.parametrize(
    ("jobs", "free", "total", "expected"),
    [
        (
            [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)],
            [0, 1, 2, 3],
            4,
            {"a": (0,), "b": (1,), "c": (2,), "d": (3,)},
        ),
        ([("a", None), ("b", 1)], [0, 1], 2, {"a": (0, 1)}),
        ([("a", None), ("b", 1)], [1], 2, {"b": (1,)}),  # overtakes: an idle card is billed all the same
        ([("a", 8)], [0, 1], 2, {"a": (0, 1)}),  # a GPU count never makes a job refuse
        ([("a", 1)], [], 1, {}),
    ],
)
def test_jobs_start_side_by_side_as_their_gpus_allow(
    jobs: list[tuple[str, int | None]], free: list[int], total: int, expected: dict[str, tuple[int, ...]]
) -> None:
    assert starts(jobs, free, total) == expected


def test_without_gpus_one_job_runs_at_a_time() -> None:
    jobs: list[tuple[str, int | None]] = [("a", None), ("b", 1)]
    assert starts(jobs, [], 0) == {"a": ()}
    assert starts(jobs, [], 0, running=1) == {}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pod_module.time, "monotonic", clock)
    return clock


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path)
    volume.create()
    (volume.datasets / "d").mkdir()
    (volume.datasets / "d" / "a.png").write_bytes(b"x")
    return volume


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the loop starts; in its place runs a program that ends with the exit code in ``codes``."""
    commands: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        return real([sys.executable, "-c", f"import sys, time; sys.exit({codes[0]})"], stdin=subprocess.DEVNULL)

    monkeypatch.setattr(pod_module.subprocess, "Popen", popen)
    return commands


codes = [0]


def make_loop(volume: Volume, gpus: int = 1, environment: Mapping[str, str] | None = None) -> PodLoop:
    cards = tuple(Gpu(i, CARD.name, CARD.memory, CARD.free, CARD.driver, CARD.capability) for i in range(gpus))
    known = {"FLUXPOD_QUIET_SECONDS": "0", "FLUXPOD_LEASE_SECONDS": "60"} | dict(environment or {})
    return PodLoop(volume, Pod(cards, 4, 8 * GIB, GIB, 100 * GIB), known)


def drop(volume: Volume, name: str, *more: str) -> Path:
    file = volume.jobs / f"{name}.yaml"
    file.write_text(job_text(name, *more), encoding="utf-8")
    return file


def turn_until_ended(loop: PodLoop) -> None:
    for child in loop.children.values():
        child.process.wait(30)
    loop.turn()


def look_at_the_end(loop: PodLoop) -> None:
    if loop.idle:
        loop.end_of_work.look(loop.files)


def phase(volume: Volume, name: str) -> str:
    status = Status.read(volume.run(name).status)
    return status.phase if status else ""


def test_a_dropped_job_starts_when_its_file_stands_still(
    volume: Volume, started: list[list[str]], clock: Clock
) -> None:
    codes[0] = POD_WRONG
    loop = make_loop(volume)
    file = drop(volume, "a")
    loop.turn()
    assert not started  # seen for the first time: it may still be arriving
    file.write_text(job_text("a", "steps: 5"), encoding="utf-8")
    loop.turn()
    assert not started
    loop.turn()
    assert len(started) == 1
    assert str(file) in started[0]


def test_a_held_job_is_not_started_again_until_something_changes(
    volume: Volume, started: list[list[str]], clock: Clock
) -> None:
    codes[0] = JOB_WRONG
    loop = make_loop(volume)
    loop.quiet.clock = clock
    file = drop(volume, "a")
    for _ in range(5):
        loop.turn()
        turn_until_ended(loop)
    assert len(started) == 1
    (volume.datasets / "d" / "b.png").write_bytes(b"y")  # the missing picture arrives
    clock.now += 31
    for _ in range(4):
        loop.turn()
        turn_until_ended(loop)
    assert len(started) == 2
    file.write_text(job_text("a", "steps: 7"), encoding="utf-8")
    for _ in range(4):
        loop.turn()
        turn_until_ended(loop)
    assert len(started) == 3


def test_an_unreadable_job_is_held_with_its_problems_and_never_started(
    volume: Volume, started: list[list[str]]
) -> None:
    (volume.jobs / "broken.yaml").write_text("name: [\n", encoding="utf-8")
    loop = make_loop(volume)
    for _ in range(5):
        loop.turn()
    status = Status.read(volume.run("broken").status)
    assert status
    assert (status.phase, status.heartbeat) == ("held", 1)
    assert "broken.yaml" in status.message
    assert not started
    again = make_loop(volume)  # a restart
    for _ in range(3):
        again.turn()
    assert Status.read(volume.run("broken").status) == status


def test_a_crash_is_retried_with_back_off_then_held(volume: Volume, started: list[list[str]], clock: Clock) -> None:
    codes[0] = 1
    loop = make_loop(volume)
    drop(volume, "a")
    for second in range(2000):
        clock.now = float(second)
        loop.turn()
        turn_until_ended(loop)
    assert len(started) == 4
    assert phase(volume, "a") == "failed"
    again = make_loop(volume)  # counted on the volume: a restart does not forget
    for _ in range(5):
        again.turn()
    assert len(started) == 4


def test_a_done_job_is_left_alone_by_a_new_container(volume: Volume, started: list[list[str]]) -> None:
    file = drop(volume, "a")
    folder = volume.run("a")
    folder.output.mkdir(parents=True)
    (folder.output / "a.safetensors").write_bytes(b"")
    folder.job.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    Outcome(DONE, "done", 10).write(folder.outcome)
    before = sorted(path for path in volume.root.rglob("*"))
    for _ in range(3):
        loop = make_loop(volume)
        for _ in range(3):
            loop.turn()
    assert not started
    assert sorted(path for path in volume.root.rglob("*")) == before


def test_two_files_of_one_name_run_once(
    volume: Volume, started: list[list[str]], clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    codes[0] = POD_WRONG
    drop(volume, "a")
    (volume.jobs / "b.yaml").write_text(job_text("a"), encoding="utf-8")
    loop = make_loop(volume, gpus=2)
    for _ in range(4):
        loop.turn()
    assert len(started) == 1
    assert "the name a is taken by a.yaml" in capsys.readouterr().out


def test_a_data_upload_is_waited_for(volume: Volume, started: list[list[str]], clock: Clock) -> None:
    (volume.datasets / "d" / "more.zip.part").write_bytes(b"x")
    drop(volume, "a")
    loop = make_loop(volume)
    for _ in range(4):
        loop.turn()
    assert not started
    status = Status.read(volume.run("a").status)
    assert status
    assert status.phase == "pending"
    assert "still coming" in status.message


def test_all_that_a_job_names_on_the_volume_is_waited_for(
    volume: Volume, started: list[list[str]], clock: Clock
) -> None:
    codes[0] = JOB_WRONG
    more = ["    mask: datasets/masks", "  - path: https://example.com/d.zip", "    mask: alpha"]
    drop(volume, "a", *more, "lora:", "  start: runs/b/output/b.safetensors")
    loop = make_loop(volume)
    loop.quiet.clock = clock
    for _ in range(5):
        loop.turn()
        turn_until_ended(loop)
    assert len(started) == 1  # held: its masks are missing
    mask = volume.datasets / "masks" / "a.png"
    mask.parent.mkdir()
    mask.write_bytes(b"y")
    clock.now += 31
    for _ in range(4):
        loop.turn()
        turn_until_ended(loop)
    assert len(started) == 2
    assert loop.files[0].loaded
    named = {path.relative_to(volume.root).as_posix() for path in loop._data_of(loop.files[0].loaded.job)}
    assert named == {"datasets/d", "datasets/masks", "flux-tiny", "runs/b/output/b.safetensors"}


def test_a_removed_job_is_stopped(
    volume: Volume, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(pod_module.subprocess, "Popen", lambda command, **options: real(sleeper))
    file = drop(volume, "a")
    loop = make_loop(volume)
    loop.turn()
    loop.turn()
    assert "a" in loop.children
    text = file.read_text(encoding="utf-8")
    for _ in range(2):  # an editor deletes it and writes it anew
        file.unlink()
        loop.turn()
        file.write_text(text, encoding="utf-8")
        loop.turn()
    assert not loop.children["a"].removed
    file.unlink()
    loop.turn()
    assert not loop.children["a"].removed
    loop.turn()
    turn_until_ended(loop)
    assert not loop.children
    status = Status.read(volume.run("a").status)
    assert status
    assert (status.phase, "removed" in status.message) == ("held", True)
    drop(volume, "a")  # the same file is back
    for _ in range(3):
        loop.turn()
    assert "a" in loop.children
    file.write_text("name: [\n", encoding="utf-8")  # edited while it runs: nothing is told before its end
    for _ in range(3):
        loop.turn()
    status = Status.read(volume.run("a").status)
    assert status
    assert "a.yaml" not in status.message
    loop.end()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_job_from_a_windows_editor_is_read_as_check_reads_it(
    volume: Volume, started: list[list[str]], clock: Clock, encoding: str
) -> None:
    codes[0] = POD_WRONG
    file = volume.jobs / "a.yaml"
    file.write_bytes(job_text("a").replace("\n", "\r\n").encode(encoding))
    loop = make_loop(volume)
    for _ in range(3):
        loop.turn()
    assert len(started) == 1
    turn_until_ended(loop)
    folder = volume.run("a")
    folder.output.mkdir(parents=True)
    (folder.output / "a.safetensors").write_bytes(b"")
    write_atomically(folder.job, load_job(file).text)  # as a run leaves it
    Outcome(DONE, "done", 10).write(folder.outcome)
    again = make_loop(volume)
    for _ in range(4):
        again.turn()
    assert len(started) == 1


def test_a_stopped_run_that_waits_says_how_far_it_is(volume: Volume, started: list[list[str]], clock: Clock) -> None:
    drop(volume, "a")
    status = StatusFile(volume.run("a").status)
    status.tell("pending", "stopped by a signal", step=12, steps=100, code=STOPPED)
    loop = make_loop(volume, environment={"FLUXPOD_QUIET_SECONDS": "10"})
    for _ in range(4):
        loop.turn()
    found = Status.read(volume.run("a").status)
    assert found
    assert (found.phase, found.step, found.steps) == ("pending", 12, 100)
    assert found.message == "waiting: the data must be unchanged for 10 s; so far: step 12 of 100"
    assert found.heartbeat == 2


def test_a_crash_keeps_its_reason_when_it_is_not_tried_again(volume: Volume, started: list[list[str]]) -> None:
    file = drop(volume, "a")
    Attempts(digest(file.read_text()), 9, 0).write(volume.run("a").root)
    StatusFile(volume.run("a").status).tell("failed", "the trainer crashed (9)", step=3, steps=9, code=1)
    for _ in range(2):  # restarts
        loop = make_loop(volume)
        for _ in range(3):
            loop.turn()
    found = Status.read(volume.run("a").status)
    assert found
    assert (found.phase, found.step, found.heartbeat) == ("failed", 3, 2)
    assert found.message.endswith("change the job file to try anew. The last time: the trainer crashed (9)")
    assert not started


@pytest.mark.parametrize("how", ["mended", "removed", "mended while no pod ran"])
def test_the_status_of_a_file_that_could_not_be_read_goes_with_it(
    volume: Volume, started: list[list[str]], how: str
) -> None:
    codes[0] = POD_WRONG
    file = drop(volume, "torn")
    file.write_text("name: [\n", encoding="utf-8")
    loop = make_loop(volume)
    for _ in range(3):
        loop.turn()
    assert phase(volume, "torn") == "held"
    if how == "removed":
        file.unlink()
    else:
        file.write_text(job_text("flowers"), encoding="utf-8")
    if how == "mended while no pod ran":
        loop = make_loop(volume)
    for _ in range(3):
        loop.turn()
    assert not volume.run("torn").root.exists()
    assert len(started) == (how != "removed")


def test_a_file_broken_while_its_job_runs_is_told_afterwards(
    volume: Volume, started: list[list[str]], clock: Clock
) -> None:
    codes[0] = POD_WRONG
    file = drop(volume, "a")
    file.write_text(job_text("b"), encoding="utf-8")  # its job has another name
    loop = make_loop(volume)
    loop.turn()
    loop.turn()
    assert "b" in loop.children
    file.write_text("name: [\n", encoding="utf-8")
    process, loop.children["b"].process = loop.children["b"].process, Endless()  # type: ignore[assignment]
    process.wait(30)
    for _ in range(3):
        loop.turn()
    assert not loop.children["b"].removed
    assert not volume.run("a").status.exists()
    loop.children["b"].process = process
    loop.turn()
    assert phase(volume, "a") == "held"


class Endless:
    def poll(self) -> None:
        return None


def test_a_job_file_that_is_renamed_goes_on(volume: Volume, started: list[list[str]], clock: Clock) -> None:
    file = drop(volume, "a")
    loop = make_loop(volume)
    loop.turn()
    loop.turn()
    process, loop.children["a"].process = loop.children["a"].process, Endless()  # type: ignore[assignment]
    process.wait(30)
    file.rename(file.with_name("z.yml"))
    for _ in range(3):
        loop.turn()
    assert not loop.children["a"].removed


def test_held_jobs_do_not_have_their_data_walked_at_every_look(
    volume: Volume, started: list[list[str]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    real = quiet.look_at
    monkeypatch.setattr(quiet, "look_at", lambda paths: looks.append(clock.now) or real(paths))
    drop(volume, "a")
    loop = make_loop(volume)
    loop.quiet.clock = clock
    for code, most in ((POD_WRONG, 0), (JOB_WRONG, 4)):
        codes[0] = code
        drop(volume, "a", f"steps: {code}")
        for _ in range(3):
            loop.turn()
            turn_until_ended(loop)
        looks.clear()
        for _ in range(50):
            clock.now += 2
            loop.turn()
        assert len(looks) <= most


def test_a_run_is_told_its_share_of_the_pod(volume: Volume, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Mapping[str, str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        given.append(options["env"])
        return real([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)

    monkeypatch.setattr(pod_module.subprocess, "Popen", popen)
    drop(volume, "a", "gpus: 1")
    drop(volume, "b", "gpus: 2")
    loop = make_loop(volume, gpus=4)
    loop.turn()
    loop.turn()
    assert [(env[SHARE], env["CUDA_VISIBLE_DEVICES"]) for env in given] == [("1/4", "0"), ("2/4", "1,2")]
    loop.end()


def test_a_volume_that_cannot_be_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row P52: said once, without a crash that would only be repeated."""
    (tmp_path / "file").touch()
    volume, waits = Volume(tmp_path / "file"), []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            volume.root.unlink()

    monkeypatch.setattr(pod_module.time, "sleep", sleep)
    make_loop(volume).greet()
    create_patiently(volume)
    assert volume.jobs.is_dir()
    said = capsys.readouterr().out
    assert said.count("nothing runs") == 1
    assert "cannot be written" in said


def test_another_pods_run_keeps_its_status(volume: Volume, started: list[list[str]], clock: Clock) -> None:
    drop(volume, "a")
    folder = volume.run("a")
    write_json(folder.lease, replace(Lease.mine("other"), boot="another boot").__dict__)
    StatusFile(folder.status).tell("training", "training", step=7, steps=9)
    before = Status.read(folder.status)
    loop = make_loop(volume, environment={"FLUXPOD_QUIET_SECONDS": "10"})
    for second in range(20):
        clock.now = float(second)
        loop.turn()
    assert Status.read(folder.status) == before
    assert not started


def test_an_unreadable_file_leaves_another_pods_run_its_status(
    volume: Volume, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    (volume.jobs / "a.yaml").write_text("name: [\n", encoding="utf-8")
    folder = volume.run("a")
    write_json(folder.lease, replace(Lease.mine("other"), boot="another boot").__dict__)
    StatusFile(folder.status).tell("training", "training", step=7, steps=9)
    loop = make_loop(volume)
    for _ in range(4):
        loop.turn()
    assert phase(volume, "a") == "training"
    assert capsys.readouterr().out.count("a.yaml cannot be read") == 1
    folder.lease.unlink()
    loop.turn()
    assert phase(volume, "a") == "held"


def test_out_of_time_the_stop_is_asked_for_until_it_takes(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    answers = [Finish("stop", False, "no answer", 600.0), Finish("stop", True, "stops")]

    def pause(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) > 3

    monkeypatch.setattr(end_of_work, "stop_pod", lambda *_, **__: answers.pop(0))
    EndOfWork(volume, {}, pause).stay_stopped()
    assert (asked, answers) == ([0.0, 600.0, 60.0, 60.0], [])


def test_the_pod_is_stopped_once_when_all_is_done(
    volume: Volume, started: list[list[str]], runpod: LoopbackRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row P19: the done mark is on the volume first, then one call, also over restarts."""
    monkeypatch.setattr(PodLoop, "sleep", lambda loop, seconds: False)
    codes[0] = POD_WRONG
    for name in ("a", "b"):
        file = drop(volume, name, "when_done: stop")
        folder = volume.run(name)
        folder.output.mkdir(parents=True)
        (folder.output / f"{name}.safetensors").write_bytes(b"")
        folder.job.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
        if name == "a":
            Outcome(DONE, "done", 10).write(folder.outcome)
    loop = make_loop(volume, environment=runpod.environment())
    for _ in range(3):
        loop.turn()
        look_at_the_end(loop)
    assert runpod.actions() == []  # b runs
    turn_until_ended(loop)
    look_at_the_end(loop)
    assert len(runpod.actions()) == 1
    for _ in range(3):  # restarts
        again = make_loop(volume, environment=runpod.environment())
        for _ in range(4):
            again.turn()
            turn_until_ended(again)
            look_at_the_end(again)
    assert len(runpod.actions()) == 1


def test_a_second_signal_reaches_the_runs(volume: Volume, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave at once then, and give back their leases; one that does not is killed."""
    calls: list[str] = []

    class Process:
        def terminate(self) -> None:
            calls.append("TERM")

        def wait(self, limit: float = 0) -> int:
            if calls.count("TERM") == 1:
                raise SystemExit(143)
            calls.append(f"wait {limit:g}")
            return 75

    loop = make_loop(volume)
    drop(volume, "a")
    monkeypatch.setattr(pod_module.subprocess, "Popen", lambda *_, **__: Process())
    monkeypatch.setattr(PodLoop, "_collect", lambda loop: None)
    loop.turn()
    loop.turn()
    with pytest.raises(SystemExit):
        loop.end()
    assert calls == ["TERM", "TERM", f"wait {clocks.LEAVE:g}"]


# ---------------------------------------------------------------- results that leave the pod


HUB = "output: {hub: me/flowers}"


def done_but_for_the_upload(volume: Volume, name: str, *more: str) -> Path:
    file = drop(volume, name, HUB, *more)
    folder = volume.run(name)
    write_atomically(folder.job, file.read_bytes())
    folder.output.mkdir()
    save_file({"weight": np.zeros(4)}, folder.output / f"{name}.safetensors")
    Outcome(DONE, "all 10 steps are done", 10).write(folder.outcome)
    return file


def test_an_upload_that_is_left_takes_no_gpu(volume: Volume, started: list[list[str]]) -> None:
    done_but_for_the_upload(volume, "a")
    drop(volume, "b")
    loop = make_loop(volume)
    loop.turn()
    loop.turn()
    assert {name: child.gpus for name, child in loop.children.items()} == {"a": (), "b": (0,)}
    loop.end()


def test_a_run_that_only_uploads_leaves_its_gpus_to_the_next(volume: Volume, started: list[list[str]]) -> None:
    drop(volume, "a", HUB)
    drop(volume, "b")
    codes[0] = "time.sleep(60)"  # type: ignore[call-overload]
    StatusFile(volume.run("a").status).tell("uploading", "of an earlier start, which was killed")
    loop = make_loop(volume)
    try:
        loop.turn()
        loop.turn()
        assert list(loop.children) == ["a"]
        StatusFile(volume.run("a").status).tell("uploading", "3.1 of 23.8 GB")
        loop.turn()
        assert list(loop.children) == ["a", "b"]
    finally:
        codes[0] = 0
        loop.end()


def test_a_pod_is_stopped_after_an_upload_that_failed_and_not_deleted(
    volume: Volume, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volume keeps the result; only what the hub has is nobody's loss."""
    finished: list[tuple[int, bool]] = []

    def finish(volume: Volume, job: Job, outcome: Outcome, environ: object, **told: Any) -> Finish:
        finished.append((outcome.code, told["uploaded"]))
        return Finish("idle", True, "")

    monkeypatch.setattr(end_of_work, "finish", finish)
    done_but_for_the_upload(volume, "a", "when_done: terminate")
    codes[0] = ACCESS_REFUSED
    try:
        loop = make_loop(volume)
        loop.turn()
        loop.turn()
        turn_until_ended(loop)
        assert loop.idle
        look_at_the_end(loop)
    finally:
        codes[0] = 0
    assert finished == [(DONE, False)]
    output = volume.run("a").output / "a.safetensors"
    found = output.stat()
    file = Uploaded("aa", found.st_size, found.st_mtime_ns, "c0ffee")
    Record("me/flowers").with_file("a.safetensors", file, "").write(volume.run("a"))
    loop = make_loop(volume)
    loop.turn()
    loop.turn()
    look_at_the_end(loop)
    assert finished[1:] == [(DONE, True)]
