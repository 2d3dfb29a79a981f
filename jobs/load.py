"""Reads a job file: parse, complete, validate. All problems are told at once, each with its line and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jobs import rules, secret, unknown, yaml12
from jobs.problem import JobError, Problem
from jobs.schema import Job
from jobs.values import shown

MOST_BYTES = 4 * yaml12.MOST_CHARACTERS


@dataclass(frozen=True)
class LoadedJob:
    job: Job
    warnings: tuple[Problem, ...]
    text: str  # as it was read, to be kept with the run

    def placed(self, problem: Problem, file: str) -> Problem:
        """The problem with the line of the job file that its key stands on: found later than the file was read."""
        if problem.file or not problem.key:
            return problem
        path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", problem.key))
        place = yaml12.parse(self.text, file).place(path)
        return replace(problem, file=file, line=place.line, column=place.column)


def load_job(path: Path) -> LoadedJob:
    """The job in ``path``.

    :raises JobError: with every problem found in it, or why it cannot be read.
    """
    try:
        if not path.is_file():
            raise JobError([_absent(path)])
        if path.stat().st_size > MOST_BYTES:
            raise JobError([Problem("the file is too large for a job", "A job is a short text", file=str(path))])
        text = read_text(path)
    except OSError as error:
        remedy = "Check the name and who may read the file"
        raise JobError([Problem(f"cannot be read: {error.strerror}", remedy, file=str(path))]) from None
    return parse_job(text, path.name)


def read_text(path: Path) -> str:
    """The text of a job file as ``load_job`` takes it: its line ends as they are, no mark of its encoding.

    :raises JobError: where it is no text; OSError where it cannot be read.
    """
    return yaml12.decode(path.read_bytes(), path.name)


def parse_job(text: str, file: str = "") -> LoadedJob:
    """The job in ``text``; ``file`` names it in messages.

    :raises JobError: with every problem found.
    """
    try:
        document = yaml12.parse(text, file)
    except JobError as error:
        raise JobError(_told([*error.problems, *_secrets(text, yaml12.Document(None), file)])) from None
    problems = [*document.problems, *_secrets(text, document, file)]
    problems += (_problem(finding, document, file) for finding in rules.contradictions(document.value))
    job = None
    try:
        job = Job.model_validate(document.value)
    except ValidationError as error:
        problems += _invalid(error.errors(include_url=False), document, file)
    if problems:
        raise JobError(_told(problems))
    assert job is not None
    warnings = [_problem(finding, document, file) for finding in rules.doubts(job)]
    return LoadedJob(job, _told(warnings), text)


def _absent(path: Path) -> Problem:
    if path.is_dir():
        return Problem("this is a folder", "Name the job file in it, such as my-job.yaml", file=str(path))
    near: list[str] = []
    if path.parent.is_dir():
        there = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml")]
        near = difflib.get_close_matches(path.name, there, n=1) or sorted(there)[:5]
    remedy = f"In that folder there is {', '.join(near)}" if near else "Check the path"
    return Problem("there is no such file", remedy, file=str(path))


def _told(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """In the order of the file, none twice, and without secrets."""
    clean = [secret.without_secrets(problem) for problem in problems]
    once = {(problem.line, problem.key, problem.message): problem for problem in clean}
    return tuple(sorted(once.values(), key=lambda problem: (problem.line or 0, problem.column or 0)))


def _key(path: yaml12.Path) -> str:
    """("datasets", 0, "path") as datasets[0].path."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _problem(finding: rules.Finding, document: yaml12.Document, file: str) -> Problem:
    place = document.place(finding.path)
    return Problem(finding.message, finding.remedy, _key(finding.path), file, place.line, place.column)


def _secrets(text: str, document: yaml12.Document, file: str) -> Iterator[Problem]:
    for index in secret.find(text):
        line = text.count("\n", 0, index) + 1
        column = index - (text.rfind("\n", 0, index) + 1) + 1
        keys = [path for path, place in document.keys.items() if place.line == line and place.column <= column]
        key = _key(keys[-1]) if keys else ""
        yield Problem("this looks like a secret, and a job is no place for one", secret.REMEDY, key, file, line, column)


# ---------------------------------------------------------------- pydantic's errors in our words


def _invalid(errors: list[ErrorDetails], document: yaml12.Document, file: str) -> Iterator[Problem]:
    meant = set()  # keys that stand there misspelled, and so are not missing
    findings = []
    for error in errors:
        if error["type"] == "extra_forbidden":
            finding, key = _unknown(error["loc"])
            findings.append(finding)
            meant.add((*error["loc"][:-1], key))
    for error in errors:
        if error["type"] == "extra_forbidden" or (error["type"] == "missing" and error["loc"] in meant):
            continue
        if error["type"] == "too_short" and error["input"]:  # pydantic counts only the entries without errors
            continue
        findings.append(rules.Finding(error["loc"], *_explained(error)))
    for finding in findings:
        yield _problem(finding, document, file)


def _unknown(path: yaml12.Path) -> tuple[rules.Finding, str]:
    """The finding about an unknown key, and the key that was meant. Its value is never shown."""
    name = str(path[-1])
    if secret.names_secret(name):
        return rules.Finding(path, "this looks like a secret, and a job is no place for one", secret.REMEDY), ""
    group = "".join("[]" if isinstance(part, int) else f".{part}" for part in path[:-1]).removeprefix(".")
    remedy, key = unknown.remedy(group, name)
    return rules.Finding(path, "unknown key", remedy), key


def _explained(error: ErrorDetails) -> tuple[str, str]:
    """Message and remedy."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    name = error["loc"][-1] if error["loc"] else ""
    if kind == "missing":
        return "is missing", f"Add it, for example {_EXAMPLES.get(str(name), f'{name}: ...')}"
    if value is None:
        return "has no value", "Write one after the colon, or delete the line"
    if kind == "job":
        return context["message"], context["remedy"]
    for limit, words in _LIMITS.items():
        if kind == limit:
            return f"{shown(value)} is out of range", f"Write a number {words} {next(iter(context.values())):g}"
    if kind in ("too_short", "tuple_type"):
        message = "is empty" if kind == "too_short" else f"{shown(value)} stands where a list is needed"
        return message, _LISTS.get(str(name), "Write a list, such as [one, two]")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        inside = "key: value, indented, one a line"
        if isinstance(name, int):
            inside = "- match: attention" if "layers" in error["loc"] else "- path: datasets/my-pictures"
        return f"{shown(value)} stands where a group of keys is needed", f"Write {inside}"
    return error["msg"], ""


_LIMITS = {
    "greater_than": "above",
    "greater_than_equal": "from",
    "less_than": "below",
    "less_than_equal": "up to",
}
_LISTS = {
    "datasets": "Write a list with one entry or more, such as - path: datasets/my-pictures",
    "layers": "Write a list of entries, such as - {match: attention, rank: 32}",
    "prompts": 'Write a list, such as ["a prompt", "another"]',
}
_EXAMPLES: Mapping[str, Any] = {
    "name": "name: my-style",
    "base": "base: black-forest-labs/FLUX.1-dev",
    "method": "method: lora",
    "datasets": "datasets: [{path: datasets/my-pictures}]",
    "path": "path: datasets/my-pictures",
    "match": "match: attention",
}
