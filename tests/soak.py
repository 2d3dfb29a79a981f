"""A run of flux-tiny in two processes, killed again and again at moments drawn by a seed: ``python -m tests.soak``.

Every kind of end comes: SIGKILL of one process or of all, SIGTERM to one, to all, and twice. After each it is started
again as the entrypoint starts it, from its newest whole state, until all steps are done. Then its losses, its learning
rates and the bytes of its last state must be those of a run that nobody touched.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bootstrap.flux_tiny import make_flux_tiny
from bootstrap.run_file import RunFile
from bootstrap.state import newest_whole, remove_leftovers
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import Volume, remove_parts
from entrypoint.launch import free_port
from tests.training import Trained, _train, fill_volume, finish, prepared, start, trained

PROCESSES = 2
JOB: dict[str, Any] = {"plan": {"processes": PROCESSES}, "save": {"every": 3, "states": 2, "weights": 3}}


def soak(volume: Volume, name: str, kills: int, seed: int, **keys: Any) -> dict[str, int]:
    """Raises AssertionError where the killed run differs from the other; gives how often it ended how."""
    job = JOB | keys
    straight = trained(volume, name=f"{name}-straight", **job)
    chance = random.Random(seed)
    run = prepared(volume, name=f"{name}-killed", **job)
    ends: dict[str, int] = {}
    for _ in range(kills):
        kind, delay = chance.choice(KINDS), chance.uniform(0.2, 4.0)
        ended = _start_and_end(run, kind, delay, chance)
        ends[ended] = ends.get(ended, 0) + 1
        print(f"{sum(ends.values())}: {ended} at step {_newest_step(run)}", flush=True)
        if ended == "done":  # before its kills are used up: once more from the start
            _compare(Trained(run, []), straight)
            shutil.rmtree(run.folder.states)
            run.folder.metrics.unlink()
    _compare(_finish(run), straight)
    return ends


KINDS = ("kill one", "kill all", "stop one", "stop all", "stop twice")


def _start_and_end(run: RunFile, kind: str, delay: float, chance: random.Random) -> str:
    """Starts the run where its states are, and ends it so after its first new step and ``delay``; how it ended."""
    run = _resumed(run)
    log, port = run.folder.log, free_port()
    world = [start(_train, run.folder.run_file, log=log, rank=r, size=PROCESSES, port=port) for r in range(PROCESSES)]
    before = _size(run.folder.metrics)
    deadline = time.monotonic() + 60
    while _size(run.folder.metrics) <= before and all(p.is_alive() for p in world) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(delay if kind.startswith("stop") else delay / 4)
    victims = [chance.choice(world)] if kind.endswith("one") else world
    for number in (signal.SIGTERM, signal.SIGTERM) if kind == "stop twice" else (_signal(kind),):
        for process in victims:
            with suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, number)
    if kind.startswith("kill"):
        time.sleep(0.1)
        for process in world:  # what the launcher does with those that are left
            process.kill()
    codes = finish(world, log)
    return "done" if codes == [0] * PROCESSES and _newest_step(run) >= run.plan.steps else kind


def _signal(kind: str) -> int:
    return signal.SIGKILL if kind.startswith("kill") else signal.SIGTERM


def _resumed(run: RunFile) -> RunFile:
    """What the entrypoint does at every start."""
    remove_leftovers(run.folder.states)
    remove_parts(run.folder.root, run.folder.output)
    run.folder.outcome.unlink(missing_ok=True)
    state, notes = newest_whole(run.folder.states)
    assert notes == [], notes
    run = replace(run, resume=state.path if state else None)
    run.write(run.read_items())
    return run


def _newest_step(run: RunFile) -> int:
    state, _ = newest_whole(run.folder.states)
    return state.step if state else 0


def _finish(run: RunFile) -> Trained:
    run = _resumed(run)
    log, port = run.folder.log, free_port()
    world = [start(_train, run.folder.run_file, log=log, rank=r, size=PROCESSES, port=port) for r in range(PROCESSES)]
    return Trained(run, finish(world, log))


def _compare(one: Trained, other: Trained) -> None:
    assert one.values("step") == other.values("step")
    assert one.values("lr") == other.values("lr")
    assert one.values("loss") == other.values("loss")
    last, expected = one.states[-1], other.states[-1]
    assert last.step == expected.step
    assert last.optimizer.read_bytes() == expected.optimizer.read_bytes()
    weights, others = read_tensors(last.model), read_tensors(expected.model)
    assert weights.keys() == others.keys()
    assert all(bool((weights[name] == others[name]).all()) for name in weights)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="where to work, and to look when it fails; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fluxpod-soak-") as temporary:
        folder = options.folder or Path(temporary)
        make_flux_tiny(folder / "flux-tiny", guidance=True)
        volume = fill_volume(folder / "volume", folder / "flux-tiny")
        ends = soak(volume, "soak", options.kills, options.seed, steps=options.steps)
    print(f"{options.kills} kills, seed {options.seed}: {ends}")
    print("losses, learning rates, weights and optimizer are those of the run that nobody touched, to the bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
