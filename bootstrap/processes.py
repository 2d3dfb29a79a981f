"""Our own processes, recorded by pid and start time, so that what a SIGKILL left running can be found and ended.

Workers live in sessions of their own and outlive a killed launcher. A pid alone may belong to someone else by now; with
its start time it is the same process or none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from bootstrap.volume import read_json, write_json

KILL_LIMIT = 60.0  # seconds for a killed process to go: hundreds of GB of pinned memory take tens; longer, it is stuck


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where it is gone. Field 22 of /proc/PID/stat, proc(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def record_process(folder: Path, role: str, pid: int | None = None) -> None:
    """Notes a process, this one by default, in ``folder`` under its role."""
    pid = os.getpid() if pid is None else pid
    write_json(
        folder / f"{role}.json", {"pid": pid, "started": start_time(pid), "boot": boot_id(), "pid_space": pid_space()}
    )


def pid_space() -> str:
    """The pid namespace: a record made in another container says nothing about the pids of this one."""
    return os.readlink("/proc/self/ns/pid")


def living(folder: Path) -> dict[str, int]:
    """The recorded processes that still run here: role to pid."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        record = read_json(file)
        if not isinstance(record, dict):
            continue
        here = record.get("boot") == boot_id() and record.get("pid_space") == pid_space()
        if here and record.get("started") is not None and start_time(record["pid"]) == record["started"]:
            found[file.stem] = int(record["pid"])
    return found


def reap(folder: Path) -> dict[str, int]:
    """Kills the recorded processes that still run, waits until they are gone and forgets all records.

    Gives who was killed. Raises TimeoutError where one does not go within KILL_LIMIT.
    """
    victims = living(folder)
    for pid in victims.values():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + KILL_LIMIT
    while alive := living(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"left-over processes do not end, {alive}: their GPU or disk hangs. Restart the pod, or deploy another."
            )
        time.sleep(0.05)
    for file in folder.glob("*.json"):
        file.unlink(missing_ok=True)
    return victims


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Gives this process a signal when what started it ends (to the kernel: that thread). See prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, number)  # PR_SET_PDEATHSIG
