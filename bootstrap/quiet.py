"""Whether a dropped dataset has arrived: an upload in progress must not be trained on half."""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

QUIET = 10.0  # seconds without a change; uploads by browser and rsync touch their files every second or two
# Names that browsers, rsync, wget and the like give to files that are still coming.
PARTIAL = (".part", ".partial", ".crdownload", ".download", ".filepart", ".tmp", ".upload")


@dataclass(frozen=True)
class Look:
    """What datasets look like at one moment."""

    fingerprint: str  # of all paths, sizes and times
    arriving: str  # a file that is plainly not whole, or ""


def look_at(paths: Sequence[Path]) -> Look:
    """Names, sizes and times of all files below ``paths``. Nothing is opened but the end of zips."""
    digest, arriving = hashlib.sha256(), ""
    for root in paths:
        for file in _files(root):
            try:
                facts = file.stat()
            except OSError:
                continue
            digest.update(f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
            if file.name.lower().endswith(PARTIAL):
                arriving = arriving or f"{file} is still coming"
            elif file.suffix.lower() == ".zip" and not zipfile.is_zipfile(file):
                arriving = arriving or f"{file} is not whole yet"
    return Look(digest.hexdigest(), arriving)


def _files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    return [Path(folder) / name for folder, _, names in sorted(os.walk(root)) for name in sorted(names)]


class QuietWatch:
    """Remembers since when datasets have looked the same, on this machine's own clock."""

    def __init__(self, quiet: float = QUIET, clock: Callable[[], float] = time.monotonic):
        self.quiet, self.clock = quiet, clock
        self.since: dict[tuple[Path, ...], tuple[str, float]] = {}

    def waiting_for(self, paths: Sequence[Path]) -> str:
        """Why the datasets cannot be used yet, for people; "" when they can."""
        look, key = look_at(paths), tuple(paths)
        last = self.since.get(key)
        if last is None or last[0] != look.fingerprint:
            self.since[key] = last = (look.fingerprint, self.clock())
        if look.arriving:
            return look.arriving
        if self.clock() - last[1] < self.quiet:
            return f"the data must be unchanged for {self.quiet:.0f} s"
        return ""

    def fingerprint(self, paths: Sequence[Path]) -> str:
        last = self.since.get(tuple(paths))
        return last[0] if last else ""
