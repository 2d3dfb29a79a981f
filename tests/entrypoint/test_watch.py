"""A launch that cannot go on is ended soon, by who is to blame; one that is only slow is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bootstrap.processes import start_time
from bootstrap.whereabouts import End, Phase, Seen
from entrypoint.watch import GRACE, SILENCE, UNENDING, Fallen, Watch


class Launch:
    """Processes that say what a test lets them, at a time that it lets pass."""

    def __init__(self, count: int = 2, together: bool = True, gpus: tuple[int, ...] = ()):
        own = {"pid": os.getpid(), "started": start_time(os.getpid()) or 0}
        self.seen = [Seen(number, **own) for number in range(count)]
        self.now = 0.0
        self.watch = Watch(self, gpus, together, clock=lambda: self.now)  # type: ignore[arg-type]

    def read(self) -> list[Seen]:
        return list(self.seen)

    def says(self, number: int, **what: Any) -> None:
        self.seen[number] = replace(self.seen[number], **what)

    def all_say(self, **what: Any) -> None:
        for number in range(len(self.seen)):
            self.says(number, **what)

    def passes(self, seconds: float, *, moving: tuple[int, ...] = (), silent: tuple[int, ...] = ()) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            for each in self.seen:
                beats, moves = each.beats + (each.number not in silent), each.moves + (each.number in moving)
                self.says(each.number, beats=beats, moves=moves)
            self.watch.look()


def fallen(launch: Launch, seconds: float, **how: Any) -> str:
    with pytest.raises(Fallen) as told:
        launch.passes(seconds, **how)
    return str(told.value)


def test_who_gets_further_is_left_alone() -> None:
    launch = Launch()
    launch.all_say(phase=Phase.TRAINING, step=1)
    launch.passes(3000, moving=(0, 1))
    launch.passes(3000, moving=(1,))  # the others wait for one that writes, say
    assert launch.now == 6000


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_has_its_patience(phase: Phase) -> None:
    launch = Launch()
    launch.all_say(phase=phase, step=5)
    launch.passes(phase.limit)
    told = fallen(launch, 3)
    named = f"({phase.words}, after step 5)"
    assert told == f"nothing got further for {phase.limit:.0f} s: process 0 {named}; process 1 {named}"


def test_a_long_compile_makes_nobody_patient_in_training() -> None:
    launch = Launch()
    launch.all_say(phase=Phase.COMPILING, step=0)
    launch.passes(600)
    launch.all_say(phase=Phase.TRAINING, step=1)
    launch.passes(Phase.TRAINING.limit)
    assert "nothing got further for 300 s" in fallen(launch, 3)


def test_the_most_patient_phase_counts() -> None:
    """One has begun to save; the other is still on its way there."""
    launch = Launch()
    launch.says(0, phase=Phase.SAVING, step=3)
    launch.says(1, phase=Phase.TRAINING, step=3)
    launch.passes(Phase.SAVING.limit)
    fallen(launch, 3)


def test_very_large_steps_have_more_patience() -> None:
    launch = Launch(1)
    launch.all_say(phase=Phase.TRAINING, step=1)
    for _ in range(3):
        launch.passes(100)
        launch.passes(1, moving=(0,))
    launch.passes(990)
    fallen(launch, 20)


def test_who_is_behind_is_named() -> None:
    launch = Launch(3, gpus=(0, 2, 5))
    launch.all_say(phase=Phase.TRAINING, step=10)
    launch.says(2, step=9)
    told = fallen(launch, 400)
    assert told.endswith(": the others wait for process 2 on GPU 5 (training, after step 9)")


def test_one_without_a_sign_of_life() -> None:
    launch = Launch(gpus=(4, 7))
    launch.all_say(phase=Phase.COMPILING, step=0)
    launch.passes(SILENCE, silent=(1,))
    told = fallen(launch, 2, silent=(1,))
    assert told == f"no sign of life for {SILENCE:.0f} s from process 1 on GPU 7 ({Phase.COMPILING.words})"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_stopped_one_is_called_so(child: subprocess.Popen[bytes]) -> None:
    launch = Launch(1)
    launch.says(0, pid=child.pid, started=start_time(child.pid), phase=Phase.TRAINING, step=2)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert fallen(launch, SILENCE + 2, silent=(0,)).endswith("(training, after step 2), which a signal has stopped")


def test_one_that_is_gone(child: subprocess.Popen[bytes]) -> None:
    launch = Launch(gpus=(0, 1))
    launch.all_say(phase=Phase.TRAINING, step=17)
    launch.says(1, pid=child.pid, started=start_time(child.pid))
    launch.passes(1)
    child.kill()
    child.wait()
    told = fallen(launch, GRACE + 2)
    assert told.startswith("process 1 on GPU 1 (training, after step 17) is gone without a word: it was killed")
    assert launch.now <= GRACE + 3


def test_one_that_failed_has_told_it_itself() -> None:
    """The others have their last words, then they are ended."""
    launch = Launch()
    launch.all_say(phase=Phase.TRAINING, step=17)
    launch.says(1, end=End.FAILED)
    launch.passes(GRACE - 1)
    assert fallen(launch, 3) == ""


def test_those_that_leave_in_order() -> None:
    launch = Launch()
    launch.all_say(phase=Phase.LEAVING, step=20)
    launch.passes(10)
    launch.says(0, end=End.LEFT, pid=1, started=-1)  # and is gone
    launch.passes(60)
    launch.says(1, end=End.LEFT, pid=1, started=-1)
    launch.passes(UNENDING)
    assert fallen(launch, 2) == ""  # a launcher that does not end


def test_those_that_never_came() -> None:
    launch = Launch()
    launch.says(1, pid=0, started=0)
    launch.says(0, phase=Phase.MEETING)
    launch.passes(Phase.STARTING.limit)
    assert "the others wait for process 1 (starting)" in fallen(launch, 3)


def test_encoders_wait_for_nobody(child: subprocess.Popen[bytes]) -> None:
    launch = Launch(together=False)
    launch.all_say(phase=Phase.ENCODING)
    launch.says(0, end=End.FAILED)
    launch.passes(Phase.ENCODING.limit, moving=(1,))
    launch.passes(Phase.ENCODING.limit)
    assert fallen(launch, 3).endswith("s: process 1 (encoding)")


def test_an_encoder_that_is_done_keeps_nobody_waiting(child: subprocess.Popen[bytes]) -> None:
    launch = Launch(together=False)
    launch.all_say(phase=Phase.ENCODING)
    launch.says(0, pid=child.pid, started=start_time(child.pid))
    child.kill()
    child.wait()
    launch.passes(3 * Phase.ENCODING.limit, moving=(1,), silent=(0,))


def test_a_machine_that_was_suspended_wakes_up_patient() -> None:
    launch = Launch()
    launch.all_say(phase=Phase.TRAINING, step=1)
    launch.now += 86400
    launch.watch.look()
    launch.passes(100)


def test_looking_costs_little() -> None:
    launch = Launch(8)
    begun = time.process_time()
    launch.passes(1000, moving=tuple(range(8)))
    assert time.process_time() - begun < 5
