"""The job as YAML that a person would have written, and the report of what became of every key."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobs import secret
from jobs.convert.draft import FATES, MAPPED, NOT_KNOWN, NOT_NEEDED, NOT_SUPPORTED, Draft, Fate
from jobs.reference import spelled
from jobs.schema import DatasetEntry, Job, complete
from jobs.unknown import section_of
from jobs.values import shown

WIDTH = 110
_COLUMN = 40  # where remarks begin, if the line is that short
_ALWAYS = ("name", "base", "method", "images_per_step", "learning_rate")  # a job without them reads like a riddle
# Keys that stand together, by the first of each group; the order is the schema's.
_BREAKS = ("datasets", "steps", "epochs", "learning_rate", "timestep_sampling", "save", "sample", "output", "plan")


def yaml_text(draft: Draft, title: str) -> str:
    """The job in the schema's order, with remarks beside it and, at the end, what was not carried over."""
    head = [f"# {line}" for line in textwrap.wrap(title, WIDTH - 2)]
    lines = [*head, "", *_body(draft), *_left(draft)]
    return secret.hidden(_plain("\n".join(lines) + "\n"))


# What YAML cannot hold, or takes for the end of a line.
_UNPRINTABLE = re.compile("[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _plain(text: str) -> str:
    return _UNPRINTABLE.sub("?", text)


def _body(draft: Draft) -> Iterator[str]:
    job = nested(draft)
    first = True
    for key in Job.model_fields:
        if key not in job:
            continue
        if key in _BREAKS and not first and not (key == "epochs" and "steps" in job):
            yield ""
        first = False
        yield from _datasets(draft) if key == "datasets" else _lines(key, job[key], draft.remarks, "")


def nested(draft: Draft) -> dict[str, Any]:
    """The flat keys as the groups they belong to, in the schema's order; without those that stand for a default of the
    source which is ours too."""
    defaults = complete({"method": draft.job["method"]})
    job: dict[str, Any] = {"datasets": draft.datasets}
    for key, value in draft.job.items():
        group, _, name = key.partition(".")
        if name:
            job.setdefault(group, {})[name] = value
        elif key in _ALWAYS or key not in draft.implied or value != _default(key, defaults):
            job[key] = value
    for group, inside in job.items():
        kind = section_of(Job.model_fields[group].annotation)[1]
        if kind is not None and isinstance(inside, dict):
            job[group] = {name: inside[name] for name in kind.model_fields if name in inside}
    return job


def _default(key: str, defaults: Mapping[str, Any]) -> Any:
    return defaults[key] if key in defaults else Job.model_fields[key].get_default()


def _lines(key: str, value: Any, remarks: Mapping[str, str], indent: str, path: str = "") -> Iterator[str]:
    path = path or key
    if isinstance(value, dict) and value:
        yield f"{indent}{key}:"
        for name, inner in value.items():
            yield from _lines(name, inner, remarks, f"{indent}  ", f"{path}.{name}")
        return
    text = f"{indent}{key}: {spelled(value)}"
    if (isinstance(value, list) and len(text) > WIDTH - 10) or (isinstance(value, list) and key == "prompts"):
        yield from _remarked(f"{indent}{key}:", remarks.get(path, ""), indent)
        for each in value:
            yield f"{indent}  - {spelled(each)}"
        return
    yield from _remarked(text, remarks.get(path, ""), indent)


def _remarked(line: str, remark: str, indent: str) -> Iterator[str]:
    """A line with its remark behind it, or above where it is too long for that."""
    remark = " ".join(remark.split())
    if remark and max(len(line) + 3, _COLUMN) + len(remark) > WIDTH:
        yield from (f"{indent}# {part}" for part in textwrap.wrap(remark, WIDTH - len(indent) - 2))
        yield line
    else:
        yield f"{line:{_COLUMN - 3}}   # {remark}" if remark else line


def _datasets(draft: Draft) -> Iterator[str]:
    yield "datasets:"
    for place, entry in enumerate(draft.datasets):
        ordered = {key: entry[key] for key in DatasetEntry.model_fields if key in entry}
        lines = [
            line
            for key, value in ordered.items()
            for line in _lines(key, value, draft.remarks, "    ", f"datasets[{place}].{key}")
        ]
        first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
        lines[first] = "  - " + lines[first].removeprefix("    ")
        yield from lines


def _left(draft: Draft) -> Iterator[str]:
    left = [fate for fate in draft.fates.values() if fate.kind in (NOT_SUPPORTED, NOT_KNOWN)]
    if left:
        yield "\n# Not carried over:"
    for line in _by_reason(left, values=True):
        yield from textwrap.wrap(
            line, WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
        )


def _value(fate: Fate) -> str:
    """ " = 0.05", or nothing for a value that is long or secret."""
    if secret.names_secret(fate.given.key.rpartition(".")[2]):
        return ""
    if isinstance(fate.given.value, (list, tuple)):
        text = ", ".join(str(each) for each in fate.given.value)
        return f" = {text if len(text) <= 60 else text[:60] + '...'}" if text else ""
    return f" = {shown(fate.given.value)}"


def report(draft: Draft, title: str) -> str:
    """What became of every key: each in one of the four lists."""
    by_kind: dict[str, list[Fate]] = defaultdict(list)
    for fate in draft.fates.values():
        by_kind[fate.kind].append(fate)
    counts = ", ".join(f"{len(by_kind[kind])} {kind}" for kind in FATES)
    blocks = [f"{title}: {counts}."]
    for kind in FATES:
        if by_kind[kind]:
            told = [_hanging(line) for line in _by_reason(by_kind[kind], values=kind != NOT_NEEDED)]
            lines = _by_key(by_kind[kind]) if kind == MAPPED else told
            blocks.append(f"{kind}:\n" + "\n".join(lines))
    if draft.notes:
        blocks.append("note:\n" + "\n".join(_hanging(note) for note in draft.notes))
    return secret.hidden("\n\n".join(blocks))


def _by_key(fates: Sequence[Fate]) -> Iterator[str]:
    width = min(max(len(fate.given.key) for fate in fates) + 1, 42)
    for fate in fates:
        line = f"  {fate.given.key:{width}} {fate.told}"
        yield line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _by_reason(fates: Sequence[Fate], values: bool) -> Iterator[str]:
    """ "key = value, key = value: reason" for all keys that share it."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for fate in fates:
        reasons[fate.told].append(f"{fate.given.key}{_value(fate)}" if values else fate.given.key)
    for reason, keys in reasons.items():
        yield f"{', '.join(keys)}: {reason}"


def _hanging(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
