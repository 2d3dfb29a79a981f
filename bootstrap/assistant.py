"""``assistant_lora``: a LoRA that is on while training and off in samples and in what is saved.

A distilled base (FLUX.1-schnell) unlearns within some hundred steps of ordinary training that it draws in four steps.
A training adapter undoes the distillation for as long as it is on; what is learned beside it is used without it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bootstrap.estimate import BF16, linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.hub import RemoteFile
from bootstrap.manifest import whole
from bootstrap.outcome import AccessError
from bootstrap.volume import Volume
from jobs.problem import JobError, Problem
from jobs.schema import Job

KEY = "assistant_lora"
UNKNOWN_RANK = 16  # of one that was not fetched yet: on all linear layers, 0.2 GiB of FLUX.1's

Say = Callable[[str], None]


@dataclass(frozen=True)
class HubLora:
    """A LoRA on the hub; ``file`` is empty where it is the only one of its repository."""

    repo: str
    revision: str
    file: str

    def in_folder(self, folder: Path) -> Path:
        """The file, where its repository was fetched to ``folder``. Raises JobError."""
        there = sorted(path for path in folder.glob("**/*.safetensors") if not path.name.startswith("."))
        wanted = folder / self.file if self.file else there[0] if len(there) == 1 else None
        if wanted in there and wanted is not None:
            return wanted
        names = ", ".join(str(path.relative_to(folder)) for path in there)
        remedy = f"Write hf://{self.repo}/FILE with one of {names}, or delete {folder} to have it fetched anew"
        raise JobError([Problem(f"{folder} has no {self.file or 'single LoRA'}", remedy, KEY)])


def parse(text: str, volume: Volume) -> Path | HubLora:
    """The file on the volume, or the hub's, that ``assistant_lora`` names. Raises JobError for what is neither."""
    path = volume.resolve(text)
    if path.is_file():
        return path
    plain = text.removeprefix("hf://")
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([^/\s]+))?(?:/(.+\.safetensors))?", plain)
    if found and ".." not in text and (text != plain or not plain.endswith(".safetensors")):
        return HubLora(found[1], found[2] or "main", found[3] or "")
    remedy = "Name a .safetensors file on the volume, or one of the hub as owner/name or hf://owner/name/FILE"
    raise JobError([Problem(f"there is no file {path}", remedy, KEY)])


def find_assistant(job: Job, volume: Volume) -> Path | None:
    """The file of the job's assistant; None where it has none, or has it on the hub and not on the volume yet.

    Raises JobError for a name that leads nowhere.
    """
    if job.assistant_lora is None:
        return None
    named = parse(job.assistant_lora, volume)
    if isinstance(named, Path):
        return named
    fetched = whole(volume.models, named.repo, named.revision)
    return named.in_folder(fetched[0]) if fetched else None


def fetch_assistant(job: Job, volume: Volume, token: str | None, say: Say) -> Path | None:
    """The file of the job's assistant, fetched if need be; None where it has none. Raises JobError, AccessError,
    PodError."""
    found = find_assistant(job, volume)
    if found is not None or job.assistant_lora is None:
        return found
    from bootstrap.download import fetch_repo

    named = parse(job.assistant_lora, volume)
    assert isinstance(named, HubLora)

    def choose(repo: str, files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
        loras = [file for file in files if file.path.endswith(".safetensors")]
        chosen = [file for file in loras if file.path == named.file] if named.file else loras
        if len(chosen) == 1:
            return tuple(chosen)
        there = f"it has {', '.join(file.path for file in loras)}" if loras else "it has no .safetensors file"
        raise AccessError(f"assistant_lora: which file of {repo} is meant? Write hf://{repo}/FILE; {there}.")

    folder, _ = fetch_repo(named.repo, named.revision, volume.models, token, say, choose=choose)
    return named.in_folder(folder)


def assistant_bytes(job: Job, shape: FluxShape, volume: Volume) -> int:
    """What the assistant takes of each GPU, in bf16; a guess where it was not fetched yet. Raises JobError."""
    if job.assistant_lora is None:
        return 0
    file = find_assistant(job, volume)
    if file is None:
        return BF16 * UNKNOWN_RANK * sum(out + size for out, size in linear_layers(shape).values())
    from bootstrap.tensor_files import TensorFileError, read_header  # torch comes with it

    try:
        entries = read_header(file).tensors.values()
    except (TensorFileError, OSError) as error:
        raise JobError([Problem(f"{file} cannot be read: {error}", "Name a LoRA file", KEY)]) from error
    return BF16 * sum(math.prod(entry.shape) for entry in entries)
