"""``run.json``: the resolved job, plan and weights, which is all that the trainer is told. It holds no secret."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from bootstrap.dataset import Item
from bootstrap.plan import Plan
from bootstrap.volume import RunFolder, Volume, write_atomically
from bootstrap.weights import Weights
from jobs.schema import Job


@dataclass(frozen=True)
class RunFile:
    job: Job
    plan: Plan
    weights: Weights
    volume: Path  # the mount point
    resume: Path | None = None  # the state to go on from, verified; None starts at step 0
    assistant: Path | None = None  # the file of assistant_lora, on the volume

    @property
    def folder(self) -> RunFolder:
        return Volume(self.volume).run(self.job.name)

    @property
    def cache(self) -> Path:
        return Volume(self.volume).cache

    def write(self, items: tuple[Item, ...], held_out: tuple[Item, ...] = ()) -> Path:
        """Writes ``items.jsonl`` and ``held-out.jsonl``, then ``run.json``, into the run's folder; gives the latter's
        path."""
        for path, some in ((self.folder.items, items), (self.folder.held_out, held_out)):
            write_atomically(path, b"".join(_ITEM.dump_json(item) + b"\n" for item in some))
        write_atomically(self.folder.run_file, _RUN.dump_json(self, indent=1))
        return self.folder.run_file

    def read_items(self) -> tuple[Item, ...]:
        return read_items(self.folder.items)

    def read_held_out(self) -> tuple[Item, ...]:
        """What validation may try: never trained on."""
        return read_items(self.folder.held_out)

    @classmethod
    def read(cls, path: Path) -> RunFile:
        return _RUN.validate_json(path.read_bytes())


_RUN = TypeAdapter(RunFile)
_ITEM = TypeAdapter(Item)


def read_items(path: Path) -> tuple[Item, ...]:
    with path.open("rb") as file:
        return tuple(_ITEM.validate_json(line) for line in file)
