from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jobs import reference, unknown, yaml12
from jobs.load import parse_job
from jobs.schema import Job


@pytest.mark.parametrize("name", ["reference.yaml", "job.schema.json", "../docs/on-resume.md"])
def test_the_generated_files_are_up_to_date(name: str) -> None:
    text = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert text == reference.files()[name], "run `python -m jobs.reference`"


def test_the_reference_shows_every_key_of_every_group() -> None:
    text = reference.reference()
    for _, kind in unknown.sections():
        for key in kind.model_fields:
            assert re.search(rf"^ *#?(- )?#?{key}:", text, re.MULTILINE), key


def test_the_reference_is_the_job_of_the_defaults() -> None:
    written = parse_job(reference.reference()).job
    least = {key: getattr(written, key) for key in ("name", "base", "method")}
    least |= {"datasets": [{"path": written.datasets[0].path}], "sample": {"prompts": written.sample.prompts}}
    assert written == Job.model_validate(least)


@pytest.mark.parametrize("key", ["steps", "epochs", "gpus", "schedule_args", "optimizer_args", "trigger", "caption"])
def test_a_line_that_is_switched_off_can_be_switched_on(key: str) -> None:
    text = re.sub(rf"^( *)#{key}:", rf"\1{key}:", reference.reference(), flags=re.MULTILINE)
    text = text.replace("schedule: constant", "schedule: cosine")
    assert re.search(rf"^ *{key}:", text, re.MULTILINE)
    assert parse_job(text).warnings == ()


def test_the_group_plan_can_be_switched_on() -> None:
    head, plan = reference.reference().split("#plan:")
    text = head.replace("max_grad_norm: 1.0", "max_grad_norm: null") + re.sub(r"#(?=[a-z])", "", "#plan:" + plan)
    assert parse_job(text).job.plan.processes == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-4, "1e-4"),
        (1.5e-5, "1.5e-5"),
        (0.01, "0.01"),
        (3.0, "3.0"),
        (0.0, "0.0"),
        (None, "null"),
        (True, "true"),
        ([512, 768], "[512, 768]"),
        ("all", "all"),
        ("null", '"null"'),
        ("1", '"1"'),
        ("a: b", '"a: b"'),
        ({"betas": [0.9, 0.99]}, "{betas: [0.9, 0.99]}"),
    ],
)
def test_values_are_spelled_so_that_they_are_read_back(value: Any, text: str) -> None:
    assert reference.spelled(value) == text
    assert yaml12.parse(f"x: {text}").value["x"] == value


def test_the_schema_asks_only_for_what_must_be_written() -> None:
    schema = json.loads(reference.files()["job.schema.json"])
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["required"] == ["name", "base", "method", "datasets"]
    assert "required" not in schema["$defs"]["Lora"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["images_per_step"]["default"] == 4
    assert schema["properties"]["method"]["enum"] == ["lora", "full"]
    for part in (schema, *schema["$defs"].values()):
        assert all(described["description"] for described in part["properties"].values())
