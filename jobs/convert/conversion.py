"""From a file of another tool to a job: read, mapped key by key, and loaded once with our own loader."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.convert import ai_toolkit, kohya_gui, sd_datasets, sd_scripts, written
from jobs.convert.draft import NOT_NEEDED, Draft, Fate
from jobs.convert.source import GUI, TOOLKIT, Source, read_source
from jobs.convert.values import Drawn, drawn_of, prompt_lines
from jobs.load import LoadedJob, parse_job
from jobs.problem import JobError

Counter = Callable[[Sequence[str]], int | None]
"""Pictures times repeats in a folder, given as the source and as the job name it; None where it is not here."""


@dataclass(frozen=True)
class Conversion:
    text: str  # the job, which loads
    loaded: LoadedJob
    report: str
    fates: tuple[Fate, ...]


def convert(
    file: Path, *, datasets: Path | None = None, gpus: int | None = None, count: Counter | None = None
) -> Conversion:
    """The job that says what ``file`` says, as far as it can be said.

    ``datasets`` is the dataset file of sd-scripts where the training file does not name it; ``gpus`` is how many GPUs
    the source was run on. Raises JobError where the file cannot be read or trains something else than FLUX.1.
    """
    source = read_source(file, datasets)
    draft = _draft(source, gpus, count)
    title = f"{file.name} ({source.tool}, {'LoRA' if draft.job['method'] == 'lora' else 'full'})"
    head = f"Converted from {title}."
    if any(fate.kind not in (NOT_NEEDED, "mapped") for fate in draft.fates.values()):
        head += " What could not be carried over stands at the end."
    loaded = _loaded(draft, head)
    draft.notes += [f"{warning.key}: {warning.message}. {warning.remedy}." for warning in loaded.warnings]
    return Conversion(loaded.text, loaded, written.report(draft, title), tuple(draft.fates.values()))


def _draft(source: Source, gpus: int | None, count: Counter | None) -> Draft:
    if source.tool == TOOLKIT:
        given, found = ai_toolkit.given_in(source.document, source.file.name)
        draft = Draft(given, gpus)
        ai_toolkit.read_datasets(draft, found)
        draft.images = _images(draft, count)
        draft.follow(ai_toolkit.TABLE)
    else:
        gui = source.tool == GUI
        given, replaced = (kohya_gui if gui else sd_scripts).given_in(source.document)
        draft = Draft(given, gpus)
        for each in replaced:
            draft.tell(each, NOT_NEEDED, "a later key of the same name decides")
        sd_scripts.check_model(draft, source.file.name)
        draft.samples = _samples(source, draft.text("sample_prompts"))
        sd_datasets.read_datasets(draft, source.datasets)
        draft.images = _images(draft, count)
        draft.follow((*sd_scripts.TABLE, *(kohya_gui.TABLE if gui else ())))
    draft.finish()
    return draft


def _loaded(draft: Draft, head: str) -> LoadedJob:
    """The job through our own loader; what that refuses is taken back, and told, until it loads."""
    while True:
        text = written.yaml_text(draft, head)
        try:
            return parse_job(text)
        except JobError as error:
            taken = [draft.take_back(p.key, f"{p.message}. {p.remedy}") for p in error.problems]
            if not any(taken):
                raise


def _images(draft: Draft, count: Counter | None) -> int | None:
    """Items of an epoch: pictures times repeats, at each resolution."""
    if count is None:
        return None
    total = 0
    for place, entry in enumerate(draft.datasets):
        origin = [str(given.value) for given in draft.origins.get(f"datasets[{place}].path", ())]
        found = count([*origin, entry["path"]])
        if found is None:
            return None
        sizes = entry.get("resolution", draft.job.get("resolution"))
        total += found * int(entry.get("repeats", 1)) * (len(sizes) if isinstance(sizes, list) else 1)
    return total or None


# ---------------------------------------------------------------- prompts of sd-scripts, which stand in a file


def _samples(source: Source, written_there: str) -> list[Drawn]:
    """The prompts: the text itself in a file of the GUI, else those in the file that is named, where it is here."""
    if not written_there:
        return []
    path = Path(written_there.replace("\\", "/"))
    places = (path, source.folder / path, source.folder / path.name)
    try:
        file = next((place for place in places if place.is_file()), None)
    except OSError:  # prompts are no path: too long, or with strange characters
        file = None
    if file is None:
        return [drawn_of(line) for line in prompt_lines(written_there)] if source.tool == GUI else []
    try:
        return _in_file(file.read_text(encoding="utf-8-sig"), file.suffix.lower())
    except (OSError, ValueError):
        return []


def _in_file(text: str, kind: str) -> list[Drawn]:
    if kind == ".json":
        items = json.loads(text)
    elif kind == ".toml":
        table = tomllib.loads(text).get("prompt", {})
        items = [{**{k: v for k, v in table.items() if k != "subset"}, **each} for each in table.get("subset", [])]
    else:
        return [drawn_of(line) for line in prompt_lines(text)]
    return [_item(item) for item in items if isinstance(item, Mapping)]


_ITEM = {
    "width": "w",
    "height": "h",
    "sample_steps": "s",
    "seed": "d",
    "scale": "l",
    "guidance_scale": "g",
    "negative_prompt": "n",
}


def _item(item: Mapping[str, Any]) -> Drawn:
    words = [f"--{_ITEM.get(key, key)} {value}" for key, value in item.items() if key != "prompt"]
    return drawn_of(" ".join([str(item.get("prompt", "")), *words]))
