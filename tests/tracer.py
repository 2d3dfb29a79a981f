"""Every file-system call of a piece of work, seen from outside by ptrace: counted, failed, or answered with SIGKILL.

Nothing of the work is patched: what Python, its libraries and its threads ask of the kernel is what is enumerated. Only
calls about files below one folder count. Linux on x86-64 and ARM; there, failing a call is for x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import platform
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_TRACEME, _POKEUSER, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 6, 24, 0x4200, 0x420E
_SYSGOOD, _CLONE, _EXITKILL = 1, 8, 0x100000
_ALL = 0x40000000  # __WALL: threads too
_ENTRY, _EXIT = 1, 2
_ORIG_RAX, _RAX = 15 * 8, 10 * 8
_AT_FDCWD = -100

# What changes a file or makes it last, by number; "f": its first argument is an open file, "p": a path, "d": a folder
# and a path in it.
_X86 = {
    1: "f:write", 18: "f:pwrite64", 20: "f:writev", 296: "f:pwritev", 74: "f:fsync", 75: "f:fdatasync",
    77: "f:ftruncate", 285: "f:fallocate", 326: "f:copy_file_range", 2: "p:open", 257: "d:openat", 82: "p:rename",
    264: "d:renameat", 316: "d:renameat2", 87: "p:unlink", 263: "d:unlinkat", 83: "p:mkdir", 258: "d:mkdirat",
    84: "p:rmdir", 86: "p:link", 265: "d:linkat", 76: "p:truncate",
}  # fmt: skip
_ARM = {
    64: "f:write", 68: "f:pwrite64", 66: "f:writev", 70: "f:pwritev", 82: "f:fsync", 83: "f:fdatasync",
    46: "f:ftruncate", 47: "f:fallocate", 285: "f:copy_file_range", 56: "d:openat", 38: "d:renameat",
    276: "d:renameat2", 35: "d:unlinkat", 34: "d:mkdirat", 37: "d:linkat", 45: "p:truncate",
}  # fmt: skip
_CALLS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {})
CAN_FAIL = platform.machine() == "x86_64"


@dataclass
class Traced:
    """What became of a piece of work."""

    calls: list[str] = field(default_factory=list)  # "fsync step-000003/model.safetensors"
    code: int | None = None  # None: killed


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    libc.ptrace.restype = ctypes.c_long
    result = libc.ptrace(request, pid, address, data)
    if result == -1:
        raise OSError(ctypes.get_errno(), "ptrace")
    return int(result)


def can_trace() -> bool:
    """Whether this machine lets a process trace its child."""
    try:
        return bool(_CALLS) and apart(lambda: trace(lambda: 0, Path("/"))).code == 0
    except OSError:
        return False


def apart(work: Callable[[], T]) -> T:
    """Does ``work`` in a child of its own, so that its children and threads are nobody else's."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            answer: tuple[bool, Any] = (True, work())
        except BaseException as error:
            answer = (False, error if isinstance(error, OSError) else AssertionError(traceback.format_exc()))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    good, value = pickle.loads(data)
    if not good:
        raise value
    return value  # type: ignore[no-any-return]


def trace(
    work: Callable[[], int], folder: Path, kill_at: int | None = None, fail_at: tuple[int, int] | None = None
) -> Traced:
    """Does ``work`` in a child, which ends with the code it gives; counts its calls below ``folder`` from 0.

    ``kill_at``: the child dies at the entry of that call. ``fail_at``: that call is not made, and gives an errno.
    """
    pid = os.fork()
    if pid == 0:
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            os._exit(work())
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    os.waitpid(pid, _ALL)
    _ptrace(_SETOPTIONS, pid, 0, _SYSGOOD | _CLONE | _EXITKILL)
    _ptrace(_SYSCALL, pid)
    seen, info, failing = Traced(), ctypes.create_string_buffer(88), 0
    while True:
        thread, status = os.waitpid(-1, _ALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == pid:
                seen.code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
                return seen
            continue
        stopped = os.WSTOPSIG(status)
        if stopped == signal.SIGTRAP | 0x80:
            _ptrace(_SYSCALL_INFO, thread, len(info), ctypes.addressof(info))
            if info.raw[0] == _EXIT and failing == thread:
                _ptrace(_POKEUSER, thread, _RAX, -fail_at[1])  # type: ignore[index]  # failing because of it
                failing = 0
            elif info.raw[0] == _ENTRY and (call := _described(thread, info.raw, folder)):
                if kill_at == len(seen.calls):
                    os.kill(pid, signal.SIGKILL)
                elif fail_at and fail_at[0] == len(seen.calls):
                    _ptrace(_POKEUSER, thread, _ORIG_RAX, -1)
                    failing = thread
                seen.calls.append(call)
            stopped = 0
        elif stopped in (signal.SIGTRAP, signal.SIGSTOP):  # of tracing itself
            stopped = 0
        try:
            _ptrace(_SYSCALL, thread, 0, stopped)
        except ProcessLookupError:  # killed in between
            continue


def _described(pid: int, info: bytes, folder: Path) -> str:
    """The call by name and file, "" where it is none of those, or about something else."""
    number, *arguments = (int.from_bytes(info[at : at + 8], "little", signed=True) for at in range(24, 80, 8))
    kind, _, name = _CALLS.get(number, "").partition(":")
    if not name:
        return ""
    try:
        if kind == "p":
            path = Path(_text(pid, arguments[0]))
        else:
            here = _as_int(arguments[0])
            path = Path(os.readlink(f"/proc/{pid}/cwd" if here == _AT_FDCWD else f"/proc/{pid}/fd/{here}"))
            path = path / _text(pid, arguments[1]) if kind == "d" else path
    except OSError:
        return ""
    return f"{name} {path.relative_to(folder)}" if path.is_relative_to(folder) else ""


def _as_int(value: int) -> int:
    return ctypes.c_int(value & 0xFFFFFFFF).value


def _text(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(1024).split(b"\0")[0])
