from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.outcome import ACCESS_REFUSED, CRASH, DONE, JOB_WRONG, POD_WRONG, STOPPED, Outcome
from bootstrap.volume import Volume, read_json
from entrypoint import when_done
from entrypoint.platform import Patience
from entrypoint.when_done import (
    Finish,
    clear_banner,
    container_start,
    finish,
    max_hours_reached,
    outlives_container,
    plan,
    read_banner,
    read_max_hours,
    stop_pod,
)
from jobs.schema import Job
from tests.loopback_runpod import KEY, LoopbackRunPod

QUICK = Patience(limit=2.0, waits=(0.0,), looks=(0.0, 0.0))
OUTCOME = Outcome(DONE, "", 10)


def make_job(when: str = "stop", **keys: Any) -> Job:
    common = {"name": "flowers", "base": "flux-tiny", "method": "lora", "datasets": [{"path": "datasets/x"}]}
    return Job.model_validate(common | {"when_done": when} | keys)


class Pod:
    """One pod with one finished job; ``call`` is what its loop does."""

    def __init__(self, api: LoopbackRunPod, root: Path) -> None:
        self.api, self.volume, self.lines = api, Volume(root), list[str]()
        self.messages: list[str] = []
        self.volume.run("flowers").root.mkdir(parents=True)
        self.environ = api.environment()

    def call(self, when: str = "stop", outcome: Outcome = OUTCOME, persistent: bool = True, **keys: Any) -> Finish:
        options: dict[str, Any] = {"patience": QUICK, "pause": lambda seconds: False} | keys
        return finish(
            self.volume, make_job(when), outcome, self.environ, persistent=persistent, log=self.lines.append, **options
        )


@pytest.fixture
def pod(runpod: LoopbackRunPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    made = Pod(runpod, tmp_path)
    monkeypatch.setattr(
        when_done,
        "notify",
        lambda to, job, event, message, environ, log: made.messages.append(f"{job}: {event}: {message}"),
    )
    return made


# ---- what is to be done


@pytest.mark.parametrize(
    ("when", "code", "environ", "action"),
    [
        ("idle", DONE, {"RUNPOD_POD_ID": "p"}, None),
        ("stop", DONE, {"RUNPOD_POD_ID": "p"}, "stop"),
        ("stop", DONE, {}, None),
        ("stop", CRASH, {"RUNPOD_POD_ID": "p"}, "stop"),
        ("stop", JOB_WRONG, {"RUNPOD_POD_ID": "p"}, None),
        ("stop", POD_WRONG, {"RUNPOD_POD_ID": "p"}, None),
        ("stop", ACCESS_REFUSED, {"RUNPOD_POD_ID": "p"}, None),
        ("stop", STOPPED, {"RUNPOD_POD_ID": "p"}, None),
        ("terminate", DONE, {"RUNPOD_POD_ID": "p"}, "stop"),
        ("terminate", DONE, {"RUNPOD_POD_ID": "p", "RUNPOD_VOLUME_ID": "v"}, "terminate"),
        ("terminate", CRASH, {"RUNPOD_POD_ID": "p", "RUNPOD_VOLUME_ID": "v"}, "stop"),
        ("terminate", JOB_WRONG, {"RUNPOD_POD_ID": "p", "RUNPOD_VOLUME_ID": "v"}, None),
    ],
)
def test_what_is_asked_for(when: str, code: int, environ: dict[str, str], action: str | None) -> None:
    found = plan(make_job(when), replace(OUTCOME, code=code), environ, persistent=True, uploaded=False)
    assert found.action == action
    assert not found.alarm
    assert found.reason


def test_nothing_on_the_containers_disk_is_deleted_before_it_is_uploaded() -> None:
    environ = {"RUNPOD_POD_ID": "p", "RUNPOD_VOLUME_ID": "v"}
    for when in ("stop", "terminate"):
        found = plan(make_job(when), OUTCOME, environ, persistent=False, uploaded=False)
        assert (found.action, found.alarm) == (None, True)
        assert plan(make_job(when), OUTCOME, environ, persistent=False, uploaded=True).action == when


def test_the_same_end_told_in_other_words_is_the_same_end(pod: Pod) -> None:
    pod.call()
    pod.api.pods["pod-1"]["status"] = "RUNNING"
    assert pod.call(outcome=replace(OUTCOME, reason="all 10 steps are done")).action == "idle"
    assert pod.call(outcome=replace(OUTCOME, step=20)).action == "stop"


def test_an_upload_is_enough_to_terminate() -> None:
    found = plan(make_job("terminate"), OUTCOME, {"RUNPOD_POD_ID": "p"}, persistent=True, uploaded=True)
    assert found.action == "terminate"


# ---- doing it


def test_a_finished_job_stops_its_pod_with_one_call(pod: Pod) -> None:
    done = pod.call()
    assert (done.action, done.took, done.again) == ("stop", True, None)
    assert pod.api.actions() == [("pod-1", "stop")]
    assert read_banner(pod.volume, pod.environ) is None
    assert pod.messages == []


def test_a_pod_that_its_user_starts_again_is_left_alone(pod: Pod) -> None:
    pod.call()
    pod.api.pods["pod-1"]["status"] = "RUNNING"
    done = pod.call()
    assert (done.action, done.took) == ("idle", True)
    assert len(pod.api.actions()) == 1
    pod.environ["RUNPOD_POD_ID"] = "pod-2"  # moved
    pod.api.pods["pod-2"] = {"id": "pod-2", "status": "RUNNING"}
    assert pod.call().action == "idle"
    assert pod.call(outcome=Outcome(DONE, "", 20)).action == "stop"  # went on, and ended anew


def test_the_mark_is_there_before_the_call(pod: Pod) -> None:
    mark = pod.volume.run("flowers").root / "when_done.json"
    seen: list[str] = []

    def pause(seconds: float) -> bool:
        seen.append(read_json(mark)["state"])
        return False

    pod.api.fail("POST", 503, times=1)
    pod.call(pause=pause)
    assert seen == ["asking", "accepted"]


def test_a_kill_before_the_call_does_not_leave_the_pod_running(pod: Pod) -> None:
    pod.api.fail("POST", 503)
    assert pod.call(pause=lambda seconds: True).took is False  # SIGTERM while it waits to ask again
    assert read_banner(pod.volume, pod.environ) is None  # the platform ends this pod by itself
    pod.api.faults.clear()
    assert pod.call().took


def test_sigterm_after_the_call_is_the_stop_itself(pod: Pod) -> None:
    pod.api.looks_until_gone = 100
    assert pod.call(pause=lambda seconds: True).took
    assert pod.call().action == "idle"


@pytest.mark.parametrize(
    ("fault", "again", "words"),
    [
        ({"status": 401}, when_done.AGAIN_REFUSED, "does not know the key"),
        ({"status": 403}, when_done.AGAIN_REFUSED, "FLUXPOD_RUNPOD_API_KEY"),
        ({"status": 404}, when_done.AGAIN_REFUSED, "finds no such thing"),
        ({"status": 500}, when_done.AGAIN, "is down (500)"),
        ({"stall": 0.3, "cut": True}, when_done.AGAIN, "does not answer"),
    ],
)
def test_a_failed_call_is_a_banner_a_message_and_a_later_try(
    pod: Pod, fault: dict[str, Any], again: float, words: str
) -> None:
    pod.api.fail("POST", **fault)
    patience = replace(QUICK, limit=0.1) if "stall" in fault else QUICK
    done = pod.call(patience=patience)
    assert (done.took, done.again) == (False, again)
    banner = read_banner(pod.volume, pod.environ)
    assert banner
    assert words in banner.message
    assert (banner.pod, banner.job, banner.action) == ("pod-1", "flowers", "stop")
    assert "STILL BILLING" in pod.lines[-1]
    assert pod.messages == [f"flowers: still billing: {banner.message}"]
    assert KEY not in str(pod.lines + pod.messages)

    pod.call(patience=patience)
    assert len(pod.messages) == 1  # told once, tried again
    again_banner = read_banner(pod.volume, pod.environ)
    assert again_banner
    assert again_banner.since == banner.since

    pod.api.faults.clear()
    assert pod.call().took
    assert read_banner(pod.volume, pod.environ) is None


def test_a_yes_without_effect_is_a_banner_and_tried_again(pod: Pod) -> None:
    pod.api.ignored_actions = 2
    assert pod.call().again == when_done.AGAIN
    assert read_banner(pod.volume, pod.environ)
    assert pod.call().took


def test_no_key_is_a_banner(pod: Pod) -> None:
    del pod.environ["RUNPOD_API_KEY"]
    assert not pod.call().took
    banner = read_banner(pod.volume, pod.environ)
    assert banner
    assert "there is no key" in banner.message


def test_the_containers_own_disk_is_a_banner_without_a_call(pod: Pod) -> None:
    done = pod.call(persistent=False)
    assert (done.action, done.took, done.again) == ("idle", False, None)
    assert read_banner(pod.volume, pod.environ)
    assert pod.api.requests == []


def test_terminate_without_a_network_volume_only_stops_and_says_so(pod: Pod) -> None:
    assert pod.call("terminate").action == "stop"
    assert pod.api.actions() == [("pod-1", "stop")]
    assert "no network volume" in pod.lines[0]


def test_terminate_with_a_network_volume(pod: Pod) -> None:
    pod.environ["RUNPOD_VOLUME_ID"] = "vol-1"
    assert pod.call("terminate").action == "terminate"
    assert "pod-1" not in pod.api.pods


def test_outside_of_runpod_nothing_is_asked_and_nothing_alarmed(pod: Pod) -> None:
    pod.environ = {}
    done = pod.call()
    assert (done.action, done.took) == ("idle", False)
    assert "RUNPOD_POD_ID" in done.message
    assert read_banner(pod.volume, pod.environ) is None


def test_a_new_pod_starts_without_the_banner_of_the_last(pod: Pod) -> None:
    pod.api.fail("POST", 500)
    pod.call()
    clear_banner(pod.volume, pod.environ)
    clear_banner(pod.volume, pod.environ)
    assert read_banner(pod.volume, pod.environ) is None


def test_each_pod_on_a_volume_has_its_own_banner(pod: Pod) -> None:
    pod.api.fail("POST", 500)
    pod.call()
    other = pod.environ | {"RUNPOD_POD_ID": "../pod 2"}
    assert read_banner(pod.volume, other) is None
    clear_banner(pod.volume, other)
    assert read_banner(pod.volume, pod.environ)


def test_a_full_volume_does_not_keep_the_pod_billed(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(when_done, "write_json", full)
    assert pod.call().took
    pod.api.pods["pod-1"]["status"] = "RUNNING"
    pod.api.fail("POST", 500)
    assert not pod.call().took
    assert len(pod.messages) == 1


# ---- FLUXPOD_MAX_HOURS


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf", "12h"])
def test_a_limit_that_is_none_is_told(text: str) -> None:
    hours, line = read_max_hours({"FLUXPOD_MAX_HOURS": text})
    assert hours is None
    assert text in line
    assert not max_hours_reached(0.0, {"FLUXPOD_MAX_HOURS": text}, now=1e9)


def test_the_limit() -> None:
    environ = {"FLUXPOD_MAX_HOURS": " 1.5 "}
    assert read_max_hours(environ) == (1.5, "")
    assert not max_hours_reached(100.0, environ, now=100.0 + 5399)
    assert max_hours_reached(100.0, environ, now=100.0 + 5400)
    assert not max_hours_reached(0.0, {}, now=1e9)


def test_the_container_started_before_this_test() -> None:
    first = container_start()
    assert not max_hours_reached(first, {"FLUXPOD_MAX_HOURS": "1e9"})
    assert container_start() == pytest.approx(first, abs=1.0)


def test_a_pod_that_ran_too_long_is_stopped(pod: Pod) -> None:
    pod.environ["FLUXPOD_MAX_HOURS"] = "2"
    options: dict[str, Any] = {"patience": QUICK, "pause": lambda seconds: False, "log": pod.lines.append}
    assert stop_pod(pod.volume, None, pod.environ, **options).took
    assert pod.api.actions() == [("pod-1", "stop")]
    pod.api.fail("POST", 403)
    assert stop_pod(pod.volume, make_job(), pod.environ, **options).again
    assert len(pod.messages) == 1
    assert read_banner(pod.volume, pod.environ)
    assert not stop_pod(pod.volume, None, {}, **options).took


def test_the_containers_disk_is_known_by_its_file_system() -> None:
    assert not outlives_container(Path("/"))
    assert outlives_container(Path("/proc"))
