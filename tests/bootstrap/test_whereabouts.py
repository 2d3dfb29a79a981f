"""What a process says of itself reaches who watches it, through a page that nothing else depends on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bootstrap.processes import start_time
from bootstrap.whereabouts import PATH, End, Phase, Place, Seen, Whereabouts


def test_nothing_is_said_at_first(tmp_path: Path) -> None:
    with Whereabouts.made(3) as page:
        assert page.read() == [Seen(0), Seen(1), Seen(2)]


def test_what_is_said_is_read(tmp_path: Path) -> None:
    with Whereabouts.made(2) as page:
        place = Place.take(1, {PATH: str(page.path)})
        place.enter(Phase.TRAINING, 17)
        place.move()
        place.did(2.5, 0.5, 0.25)
        place.did(1.0, 0.5, 0.0)
        place.enter(Phase.SAVING)
        other, seen = page.read()
        assert other == Seen(0)
        assert (seen.pid, seen.started) == (os.getpid(), start_time(os.getpid()))
        assert (seen.phase, seen.step, seen.moves, seen.end) == (Phase.SAVING, 17, 3, End.NONE)
        assert (seen.work, seen.seconds, seen.waited) == (3.5, 1.0, 0.25)
        assert not seen.gone
        assert seen.told() == "saving, after step 17"
        assert place.told() == "process 1, saving, after step 17"
        place.ends(End.LEFT)
        assert page.read()[1].end == End.LEFT
    assert not page.path.exists()


def test_it_shows_that_it_lives(tmp_path: Path) -> None:
    with Whereabouts.made(1) as page:
        Place.take(0, {PATH: str(page.path)})
        deadline = time.monotonic() + 60
        while page.read()[0].beats < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_another_process_says_it_too(tmp_path: Path) -> None:
    code = "from bootstrap.whereabouts import Phase, Place; Place.take(0).enter(Phase.ENCODING)"
    with Whereabouts.made(1) as page:
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {PATH: str(page.path)})
        (seen,) = page.read()
        assert seen.phase == Phase.ENCODING
        assert seen.gone


def test_where_nobody_watches_it_goes_nowhere(tmp_path: Path) -> None:
    """Without a page, with one that is gone, and with one of a launch of fewer processes."""
    with Whereabouts.made(1) as small:
        for environment in ({}, {PATH: str(tmp_path / "gone")}, {PATH: str(small.path)}):
            place = Place.take(1, environment)
            place.enter(Phase.TRAINING, 3)
            place.did(1.0, 1.0, 0.0)
            place.ends(End.LEFT)
        assert small.read() == [Seen(0)]
