"""Looks at all pictures of a dataset: each is decoded once, and not again while it stays as it is.

What was found is remembered on the volume, by path and ``archives.stamp``. A remembered digest that is wrong all the
same (a volume that keeps no times) is found out when the picture is encoded: its bytes are hashed then.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import PIL

from bootstrap.archives import stamp
from bootstrap.images import VERSION, ImageError, ImageFacts, inspect
from bootstrap.volume import own_parts, read_json, write_atomically

# Threads: each holds one decoded picture. More than there are CPUs, since a network volume answers late.
AT_ONCE = 16
WRITE_SECONDS = 60.0  # between two writes of what is remembered: so much a kill can cost
# A file that was written less than this before the scan began may be written again without its times showing it.
SETTLED = 2.0
WHAT_DECODES = f"{VERSION} pillow {PIL.__version__}"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Found:
    """One file that was looked at."""

    path: Path
    facts: ImageFacts | None  # None for what is no picture and does not claim to be one
    problem: str = ""  # why it cannot be used; "" where it can


class Remembered:
    """What is known of the pictures below one dataset, in one file; use as a context manager, which writes it.

    Unless ``writes`` it is only read. The file belongs to all jobs with that dataset: the last one to write wins, and
    what it did not know is looked at again some time.
    """

    def __init__(self, file: Path, root: Path, *, writes: bool) -> None:
        self.file, self.root, self.writes = file, root, writes
        self._known = _read(file)
        self._now: dict[str, list[Any]] = {}
        self._settled = _clock_of(file.parent) - int(SETTLED * 1e9) if writes else 0
        self._written = time.monotonic()

    def look(self, path: Path) -> Found:
        """Inspects a picture, or tells what is known of it. For any number of threads."""
        name = os.fspath(path.relative_to(self.root))
        try:
            found = stamp(path)
        except OSError as error:
            return Found(path, None, f"cannot be read ({error.strerror})")
        known = self._known.get(name)
        if known is not None and known[: len(found.marks)] == list(found.marks):
            self._now[name] = known
            digest, width, height, notes, transparent, black = known[len(found.marks) :]
            return Found(path, ImageFacts(digest, width, height, tuple(notes), transparent, black))
        try:
            facts = inspect(path)
        except ImageError as error:
            return Found(path, None, str(error))
        if facts is not None and found.written < self._settled:
            about = [facts.digest, facts.width, facts.height, list(facts.notes), facts.transparent, facts.black]
            self._now[name] = [*found.marks, *about]
        return Found(path, facts)

    def write(self, *, whole: bool) -> None:
        """``whole``: everything was looked at, so that what was not there any more is forgotten."""
        if not self.writes:
            return
        images = self._now.copy() if whole else self._known | self._now
        if images != self._known:
            write_atomically(self.file, json.dumps({"decoded_by": WHAT_DECODES, "images": images}))
            self._known = images
        self._written = time.monotonic()

    def write_now_and_then(self) -> None:
        if time.monotonic() - self._written > WRITE_SECONDS:
            self.write(whole=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.write(whole=kind is None)


def _read(file: Path) -> dict[str, list[Any]]:
    value = read_json(file)
    if not isinstance(value, dict) or value.get("decoded_by") != WHAT_DECODES:
        return {}
    images: dict[str, list[Any]] = value["images"]
    return images


def _clock_of(folder: Path) -> int:
    """The time in ns by the clock of the file system, which for a network volume is another machine's."""
    folder.mkdir(parents=True, exist_ok=True)
    touched = folder / f".clock.{own_parts()}.part"
    touched.touch()
    try:
        return touched.stat().st_mtime_ns
    finally:
        touched.unlink(missing_ok=True)


def look_at_all(paths: Sequence[Path], remembered: Remembered) -> Iterator[Found]:
    """Every file, in order, several at a time; damaged ones among them."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="inspect") as pool:
        try:
            for found in in_order(pool, remembered.look, paths, 4 * AT_ONCE):
                yield found
                remembered.write_now_and_then()
        finally:
            pool.shutdown(cancel_futures=True)


def in_order(pool: ThreadPoolExecutor, function: Callable[[T], R], things: Iterable[T], depth: int) -> Iterator[R]:
    """``function`` of each thing in order, computed up to ``depth`` things ahead: no more results are held."""
    waiting: deque[Future[R]] = deque()
    for thing in things:
        waiting.append(pool.submit(function, thing))
        if len(waiting) > depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
