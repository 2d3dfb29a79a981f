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
    if os.path.isfile(root):  # false, too, of what can be no path
        return [root]
    found = []
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):  # what a link leads to may be arriving, too
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        found += [Path(folder) / name for name in names]
    return sorted(found)


class QuietWatch:
    """Remembers since when datasets have looked the same, on this machine's own clock.

    ``every``: seconds for which an earlier look is good enough; walking through a dataset on a network volume takes
    seconds.
    """

    def __init__(self, quiet: float = QUIET, clock: Callable[[], float] = time.monotonic):
        self.quiet, self.clock = quiet, clock
        self.known: dict[tuple[Path, ...], _Known] = {}

    def waiting_for(self, paths: Sequence[Path], every: float = 0.0) -> str:
        """Why the datasets cannot be used yet, for people; "" when they can."""
        known = self._look(paths, every)
        if known.look.arriving:
            return known.look.arriving
        if self.clock() - known.since < self.quiet:
            return f"the data must be unchanged for {self.quiet:.0f} s"
        return ""

    def differs(self, paths: Sequence[Path], fingerprint: str, every: float = 0.0) -> bool:
        return self._look(paths, every).look.fingerprint != fingerprint

    def fingerprint(self, paths: Sequence[Path]) -> str:
        """As of the last look; "" before the first."""
        known = self.known.get(tuple(paths))
        return known.look.fingerprint if known else ""

    def _look(self, paths: Sequence[Path], every: float) -> _Known:
        key, last = tuple(paths), self.known.get(tuple(paths))
        if last and every and self.clock() - last.looked < every:
            return last
        look, now = look_at(paths), self.clock()
        same = last is not None and last.look.fingerprint == look.fingerprint
        self.known[key] = known = _Known(look, last.since if last and same else now, now)
        return known


@dataclass(frozen=True)
class _Known:
    look: Look
    since: float  # when it first looked like this
    looked: float  # when it was looked at last
