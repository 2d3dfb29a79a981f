"""Reads the file of another tool, and tells whose it is by what stands in it.

Three are known: the JSON that the kohya_ss GUI saves, the TOML of sd-scripts (``--config_file``, with the one of
``--dataset_config``), and ai-toolkit's YAML, or the JSON of its web page.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import yaml12
from jobs.problem import JobError, Problem

GUI, SCRIPTS, TOOLKIT = "kohya_ss GUI", "sd-scripts", "ai-toolkit"
KNOWN = "the JSON of the kohya_ss GUI, the TOML of sd-scripts, and ai-toolkit's YAML"
MOST_BYTES = 4 * yaml12.MOST_CHARACTERS

# Keys that tell a file of the GUI or of sd-scripts from any other: nobody trains without one of them.
_KOHYA = (
    "pretrained_model_name_or_path train_data_dir image_folder dataset_config train_batch_size max_train_steps "
    "max_train_epochs network_module network_dim optimizer_type LoRA_type output_name mixed_precision"
)
_STRANGERS = (  # other trainers' files, by keys that stand at their top
    ({"name", "base", "method", "datasets"}, "a job of fluxpod already", "Check it with fluxpod check"),
    ({"training_method", "model_type", "concepts"}, "a file of OneTrainer", ""),
    ({"model", "adapter", "optimizer"}, "a file of diffusion-pipe", ""),
    ({"--model_type", "--data_backend_config"}, "a file of SimpleTuner", ""),
)


@dataclass(frozen=True)
class Source:
    """A file that was read. ``datasets`` is the dataset file beside a training file of sd-scripts, if there is one."""

    tool: str
    file: Path
    document: Mapping[str, Any]
    datasets: Mapping[str, Any] | None = None

    @property
    def folder(self) -> Path:
        return self.file.parent


def read_source(file: Path, dataset_file: Path | None = None) -> Source:
    """Raises JobError where a file cannot be read, or is none of a tool known here; it says which it looks like."""
    document = _parse(file)
    tool = _tool(document, file)
    if tool == TOOLKIT:
        if dataset_file is not None:
            raise _wrong(file, "has its datasets inside", "Leave --dataset out")
        return Source(tool, file, document)
    named = dataset_file or _named_dataset_file(document, file)
    datasets = _parse(named) if named is not None else None
    if datasets is not None and named is not None and not _is_dataset_file(datasets):
        remedy = "It begins with [general] or [[datasets]]; give the one that --dataset_config had"
        raise _wrong(named, "is no dataset file of sd-scripts", remedy)
    return Source(tool, file, document, datasets)


def _named_dataset_file(document: Mapping[str, Any], file: Path) -> Path | None:
    """The dataset file that a training file names, where it is here: at its path, or beside the training file."""
    name = dict(top_level(document)).get("dataset_config")
    if not isinstance(name, str) or not name.strip():
        return None
    path = Path(name.strip().replace("\\", "/"))
    places = (path, file.parent / path, file.parent / path.name)
    return next((place for place in places if place.is_file()), None)


def top_level(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The keys of a training file of sd-scripts, which looks through one level of [sections] and ignores their
    names."""
    pairs: list[tuple[str, Any]] = []
    for key, value in document.items():
        pairs += value.items() if isinstance(value, Mapping) else [(key, value)]
    return pairs


def _is_dataset_file(document: Mapping[str, Any]) -> bool:
    datasets = document.get("datasets")
    return isinstance(datasets, list) and all(isinstance(each, Mapping) for each in datasets)


def _tool(document: Mapping[str, Any], file: Path) -> str:
    if isinstance(document.get("config"), Mapping) and ("job" in document or "process" in document["config"]):
        return TOOLKIT
    for keys, what, remedy in _STRANGERS:
        if keys <= document.keys():
            raise _wrong(file, f"is {what}", remedy or f"convert reads {KNOWN}")
    known = set(_KOHYA.split()) & {key for key, _ in top_level(document)}
    if not known and _is_dataset_file(document):
        remedy = f"Give the training file, and this one with it: fluxpod convert TRAINING.toml --dataset {file.name}"
        raise _wrong(file, "holds datasets only, and does not say how to train", remedy)
    if not known:
        raise _wrong(file, "is no training file of a tool known here", f"convert reads {KNOWN}")
    return GUI if file.suffix.lower() == ".json" or "LoRA_type" in document else SCRIPTS


def _parse(file: Path) -> Mapping[str, Any]:
    text = _text(file)
    kind = file.suffix.lower()
    if not text.strip():
        raise _wrong(file, "is empty", "Save it again from the tool it comes from")
    if kind == ".json" or (kind not in (".toml", ".yaml", ".yml") and text.lstrip().startswith("{")):
        document = _json(text, file)
    elif kind in (".yaml", ".yml"):
        parsed = yaml12.parse(text, file.name)
        if parsed.problems:
            raise JobError(parsed.problems)
        document = parsed.value
    elif kind == ".toml":
        document = _toml(text, file)
    else:
        raise _wrong(
            file, f"ends with {kind or 'nothing'}", f"convert reads {KNOWN}; name the file .json, .toml or .yaml"
        )
    if not isinstance(document, Mapping):
        raise _wrong(file, "holds a list or a single value, not keys with values", f"convert reads {KNOWN}")
    return document


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise _wrong(file, "is too large for a configuration", "Is it a picture, or weights?")
        return yaml12.decode(file.read_bytes(), file.name)
    except FileNotFoundError:
        raise _wrong(file, "is not there", "Check the path") from None
    except IsADirectoryError:
        raise _wrong(file, "is a folder", "Name the file in it") from None
    except OSError as error:
        raise _wrong(file, f"cannot be read: {error.strerror}", "Check who may read it") from None


def _json(text: str, file: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        remedy = "Save it again from the tool, or mend that line"
        raise JobError(
            [Problem(f"this is not JSON ({error.msg})", remedy, file=str(file), line=error.lineno, column=error.colno)]
        ) from None
    except (RecursionError, ValueError) as error:
        raise _wrong(file, f"cannot be read as JSON ({error})", "Save it again from the tool") from None


def _toml(text: str, file: Path) -> Any:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        remedy = "A Windows path needs single quotes: 'C:\\pictures'" if "\\" in text else "Mend that line"
        raise _wrong(file, f"is not TOML: {error}", remedy) from None


def _wrong(file: Path, message: str, remedy: str) -> JobError:
    return JobError([Problem(message, remedy, file=str(file))])
