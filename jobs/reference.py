"""Writes ``reference.yaml``, the manual of the job format, ``job.schema.json``, by which editors complete it, and
``docs/on-resume.md``, which tells of each key whether it may change.

They are made from ``schema.py`` and ``on_resume.py``: run ``python -m jobs.reference`` after a change there; a test
holds them in step.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from jobs import on_resume, rules, yaml12
from jobs.schema import ByMethod, Job, Section
from jobs.unknown import section_of

FOLDER = Path(__file__).parent
METHOD = "lora"  # of the reference; keys that have no effect with it stand there as remarks
_OFF = ("text_encoders", "layers", "validation", "ema")  # groups that a job has only where they are written
WIDTH = 110

_HEAD = """\
# yaml-language-server: $schema=job.schema.json
#
# Every key of a job. Only name, base, method and datasets must be written; the rest has these defaults. A line such as
# #epochs: 80 is switched off: remove the # to use it. Numbers may be written 0.0001 or 1e-4. Secrets never stand in a
# job: HF_TOKEN comes from the pod's environment.
#
# Made by `python -m jobs.reference` from jobs/schema.py.
"""


def reference() -> str:
    """The text of reference.yaml: a valid job with every key, its documentation, default and reason."""
    written = _written(Job, ())
    off = {finding.path for finding in rules.contradictions(written)}
    return _HEAD + "".join(_keys(Job, (), written, off)).rstrip() + "\n"


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict), "a field of a job is made with key()"
    return field.json_schema_extra


def _default(field: FieldInfo) -> Any:
    extra = _extra(field)
    return extra["by_method"][METHOD] if "by_method" in extra else field.get_default()


def _written(kind: type[Section], path: rules.Path) -> dict[str, Any]:
    """The values that the reference shows switched on."""
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        many, inner = section_of(field.annotation)
        if inner is not None:
            inside = _written(inner, (*path, name))
            if name not in _OFF and inside:
                values[name] = [inside] if many else inside
        elif _default(field) not in (None, {}, ()) and not field.is_required():
            values[name] = _default(field)
        elif field.is_required() and "by_method" in _extra(field):
            if _default(field) is not None:
                values[name] = _default(field)
        elif field.is_required() or name == "prompts":
            values[name] = _extra(field)["example"]
    return values


def _keys(
    kind: type[Section], path: rules.Path, written: dict[str, Any], off: set[rules.Path], parent_off: bool = False
) -> Iterator[str]:
    indent = "  " * len(path)
    for name, field in kind.model_fields.items():
        here = (*path, name)
        switched_off = parent_off or name not in written or here in off
        mark = "#" if switched_off else ""
        yield "\n" + _remark(field, indent)
        many, inner = section_of(field.annotation)
        if inner is None:
            example = _extra(field)["example"]
            value = written[name] if name in written else _default(field) if example is None else example
            yield f"{indent}{mark}{name}: {spelled(value)}\n"
            continue
        shown = written.get(name) or [{}]
        text = "".join(_keys(inner, here, shown[0] if many else written.get(name, {}), off, switched_off))
        empty = not re.search(r"^ *\w", text, re.MULTILINE)  # a group needs a key
        yield f"{indent}{'#' if empty else mark}{name}:\n"
        if many:
            text = _dashed(text)
        yield text.removeprefix("\n")


def _dashed(text: str) -> str:
    """The keys of a list's only entry: further in, and the first with a dash before it."""
    inner = textwrap.indent(text, "  ")
    return re.sub(r"^( *)  (#?)(?=\w)", r"\1\2- ", inner, count=1, flags=re.MULTILINE)


def _remark(field: FieldInfo, indent: str) -> str:
    extra = _extra(field)
    lines = textwrap.wrap(extra["doc"], WIDTH - len(indent))
    lines += textwrap.wrap(f"{_default_in_words(field)} {extra['why']}".strip(), WIDTH - len(indent))
    return "".join(f"{indent}# {line}\n" for line in lines)


def _default_in_words(field: FieldInfo) -> str:
    extra = _extra(field)
    if extra["left_out"]:
        return f"Left out: {extra['left_out']}."
    if "by_method" in extra:
        both = ByMethod(**extra["by_method"])
        return f"Default: {spelled(both.lora)} for lora, {spelled(both.full)} for full."
    return "Required." if field.is_required() else f"Default: {spelled(field.get_default())}."


def spelled(value: Any) -> str:
    """A value as YAML on one line, read back as the same value: 1e-4, [512, 768], a plain word, "a: b"."""
    if isinstance(value, float):
        short = re.sub(r"e([-+])0*", lambda sign: "e" + sign[1].strip("+"), f"{value:e}")
        short = re.sub(r"\.?0+e", "e", short)
        return short if 0 < abs(value) < 0.001 and float(short) == value else repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(spelled(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {spelled(each)}' for name, each in value.items())}}}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_./+-]+", value):
        return value if yaml12.parse(f"x: {value}").value["x"] == value else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


def job_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a job, as an editor needs it: required is only what a user must write."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Job.model_json_schema()
    kinds = {kind.__name__: kind for kind in _all_sections(Job)}
    for name, part in {"Job": schema, **schema["$defs"]}.items():
        required = []
        for key, field in kinds[name].model_fields.items():
            described = part["properties"][key]
            for ours in ("doc", "why", "example", "left_out", "by_method", "title"):
                described.pop(ours, None)
            extra = _extra(field)
            described["description"] = " ".join(
                text for text in (extra["doc"], _default_in_words(field), extra["why"]) if text
            )
            if extra["example"] is not None:
                described["examples"] = [extra["example"]]
            if field.is_required() and "by_method" not in extra and not extra["left_out"]:
                required.append(key)
        part.pop("required", None)
        part |= {"required": required} if required else {}
    schema["title"] = "fluxpod job"
    schema["not"] = {"required": ["steps", "epochs"]}
    return schema


def _all_sections(kind: type[Section]) -> Iterator[type[Section]]:
    yield kind
    for field in kind.model_fields.values():
        inner = section_of(field.annotation)[1]
        if inner is not None:
            yield from _all_sections(inner)


def files() -> dict[str, str]:
    """The generated files by name."""
    schema = json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"
    return {"reference.yaml": reference(), "job.schema.json": schema, "../docs/on-resume.md": on_resume.as_markdown()}


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {(FOLDER / name).resolve()}")


if __name__ == "__main__":
    main()
