from __future__ import annotations

import socket
from typing import Any

import pytest

from entrypoint.platform import Patience, PlatformError, RunPod, read_keys
from tests.loopback_runpod import KEY, LoopbackRunPod

QUICK = Patience(limit=2.0, waits=(0.0, 0.0, 0.0), looks=(0.0, 0.0, 0.0))
OTHER = "rpa_ANOTHERANOTHERANOTHERANO"


class Waits(list[float]):
    """A pause that only counts, and leaves after ``last`` calls."""

    def __init__(self, last: int = 1_000_000) -> None:
        super().__init__()
        self.last = last

    def __call__(self, seconds: float) -> bool:
        self.append(seconds)
        return len(self) >= self.last


def client(api: LoopbackRunPod, patience: Patience = QUICK, pause: Any = None, **environ: str) -> RunPod:
    return RunPod.from_environment(api.environment() | environ, patience, Waits() if pause is None else pause)


def test_a_pod_is_stopped_by_one_call_and_it_is_looked_whether_it_took(runpod: LoopbackRunPod) -> None:
    accepted: list[bool] = []
    client(runpod).leave("pod-1", "stop", lambda: accepted.append(True))
    assert runpod.actions() == [("pod-1", "stop")]
    assert runpod.pods["pod-1"]["status"] == "EXITED"
    assert accepted == [True]
    assert all(request.agent.startswith("fluxpod/") and request.key == KEY for request in runpod.requests)


def test_a_pod_that_is_gone_was_terminated(runpod: LoopbackRunPod) -> None:
    client(runpod).leave("pod-1", "terminate")
    assert runpod.actions() == [("pod-1", "terminate")]
    assert "pod-1" not in runpod.pods


def test_a_slow_stop_is_waited_for_and_not_asked_twice(runpod: LoopbackRunPod) -> None:
    runpod.looks_until_gone = 2
    client(runpod).leave("pod-1", "stop")
    assert len(runpod.actions()) == 1


def test_a_yes_without_effect_is_asked_again_then_told(runpod: LoopbackRunPod) -> None:
    runpod.ignored_actions = 1
    client(runpod).leave("pod-1", "stop")
    assert len(runpod.actions()) == 2

    runpod.pods["pod-1"]["status"] = "RUNNING"
    runpod.ignored_actions = 100
    with pytest.raises(PlatformError, match="still runs") as caught:
        client(runpod).leave("pod-1", "stop")
    assert not caught.value.refused


def test_a_pod_that_may_not_be_stopped_says_why(runpod: LoopbackRunPod) -> None:
    runpod.fail("POST .*/action", 409, body=b'{"error": "pod is locked"}')
    with pytest.raises(PlatformError, match="pod is locked"):
        client(runpod).leave("pod-1", "stop")


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_passing_troubles_are_sat_out(runpod: LoopbackRunPod, status: int) -> None:
    runpod.fail("POST .*/action", status, times=3)
    client(runpod).leave("pod-1", "stop")
    assert len(runpod.actions()) == 4
    assert runpod.pods["pod-1"]["status"] == "EXITED"


def test_the_wait_that_an_answer_names_is_kept_within_reason(runpod: LoopbackRunPod) -> None:
    runpod.fail("POST", 429, headers={"Retry-After": "7"}, times=1)
    runpod.fail("POST", 429, headers={"Retry-After": "86400"}, times=1)
    waits = Waits()
    client(runpod, pause=waits).leave("pod-1", "stop")
    assert waits[:2] == [7.0, 60.0]


def test_a_stop_whose_answer_was_lost_is_asked_again_and_found_done(runpod: LoopbackRunPod) -> None:
    runpod.fail("POST", cut=True, acts=True, times=1)
    client(runpod).leave("pod-1", "stop")
    assert len(runpod.actions()) == 2  # the second is answered 409: it is stopped already
    assert runpod.pods["pod-1"]["status"] == "EXITED"


def test_an_api_that_stays_down_is_given_up(runpod: LoopbackRunPod) -> None:
    runpod.fail("POST", 503)
    with pytest.raises(PlatformError, match=r"is down \(503\)") as caught:
        client(runpod).leave("pod-1", "stop")
    assert len(runpod.actions()) == 4
    assert not caught.value.refused


def test_a_silent_api_is_given_up_in_time(runpod: LoopbackRunPod) -> None:
    runpod.fail("POST", stall=0.5)
    patience = Patience(limit=0.1, waits=(0.0,), looks=(0.0,))
    with pytest.raises(PlatformError, match=r"does not answer within 0\.1 s"):
        client(runpod, patience).leave("pod-1", "stop")


def test_nobody_at_the_address(runpod: LoopbackRunPod) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{free.getsockname()[1]}/v2"
    with pytest.raises(PlatformError, match="takes no connections"):
        client(runpod, FLUXPOD_RUNPOD_API=base).leave("pod-1", "stop")


@pytest.mark.parametrize(("status", "words"), [(401, "does not know the key in RUNPOD_API_KEY"), (403, "write access")])
def test_a_refusal_is_not_repeated_and_says_what_to_do(runpod: LoopbackRunPod, status: int, words: str) -> None:
    runpod.fail("POST", status)
    with pytest.raises(PlatformError, match=words) as caught:
        client(runpod).leave("pod-1", "stop")
    assert len(runpod.actions()) == 1
    assert caught.value.refused


def test_another_accounts_pod_is_a_refusal(runpod: LoopbackRunPod) -> None:
    with pytest.raises(PlatformError, match="finds no such thing") as caught:
        client(runpod).leave("pod-9", "stop")
    assert caught.value.refused


def test_the_users_own_key_comes_first_and_a_refused_one_is_followed_by_the_other(runpod: LoopbackRunPod) -> None:
    runpod.keys = {OTHER: "all", KEY: "none"}
    client(runpod, FLUXPOD_RUNPOD_API_KEY=OTHER).leave("pod-1", "stop")
    assert {request.key for request in runpod.requests} == {OTHER}

    runpod.pods["pod-1"]["status"] = "RUNNING"
    runpod.keys = {KEY: "all"}
    client(runpod, FLUXPOD_RUNPOD_API_KEY=OTHER).leave("pod-1", "stop")
    assert runpod.pods["pod-1"]["status"] == "EXITED"


def test_a_key_that_may_stop_but_not_look(runpod: LoopbackRunPod) -> None:
    runpod.keys[KEY] = "stop"
    waits = Waits(last=2)  # then SIGTERM arrives: the stop took
    client(runpod, pause=waits).leave("pod-1", "stop")
    assert len(runpod.actions()) == 1
    runpod.ignored_actions = 100
    runpod.pods["pod-1"]["status"] = "RUNNING"
    with pytest.raises(PlatformError, match="still runs"):  # it never arrives
        client(runpod).leave("pod-1", "stop")


def test_a_redirect_does_not_carry_the_key_away(runpod: LoopbackRunPod) -> None:
    with LoopbackRunPod() as elsewhere:
        runpod.fail("GET", 302, headers={"Location": elsewhere.base + "/pods/pod-1"})
        with pytest.raises(PlatformError, match="302"):
            client(runpod).pod_status("pod-1")
        assert elsewhere.requests == []


def test_no_key_is_ever_shown(runpod: LoopbackRunPod) -> None:
    platform = client(runpod, FLUXPOD_RUNPOD_API_KEY=OTHER)
    assert KEY not in repr(platform)
    assert OTHER not in repr(platform)
    runpod.fail("GET", 400, body=b'{"error": "bad key ' + OTHER.encode() + b'"}')
    with pytest.raises(PlatformError) as caught:
        platform.pod_status("pod-1")
    assert OTHER not in str(caught.value)
    assert "bad key ***" in str(caught.value)


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"", b"\xff"])
def test_what_answers_is_not_runpod(runpod: LoopbackRunPod, body: bytes) -> None:
    runpod.fail("GET", 200, body=body)
    with pytest.raises(PlatformError, match="not RunPod's API"):
        client(runpod).pod_status("pod-1")


@pytest.mark.parametrize("api", ["http://api.example/v2", "ftp://x", "api.runpod.io/v2"])
def test_a_key_goes_over_no_open_line(api: str) -> None:
    with pytest.raises(PlatformError, match="https"):
        RunPod.from_environment({"FLUXPOD_RUNPOD_API": api, "RUNPOD_API_KEY": KEY})


def test_keys_are_cleaned_and_their_faults_explained() -> None:
    assert [key.value for key in read_keys({"RUNPOD_API_KEY": f' "{KEY}"\r\n'})[0]] == [KEY]
    assert read_keys({"RUNPOD_API_KEY": "a b"})[0] == ()
    keys, faults = read_keys({"FLUXPOD_RUNPOD_API_KEY": "{{ RUNPOD_SECRET_key }}", "RUNPOD_API_KEY": KEY})
    assert [key.name for key in keys] == ["RUNPOD_API_KEY"]
    assert "no secret of that name" in faults[0]
    with pytest.raises(PlatformError, match="no secret of that name") as caught:
        RunPod.from_environment({"FLUXPOD_RUNPOD_API_KEY": "{{ RUNPOD_SECRET_key }}"})
    assert caught.value.refused
    with pytest.raises(PlatformError, match="neither FLUXPOD_RUNPOD_API_KEY nor RUNPOD_API_KEY is set"):
        RunPod.from_environment({})


def test_a_pod_is_not_made_twice_when_an_answer_is_lost(runpod: LoopbackRunPod) -> None:
    body = {"name": "x", "image": "y", "gpu": {"id": "NVIDIA A40"}}
    runpod.fail("POST /pods$", cut=True, acts=True, times=1)
    with pytest.raises(PlatformError, match="broke off") as caught:
        client(runpod).create_pod(body)
    assert caught.value.unknown
    assert len(runpod.pods) == 2
    runpod.fail("POST /pods$", 429, times=1)
    assert client(runpod).create_pod(body)["status"] == "PROVISIONING"
    assert len(runpod.pods) == 3


def test_long_lists_are_read_to_their_end(runpod: LoopbackRunPod) -> None:
    runpod.fail("GET /templates", 200, body=b'{"templates": [{"id": "1"}], "pagination": {"nextCursor": "a"}}', times=1)
    runpod.templates = [{"id": "2", "name": "b"}]
    assert [template["id"] for template in client(runpod).templates()] == ["1", "2"]
