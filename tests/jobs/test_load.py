from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
from jobs.load import load_job, parse_job
from jobs.problem import JobError, Problem

FOLDER = Path(jobs.__file__).parent
TOKEN = "hf_" + "aB3" * 11 + "x"
GOOD = """\
name: a
base: flux-tiny
method: lora
datasets:
  - path: datasets/a
"""


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(JobError) as caught:
        parse_job(text, "my-job.yaml")
    return caught.value.problems


def told(text: str) -> list[tuple[int | None, str]]:
    return [(problem.line, problem.key) for problem in problems(text)]


def test_a_good_job_is_loaded() -> None:
    loaded = parse_job(GOOD)
    assert loaded.job.name == "a"
    assert loaded.warnings == ()
    assert loaded.text == GOOD


def test_five_mistakes_are_told_at_once_with_their_lines() -> None:
    text = (
        "name: my style\n"
        "base: flux-tiny\n"
        "method: lora\n"
        "datasets:\n"
        "  - path: datasets/a\n"
        "    repeets: 3\n"
        "learning_rate: 1,000\n"
        "discrete_flow_shift: 3.0\n"
        "rank: 8\n"
    )
    assert told(text) == [
        (1, "name"),
        (6, "datasets[0].repeets"),
        (7, "learning_rate"),
        (8, "discrete_flow_shift"),
        (9, "rank"),
    ]
    assert all(problem.remedy and problem.file == "my-job.yaml" for problem in problems(text))
    assert "my-job.yaml:6: datasets[0].repeets: unknown key. Did you mean repeats?" in str(JobError(problems(text)))


def test_mistakes_of_reading_and_of_meaning_are_told_together() -> None:
    assert told(GOOD + "name: b\nsteps: no\n") == [(6, ""), (7, "steps")]


def test_a_misspelled_key_is_not_missing_too() -> None:
    assert told(GOOD.replace("method", "methd")) == [(3, "methd")]
    assert told(GOOD.replace("base", "model")) == [(2, "model")]


def test_what_is_missing_is_told_where_it_belongs() -> None:
    assert told("steps: 3\n") == [(1, key) for key in ("name", "base", "method", "datasets")]
    assert told(GOOD + "  - trigger: x\n") == [(6, "datasets[1].path")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("learning_rate:", "has no value"),
        ("learning_rate: -1e-4", "above 0"),
        ("learning_rate: .nan", "finite"),
        ("images_per_step: 0", "from 1"),
        ("caption_dropout: 2", "up to 1"),
        ("save:", "has no value"),
        ("save: 3", "group of keys"),
        ("sample: {prompts: [a: b]}", "in quotes"),
        ("sample: {prompts: a cat}", 'Write a list, such as ["a prompt"'),
        ("t5_mask: yes", "true or false"),
        ("optimizer: adamw", "Did you mean AdamW?"),
        ("seed: 12345678901234567890123", "too large"),
        ("lora: {targets: [1]}", "quotes"),
    ],
)
def test_every_wrong_value_has_a_remedy(line: str, words: str) -> None:
    (problem,) = problems(GOOD + line + "\n")
    assert problem.line == 6
    assert words in str(problem)
    assert problem.remedy


@pytest.mark.parametrize("datasets", ["datasets/a", "[]", "[datasets/a]", "{path: datasets/a}"])
def test_datasets_must_be_a_list_of_folders(datasets: str) -> None:
    text = GOOD.replace("datasets:\n  - path: datasets/a", f"datasets: {datasets}")
    assert "- path: datasets/my-pictures" in str(problems(text)[0])


def test_numbers_as_people_spell_them() -> None:
    for spelling in ("1e-4", "'1e-4'", '"1e-4"', "0.0001", "1E-4", "1.0e-4"):
        assert parse_job(GOOD + f"learning_rate: {spelling}\n").job.learning_rate == 0.0001


@pytest.mark.parametrize(
    "line",
    [
        f"hf_token: {TOKEN}",
        f"# {TOKEN}",
        f"seed: {TOKEN}",
        f"{TOKEN}: 1",
        f"sample: {{prompts: ['{TOKEN}']}}",
        f"a: '{TOKEN}\nb: [",
        f"vae: https://me:{TOKEN}@host/x",
        "token: something secret",
    ],
)
def test_secrets_are_errors_and_never_shown(line: str) -> None:
    found = problems(GOOD + line + "\n")
    text = "\n".join(map(str, found))
    assert "environment" in text
    assert TOKEN not in text
    assert "something secret" not in text
    assert sum("secret" in problem.message for problem in found) == 1


def test_warnings_have_lines_and_cures() -> None:
    text = GOOD.replace("flux-tiny", "me/flux") + "guidance: 3.5\nlearning_rate: 0.1\n"
    warnings = parse_job(text, "my-job.yaml").warnings
    assert [(warning.line, warning.key) for warning in warnings] == [(6, "guidance"), (7, "learning_rate")]
    assert all(warning.remedy for warning in warnings)


def test_a_doubt_about_a_default_is_told_too() -> None:
    assert [warning.key for warning in parse_job(GOOD + "steps: 20\n").warnings] == ["warmup"]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "my-job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_job(path).job.name == "a"
    for wrong, words in ((tmp_path / "my-jbo.yaml", "my-job.yaml"), (tmp_path, "folder"), (tmp_path / "a/b", "Check")):
        with pytest.raises(JobError, match=words):
            load_job(wrong)
    path.write_bytes(b"name: \x92")
    with pytest.raises(JobError, match="UTF-8"):
        load_job(path)
    path.write_bytes(os.urandom(5_000_000))
    with pytest.raises(JobError, match="too large"):
        load_job(path)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_every_job_that_comes_with_fluxpod_loads_without_warnings(path: Path) -> None:
    loaded = load_job(path)
    assert loaded.warnings == ()
    assert loaded.text.startswith("# yaml-language-server: $schema=job.schema.json\n")


def test_all_ready_to_copy_jobs_are_there() -> None:
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    assert names == {
        "reference", "style-lora", "character-lora", "checkpoint-48gb", "checkpoint-several-gpus", "smoke",
    }  # fmt: skip


def test_loading_a_job_needs_no_torch() -> None:
    program = (
        "import sys, jobs.load; print([m for m in ('torch', 'numpy', 'bootstrap', 'trainer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
