"""The job files on the volume: what stands in ``jobs/`` now, taken when it has stopped changing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs import yaml12
from jobs.load import LoadedJob, parse_job
from jobs.problem import JobError

ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class JobFile:
    """One job file as it is now."""

    path: Path
    text: str
    loaded: LoadedJob | None  # None where it cannot be read
    problems: str = ""

    @classmethod
    def read(cls, path: Path, data: bytes) -> JobFile:
        text = ""
        try:
            text = yaml12.decode(data, path.name)
            return cls(path, text, parse_job(text, path.name))
        except JobError as error:
            return cls(path, text, None, str(error))

    @property
    def name(self) -> str:
        return self.loaded.job.name if self.loaded else self.path.stem


class JobFolder:
    """Looks at ``jobs/`` again and again; each content of a file is read once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.seen: dict[Path, bytes] = {}  # every file at the last look
        self.arriving = True  # whether something changed since the look before
        self._read: dict[Path, tuple[bytes, JobFile]] = {}

    def look(self) -> list[JobFile]:
        """In name order those that are as they were at the last look; others may still be arriving.

        Raises OSError where the volume does not answer: that says nothing of any file, and the last look stands.
        """
        before, seen = self.seen, {}
        for path in sorted(p for p in self.folder.iterdir() if p.suffix in ENDINGS and p.name[0] != "."):
            try:
                seen[path] = path.read_bytes()
            except (FileNotFoundError, IsADirectoryError):  # removed since it was listed, or no file
                continue
        self.seen = seen
        still = {path: data for path, data in self.seen.items() if before.get(path) == data}
        self.arriving = len(still) < len(self.seen)
        known = self._read
        self._read = {
            path: known[path] if path in known and known[path][0] == data else (data, JobFile.read(path, data))
            for path, data in still.items()
        }
        return [file for _, file in self._read.values()]
