"""One run, one pod: a lease file with an owner and a counter that its owner keeps raising.

Two pods may mount one volume, locks on network volumes are doubtful, and file times are another machine's. So a lease
is judged by watching: one whose counter has not moved for STALE seconds of the watcher's own clock has no living owner.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from bootstrap.processes import boot_id, pid_space, start_time
from bootstrap.volume import read_json, remove_parts_of, write_json

RENEW = 5.0  # seconds between two beats
STALE = 60.0  # twelve missed beats: longer than a network volume has been seen to hang


@dataclass(frozen=True)
class Lease:
    owner: str  # a random name
    counter: int
    pod: str  # the platform's name of the pod, "" where there is none
    boot: str
    pid_space: str
    pid: int
    started: int | None  # of the process, see bootstrap.processes

    @classmethod
    def read(cls, path: Path) -> Lease | None:
        value = read_json(path)
        try:
            return cls(**value) if isinstance(value, dict) else None
        except TypeError:
            return None

    @classmethod
    def mine(cls, pod: str) -> Lease:
        pid = os.getpid()
        return cls(uuid.uuid4().hex, 0, pod, boot_id(), pid_space(), pid, start_time(pid))

    def _here(self) -> bool:
        return self.boot == boot_id() and self.pid_space == pid_space()

    def lives_here(self) -> bool:
        return self._here() and start_time(self.pid) == self.started

    def surely_dead(self, pod: str) -> bool:
        """Whether the owner cannot live, without watching: its process here is gone, or its container of this pod."""
        if self._here():
            return not self.lives_here()
        return bool(pod) and self.pod == pod  # a pod runs one container at a time, and this one is it


class LeaseWatch:
    """Remembers when each lease was last seen to move."""

    def __init__(self, pod: str, stale: float = STALE, clock: Callable[[], float] = time.monotonic):
        self.pod, self.stale, self.clock = pod, stale, clock
        self.seen: dict[Path, tuple[str, int, float]] = {}

    def clear(self, path: Path) -> bool:
        """Whether the lease is free; a dead owner's file is removed."""
        lease = Lease.read(path)
        if lease is None and not path.exists():
            return True
        moved = not self._unmoved(path, lease.owner if lease else "", lease.counter if lease else 0)
        if moved and not (lease and lease.surely_dead(self.pod)):
            return False
        if Lease.read(path) != lease:  # a rival was faster
            return False
        path.unlink(missing_ok=True)
        return True

    def _unmoved(self, path: Path, owner: str, counter: int) -> bool:
        last = self.seen.get(path)
        if last is None or last[:2] != (owner, counter):
            self.seen[path] = (owner, counter, self.clock())
            return False
        return self.clock() - last[2] > self.stale


class LeaseTakenError(RuntimeError):
    """Somebody else runs this job."""


class HeldLease:
    """A lease of ours, raised by a thread while the context lasts.

    ``lost`` is called once if another took it, ``beat`` with every beat.
    """

    def __init__(
        self,
        path: Path,
        pod: str,
        lost: Callable[[], None],
        beat: Callable[[], None] = lambda: None,
        renew: float = RENEW,
    ):
        self.path, self.lease, self.lost, self.beat, self.renew = path, Lease.mine(pod), lost, beat, renew
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def take(self, watch: LeaseWatch) -> None:
        """Raises LeaseTakenError where the lease is not free, or a rival was faster."""
        if not watch.clear(self.path):
            raise LeaseTakenError(f"{self.path} is held by another process or pod")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            raise LeaseTakenError(f"{self.path} was just taken by another") from None
        os.close(descriptor)
        write_json(self.path, asdict(self.lease))
        remove_parts_of(self.path)  # of an owner that was killed while it raised its counter

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        now = Lease.read(self.path)
        if now is not None and now.owner == self.lease.owner:
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._end.wait(self.renew):
            with suppress(OSError):  # a volume that hangs or is full: the next beat may come through
                now = Lease.read(self.path)
                if now is not None and now.owner != self.lease.owner:
                    self.lost()
                    return
                self.lease = replace(self.lease, counter=self.lease.counter + 1)
                write_json(self.path, asdict(self.lease))
            self.beat()
