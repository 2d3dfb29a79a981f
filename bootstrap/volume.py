"""The folders of a volume and of a run on it, and the one way files come to be there: whole or not at all."""

from __future__ import annotations

import glob
import itertools
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFolder:
    """``runs/<name>/``: everything one job produces, and all that the entrypoint and the trainer tell each other."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.yaml"

    @property
    def run_file(self) -> Path:
        return self.root / "run.json"

    @property
    def items(self) -> Path:
        return self.root / "items.jsonl"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def outcome(self) -> Path:
        return self.root / "outcome.json"

    @property
    def pod(self) -> Path:
        return self.root / "pod.json"

    @property
    def attention(self) -> Path:
        return self.root / "attention.json"

    @property
    def alarm(self) -> Path:
        """What is wrong with the newest samples, where they show a broken model."""
        return self.root / "alarm.json"

    @property
    def memory(self) -> Path:
        """Plans of this run that ran out of a GPU's memory; without the file the next start plans anew."""
        return self.root / "memory.json"

    @property
    def lease(self) -> Path:
        return self.root / "lease.json"

    @property
    def processes(self) -> Path:
        return self.root / "processes"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def held_out(self) -> Path:
        return self.root / "held-out.jsonl"

    @property
    def validation(self) -> Path:
        return self.root / "validation.jsonl"

    @property
    def pace(self) -> Path:
        return self.root / "pace.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """What W&B's library keeps."""
        return self.root / "wandb"

    @property
    def wandb_position(self) -> Path:
        return self.root / "wandb.json"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def states(self) -> Path:
        return self.root / "states"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def uploads(self) -> Path:
        """What of this run is on the hub, verified."""
        return self.root / "uploads.json"

    @property
    def save_now(self) -> Path:
        """A file here asks for a state after the step under way; it is removed when the state stands."""
        return self.root / "save-now"

    @property
    def pause(self) -> Path:
        """While a file is here, training rests, its state saved."""
        return self.root / "pause"


@dataclass(frozen=True)
class Volume:
    """The mounted volume, seen from its mount point."""

    root: Path

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def fetched(self) -> Path:
        """Datasets from links and from the hub."""
        return self.root / "fetched"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.runs / name)

    def create(self) -> None:
        for folder in (self.jobs, self.datasets, self.models, self.cache, self.runs):
            folder.mkdir(parents=True, exist_ok=True)

    def resolve(self, path: str) -> Path:
        """A path of a job: absolute, or relative to the volume."""
        return self.root / os.path.expanduser(path)  # pathlib's raises where there is no such user


_TOKEN = secrets.token_hex(4)  # containers of one image have the same pids, and may share a volume
_NUMBERS = itertools.count()


def own_parts() -> str:
    """What the temporary names of this process, and of no other on any machine, have in common."""
    return f"{os.getpid()}-{_TOKEN}"


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replaces ``path`` in one step: a reader, or a start after a kill, sees the old content or the new, never half."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{own_parts()}-{next(_NUMBERS)}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def remove_parts(*folders: Path) -> None:
    """Takes away what writes that were killed left in ``folders``. For their one writer: it is at no other write there
    than by ``write_atomically``."""
    _remove_strange(path for folder in folders for path in folder.glob(".*.part"))


def remove_parts_of(path: Path) -> None:
    """Takes away what killed writes of ``path`` left beside it. For its one writer."""
    _remove_strange(path.parent.glob(f".{glob.escape(path.name)}.*.part"))


def _remove_strange(parts: Iterable[Path]) -> None:
    for part in parts:
        if part.is_file() and f".{own_parts()}-" not in part.name:
            part.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Makes a rename inside ``folder`` survive a power cut. Some network file systems refuse: they order it anyway."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode("utf-8", "backslashreplace"))  # a file name need not be UTF-8; JSON has escapes


def read_json(path: Path) -> Any | None:
    """The value in ``path``, or None where the file is absent or not JSON (a foreign or damaged file is no news)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
