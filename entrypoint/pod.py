"""What the image runs: takes the jobs of the volume in name order, one at a time, and never ends by itself."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from bootstrap.outcome import DONE, STOPPED
from bootstrap.volume import Volume
from entrypoint.launch import Stop
from entrypoint.run import run_job

LOOK_EVERY = 2.0  # seconds between two looks at the jobs folder


def watch(volume: Volume) -> int:
    """Runs what is dropped into ``jobs/`` until a signal comes. One that ended is taken again when its file changes."""
    stop = Stop()
    stop.on_signals()
    volume.create()
    print(f"watching {volume.jobs}", flush=True)
    ended: dict[Path, str] = {}
    while not stop.requested:
        for job_file in waiting_jobs(volume, ended):
            ended[job_file] = fingerprint(job_file)
            print(f"--- {job_file.name}", flush=True)
            try:
                code = run_job(job_file, volume.root, stop)
            except Exception as error:  # one job's trouble is not the pod's
                print(f"failed: {type(error).__name__}: {error}", flush=True)
                continue
            if code == STOPPED and stop.requested:
                return STOPPED
        for _ in range(10):
            if not stop.requested:
                time.sleep(LOOK_EVERY / 10)
    return DONE


def waiting_jobs(volume: Volume, ended: dict[Path, str]) -> list[Path]:
    files = sorted(
        p for p in volume.jobs.glob("*.y*ml") if p.suffix in (".yaml", ".yml") and not p.name.startswith(".")
    )
    return [file for file in files if ended.get(file) != fingerprint(file)]


def fingerprint(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
