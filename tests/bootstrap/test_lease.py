from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.lease import HeldLease, Lease, LeaseTakenError, LeaseWatch
from bootstrap.volume import write_json
from entrypoint import run
from entrypoint.launch import Stop, stale_seconds
from entrypoint.run import wait_for_lease


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, lease: Lease) -> None:
    write_json(path, lease.__dict__)


def foreign(counter: int = 0, pod: str = "other") -> Lease:
    """A lease of a process on another machine."""
    return replace(Lease.mine(pod), boot="another boot", counter=counter)


def test_a_free_lease_is_taken_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "lease.json"
    lease = HeldLease(path, "me", lambda: None)
    lease.take(LeaseWatch("me"))
    with lease:
        assert Lease.read(path) == lease.lease
        with pytest.raises(LeaseTakenError):
            HeldLease(path, "me", lambda: None).take(LeaseWatch("me"))
    assert not path.exists()


def test_what_a_killed_owner_left_of_its_lease_goes_with_the_next_owner(tmp_path: Path) -> None:
    """SIGKILL while the counter was raised; parts of other files, such as half-fetched weights, are not its."""
    path = tmp_path / ".fetch.lease"
    left, other = tmp_path / "..fetch.lease.7-0badcafe-0.part", tmp_path / ".model.safetensors.0123.part"
    for part in (left, other):
        part.write_text("half")
    HeldLease(path, "me", lambda: None).take(LeaseWatch("me"))
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_a_lease_that_moves_is_never_free(tmp_path: Path) -> None:
    path, clock = tmp_path / "lease.json", Clock()
    watch = LeaseWatch("me", 60, clock)
    for beat in range(20):
        write(path, foreign(beat))
        assert not watch.clear(path)
        clock.now += 50
    assert path.exists()


def test_a_lease_that_stands_still_is_free_after_a_while_of_ones_own_clock(tmp_path: Path) -> None:
    path, clock = tmp_path / "lease.json", Clock()
    watch = LeaseWatch("me", 60, clock)
    write(path, foreign())
    assert not watch.clear(path)
    clock.now = 59
    assert not watch.clear(path)
    clock.now = 61
    assert watch.clear(path)
    assert not path.exists()


def test_a_run_that_the_pod_loop_started_does_not_wait_with_its_gpus(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    other = foreign()
    write(path, other)
    assert not wait_for_lease(HeldLease(path, "me", lambda: None), Stop(), patient=False)
    assert Lease.read(path) == other


def test_the_earlier_container_of_this_pod_is_surely_dead(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    write(path, replace(foreign(), pod="me"))
    assert LeaseWatch("me").clear(path)
    write(path, replace(foreign(), pod=""))
    assert not LeaseWatch("").clear(path)  # no pod has no name


def test_a_dead_process_of_this_machine_is_known_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    write(path, replace(Lease.mine(""), started=1))
    assert LeaseWatch("").clear(path)
    write(path, Lease.mine(""))
    assert not LeaseWatch("").clear(path)


def test_damage_is_watched_like_any_lease(tmp_path: Path) -> None:
    path, clock = tmp_path / "lease.json", Clock()
    path.write_text("{", encoding="utf-8")
    watch = LeaseWatch("me", 60, clock)
    assert not watch.clear(path)
    clock.now = 61
    assert watch.clear(path)


def test_the_owner_beats_and_notices_a_take_over(tmp_path: Path) -> None:
    path, lost = tmp_path / "lease.json", threading.Event()
    lease = HeldLease(path, "me", lost.set, renew=0.01)
    lease.take(LeaseWatch("me"))
    with lease:
        for _ in range(500):
            if (now := Lease.read(path)) and now.counter > 2:
                break
            threading.Event().wait(0.01)
        else:
            pytest.fail("the counter does not move")
        for _ in range(100):  # a beat under way may write once more over the rival, who then would be the one to go
            write(path, foreign())
            if lost.wait(0.1):
                break
        assert lost.is_set()
    assert path.exists()  # another's lease is not removed


def test_a_volume_that_hangs_does_not_end_the_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failed, beats = tmp_path / "lease.json", threading.Event(), threading.Semaphore(0)
    lease = HeldLease(path, "me", lambda: None, beats.release, renew=0.01)
    lease.take(LeaseWatch("me"))
    real = Lease.read

    def read(path: Path) -> Lease | None:
        if not failed.is_set():
            failed.set()
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(Lease, "read", read)
    with lease:
        for _ in range(3):
            assert beats.acquire(timeout=10)
    assert failed.is_set()


def test_a_run_by_hand_waits_as_long_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLUXPOD_LEASE_SECONDS", "20")
    write(tmp_path / "lease.json", foreign())
    stop = Stop()
    monkeypatch.setattr(run.time, "sleep", lambda seconds: setattr(stop, "requested", True))
    assert not wait_for_lease(HeldLease(tmp_path / "lease.json", "me", lambda: None), stop)
    assert "taken over 20 s after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 60), ("20", 20), (" 17.5 ", 17.5), ("3", 15), ("-1", 15), ("soon", 60), ("nan", 60)]
)
def test_the_time_to_a_takeover_leaves_room_for_beats(text: str, seconds: float) -> None:
    assert stale_seconds({"FLUXPOD_LEASE_SECONDS": text}) == seconds
