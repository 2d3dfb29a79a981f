"""Finding and ending what a kill left running, and nobody else's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap import processes
from bootstrap.processes import boot_id, living, pid_space, reap, record_process, start_time
from bootstrap.volume import read_json, write_json


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    ]
    with subprocess.Popen(command) as process:
        yield process
        process.kill()


def test_this_process_is_living(tmp_path: Path) -> None:
    record_process(tmp_path, "trainer-0")
    assert living(tmp_path) == {"trainer-0": os.getpid()}


def test_a_child_is_killed_and_forgotten(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    record_process(tmp_path, "child-0", child.pid)
    assert reap(tmp_path) == {"child-0": child.pid}
    assert child.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert reap(tmp_path) == {}


def test_one_that_ended_is_not_living_even_before_its_parent_looks(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    record_process(tmp_path, "child-0", child.pid)
    child.kill()
    deadline = time.monotonic() + 10
    while living(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.returncode is None  # nobody has waited for it: a zombie
    assert living(tmp_path) == {}


def others(record: dict[str, object]) -> dict[str, dict[str, object]]:
    started = record["started"]
    assert isinstance(started, int)
    return {
        "the pid of another by now": record | {"started": started - 1},
        "before the machine started anew": record | {"boot": "another"},
        "in another container": record | {"pid_space": "pid:[1]"},
        "gone before it was noted": record | {"started": None},
    }


@pytest.mark.parametrize("case", others({"started": 1}))
def test_a_record_of_another_process_harms_nobody(case: str, tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    record_process(tmp_path, "trainer-0", child.pid)
    write_json(tmp_path / "trainer-0.json", others(read_json(tmp_path / "trainer-0.json"))[case])
    assert living(tmp_path) == {}
    assert reap(tmp_path) == {}
    assert child.poll() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "7"])
def test_a_damaged_record(content: str, tmp_path: Path) -> None:
    (tmp_path / "trainer-0.json").write_text(content)
    assert reap(tmp_path) == {}


def test_no_folder_at_all(tmp_path: Path) -> None:
    assert living(tmp_path / "nowhere") == reap(tmp_path / "nowhere") == {}


def test_one_that_cannot_be_killed_is_told(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stuck in the kernel, on a network volume for example."""
    record_process(tmp_path, "trainer-1", child.pid)
    monkeypatch.setattr(processes, "KILL_LIMIT", 0.1)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    with pytest.raises(TimeoutError, match=f"trainer-1.*{child.pid}"):
        reap(tmp_path)
    assert (tmp_path / "trainer-1.json").exists(), "or the next start would not know of it"


def test_start_times(child: subprocess.Popen[bytes]) -> None:
    assert start_time(child.pid) == start_time(child.pid)
    assert start_time(2**22 + 1) is None  # beyond the kernel's largest pid
    assert start_time(os.getpid()) is not None
    assert boot_id()
    assert pid_space().startswith("pid:[")


def test_a_name_with_spaces_and_brackets(tmp_path: Path) -> None:
    """/proc/PID/stat has the program's name in its middle, whatever it is called."""
    program = tmp_path / "a) R 1 (b c"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        deadline = time.monotonic() + 10
        while b"b c" not in Path(f"/proc/{process.pid}/stat").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        plain = start_time(os.getpid())
        odd = start_time(process.pid)
        process.kill()
    assert plain is not None
    assert odd is not None
    assert 0 <= odd - plain < 3600 * os.sysconf("SC_CLK_TCK")
