"""A run of flux-tiny in two processes, ended again and again at moments drawn by a seed: ``python -m tests.soak``.

Every kind of end comes: SIGKILL of one process or of all, one that is held by SIGSTOP, one that raises an error
wherever it is, SIGTERM to one, to all, and twice. The entrypoint's watch ends what is left, within its time and naming
whose fault it was. After each the run is started again as the entrypoint starts it, from its newest whole state, until
all steps are done. Then its losses, its learning rates and the bytes of its last state must be those of a run that
nobody touched.
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bootstrap.flux_tiny import make_flux_tiny
from bootstrap.outcome import DONE, Outcome
from bootstrap.processes import reap
from bootstrap.run_file import RunFile
from bootstrap.state import newest_whole, remove_leftovers
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import Volume, remove_parts
from bootstrap.whereabouts import PATH, Whereabouts
from entrypoint import watch
from entrypoint.launch import free_port
from entrypoint.watch import Fallen, Watch
from tests.training import Trained, _train, fill_volume, finish, prepared, start, trained

PROCESSES = 2
JOB: dict[str, Any] = {
    "plan": {"processes": PROCESSES},
    "save": {"every": 3, "states": 2, "weights": 3},
    "sample": {"every": 4, "prompts": ["a star"], "width": 64, "height": 64, "steps": 2},
}
KINDS = ("kill one", "kill all", "hold one", "raise in one", "stop one", "stop all", "stop twice")
SILENCE = 10.0  # seconds without a sign of life, in place of the product's two minutes
LIMIT = 240.0  # seconds in which everything must have ended, whatever was done to it


def soak(volume: Volume, name: str, kinds: Sequence[str], seed: int, **keys: Any) -> Counter[str]:
    """Ends the run once in each of these kinds. Raises AssertionError where it hangs, or differs from the other; gives
    how often it ended how."""
    job = JOB | keys
    straight = trained(volume, name=f"{name}-straight", **job)
    chance = random.Random(seed)
    run = prepared(volume, name=f"{name}-killed", **job)
    ends: Counter[str] = Counter()
    for kind in kinds:
        ended = _start_and_end(run, kind, chance)
        ends[ended] += 1
        print(f"{ends.total()}: {ended} at step {_newest_step(run)}", flush=True)
        if ended == "done":  # before its ends are used up: once more from the start
            _compare(Trained(run, []), straight)
            shutil.rmtree(run.folder.states)
            run.folder.metrics.unlink()
    _compare(_finish(run), straight)
    return ends


def _start_and_end(run: RunFile, kind: str, chance: random.Random) -> str:
    """Starts the run where its states are, and ends it so some time after its first new step; how it ended."""
    run, before = _resumed(run), _size(run.folder.metrics)
    with Whereabouts.made(PROCESSES) as whereabouts:
        watch = Watch(whereabouts, (), together=True)
        world = _world(run, whereabouts.path)
        deadline = time.monotonic() + LIMIT
        while _size(run.folder.metrics) <= before and all(p.is_alive() for p in world):
            assert time.monotonic() < deadline, run.folder.log.read_text(errors="replace")
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 1.0))
        victims = [chance.randrange(PROCESSES)] if kind.endswith("one") else list(range(PROCESSES))
        for number in SIGNALS[kind]:
            for victim in victims:
                if world[victim].is_alive():
                    os.kill(world[victim].pid, number)
        told = _watched(world, watch, run)
    for process in world:
        process.join()
    outcome = Outcome.read(run.folder.outcome)
    if outcome and outcome.code == DONE and _newest_step(run) >= run.plan.steps:  # it was faster
        return "done"
    if kind in ("kill one", "hold one"):
        assert f"process {victims[0]} (" in told, told
    if kind == "raise in one":
        assert outcome is not None, run.folder.log.read_text(errors="replace")
        assert f"(process {victims[0]}, " in outcome.reason, outcome.reason
    return kind


def _watched(world: Sequence[Any], watch: Watch, run: RunFile) -> str:
    """What the entrypoint does with a launch: looks on until it has ended, or cannot go on, and is ended. Gives who was
    lost."""
    deadline = time.monotonic() + LIMIT
    while any(process.is_alive() for process in world):
        assert time.monotonic() < deadline, f"it hangs; the log:\n{run.folder.log.read_text(errors='replace')}"
        try:
            watch.look()
        except Fallen as fallen:
            reap(run.folder.processes)
            return str(fallen)
        time.sleep(0.05)
    return watch.gone()


SIGNALS = {
    "kill one": (signal.SIGKILL,),
    "kill all": (signal.SIGKILL,),
    "hold one": (signal.SIGSTOP,),
    "raise in one": (signal.SIGUSR1,),
    "stop one": (signal.SIGTERM,),
    "stop all": (signal.SIGTERM,),
    "stop twice": (signal.SIGTERM, signal.SIGTERM),
}


class Struck(Exception):
    """Raised in a process from outside, wherever it is."""


def _strike(number: int, frame: object) -> None:
    raise Struck("struck in the middle of something")


def _train_watched(whereabouts: Path, run_file: Path) -> int | None:
    os.environ[PATH] = str(whereabouts)
    signal.signal(signal.SIGUSR1, _strike)
    return _train(run_file)


def _world(run: RunFile, whereabouts: Path) -> list[Any]:
    log, port, file = run.folder.log, free_port(), run.folder.run_file
    ranks = range(PROCESSES)
    return [start(_train_watched, whereabouts, file, log=log, rank=r, size=PROCESSES, port=port) for r in ranks]


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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--folder", type=Path, help="where to work, and to look when it fails; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fluxpod-soak-") as temporary:
        folder = options.folder or Path(temporary)
        make_flux_tiny(folder / "flux-tiny", guidance=True)
        volume = fill_volume(folder / "volume", folder / "flux-tiny")
        kinds = random.Random(options.seed).choices(options.kinds, k=options.kills)
        watch.SILENCE = SILENCE
        ends = soak(volume, "soak", kinds, options.seed, steps=options.steps)
    print(f"{options.kills} ends, seed {options.seed}: {dict(ends)}")
    print("losses, learning rates, weights and optimizer are those of the run that nobody touched, to the bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
