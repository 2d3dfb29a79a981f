"""What of a run shall leave the pod, and what has: files alone decide.

``uploads.json`` in the run's folder lists what the hub was seen to hold, with hashes. It is replaced whole after each
file that was verified, so that a start after a kill sends what is missing and nothing twice. A file here that was
written anew since (its time or size differs) is missing again, and so is everything after a change of repository.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bootstrap.model_card import Picture
from bootstrap.state import MODEL_FILE
from bootstrap.volume import RunFolder, read_json, write_json
from jobs.schema import Job

MOST_PICTURES = 24  # of the newest samples: a page, not an archive
_SAMPLE = re.compile(r"step-(\d+)-(\d+)\.png")


@dataclass(frozen=True)
class Uploaded:
    """A file as the hub held it when it was verified; ``modified`` (ns) is the time of the file here."""

    sha256: str
    size: int  # bytes
    modified: int
    commit: str


@dataclass(frozen=True)
class Record:
    """``uploads.json``. ``card``: git's id of the README.md that we brought last."""

    repo: str
    files: dict[str, Uploaded] = field(default_factory=dict)  # by path in the repository
    card: str = ""

    @classmethod
    def read(cls, folder: RunFolder, repo: str) -> Record:
        """What is known of ``repo``: nothing where the run was brought elsewhere, or nowhere."""
        value: Any = read_json(folder.uploads)
        try:
            if value["repo"] != repo:
                return cls(repo)
            return cls(repo, {path: Uploaded(**file) for path, file in value["files"].items()}, str(value["card"]))
        except (TypeError, KeyError, AttributeError):
            return cls(repo)

    def write(self, folder: RunFolder) -> None:
        write_json(folder.uploads, asdict(self))

    def holds(self, path: str, file: Path) -> bool:
        """Whether ``file`` as it is now was seen on the hub as ``path``."""
        known = self.files.get(path)
        return known is not None and (known.size, known.modified) == _looks(file)

    def known_sha256(self, file: Path) -> str | None:
        """The hash of ``file`` where it was uploaded under another name, as the last state is the finished file."""
        return next(
            (known.sha256 for known in self.files.values() if (known.size, known.modified) == _looks(file)), None
        )

    def with_file(self, path: str, file: Uploaded, card: str) -> Record:
        return replace(self, files=self.files | {path: file}, card=card or self.card)


@dataclass(frozen=True)
class Piece:
    """A file that is to be uploaded. ``step`` and ``digest`` (of the job) as it says of itself."""

    path: str  # in the repository
    file: Path
    size: int
    modified: int
    step: int
    digest: str

    @classmethod
    def of(cls, path: str, file: Path) -> Piece | None:
        """None where the file is not there (any more), or is no safetensors file of this program."""
        try:
            with safe_open(file, "np") as content:
                told = content.metadata() or {}
            size, modified = _looks(file)
            return cls(path, file, size, modified, int(told.get("fluxpod.step", 0)), told.get("fluxpod.job", ""))
        except (OSError, SafetensorError, ValueError):
            return None


def _looks(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def missing(folder: RunFolder, job: Job, record: Record, finished: bool) -> list[Piece]:
    """What shall be on the hub and is not known to be: the finished file once the run is ``finished``, and states by
    step where the job asks for them."""
    lacking = _lacking(folder, job, record, finished)
    return [piece for path, file in lacking.items() if (piece := Piece.of(path, file))]


def _lacking(folder: RunFolder, job: Job, record: Record, finished: bool) -> dict[str, Path]:
    """By path in the repository: the files that are there, readable or not, and were not seen on the hub."""
    files: dict[str, Path] = {}
    if finished:
        files[f"{job.name}.safetensors"] = folder.output / f"{job.name}.safetensors"
    if job.output.states:
        files |= {state_path(job, step): file for step, file in _models(folder)}
    return {path: file for path, file in files.items() if file.exists() and not record.holds(path, file)}


def _models(folder: RunFolder) -> list[tuple[int, Path]]:
    """The weights of the states by step, told from names alone: this is asked every few seconds. What has a state's
    name is whole, since it was renamed to it."""
    found = [(path.name.removeprefix("step-"), path) for path in folder.states.glob("step-*")]
    return sorted((int(step), path / MODEL_FILE) for step, path in found if step.isdecimal())


def state_path(job: Job, step: int) -> str:
    """Below a folder: at the top only the finished file lies, which is so found without a name."""
    return f"states/{job.name}-{step:06d}.safetensors"


def all_uploaded(folder: RunFolder, job: Job) -> bool:
    """Whether the finished file as it is now, and what else the job asks for, was verified on the hub; false where the
    job asks for no upload. A pod may be deleted on it: what cannot be read now counts as not uploaded."""
    output = folder.output / f"{job.name}.safetensors"
    if job.output.hub is None or not output.exists():
        return False
    return not _lacking(folder, job, Record.read(folder, job.output.hub), finished=True)


def unreadable(folder: RunFolder, job: Job) -> list[Path]:
    """What shall be on the hub once the run is finished, is not, and cannot be brought there: files that are no
    safetensors, or cut short."""
    assert job.output.hub is not None
    lacking = _lacking(folder, job, Record.read(folder, job.output.hub), finished=True)
    return [file for path, file in lacking.items() if Piece.of(path, file) is None]


def owes_upload(folder: RunFolder, job: Job) -> bool:
    """Whether something of a finished run is not on the hub yet."""
    if job.output.hub is None:
        return False
    return bool(_lacking(folder, job, Record.read(folder, job.output.hub), finished=True))


def pictures_of(folder: RunFolder, step: int) -> list[Picture]:
    """The samples of the weights of ``step``, or of the last round before it, and those of the first, drawn before
    training, for comparison."""
    rounds: dict[int, list[Path]] = {}
    for path in sorted(folder.samples.glob("step-*.png")) if folder.samples.is_dir() else []:
        if found := _SAMPLE.fullmatch(path.name):
            rounds.setdefault(int(found[1]), []).append(path)
    steps = dict.fromkeys([max((each for each in rounds if each <= step), default=0), 0])
    return [Picture.of(each, path) for each in steps for path in rounds.get(each, ())[:MOST_PICTURES]]
