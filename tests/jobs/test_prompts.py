"""Prompts with settings of their own, in a job and in a file."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.load import parse_job
from jobs.problem import JobError
from jobs.prompts import Drawing, parse_prompts
from jobs.schema import Sample

START = "name: a\nbase: flux-tiny\nmethod: lora\ndatasets: [{path: x}]\n"


def drawing(prompt: str, **keys: Any) -> Drawing:
    return Sample.model_validate({"prompts": [prompt]} | keys).drawings[0]


def test_a_prompt_has_the_settings_of_the_job() -> None:
    assert drawing("a cat", seed=7, width=512) == Drawing("a cat", 7, 512, 1024, 24, 3.5)


def test_a_prompt_has_settings_of_its_own() -> None:
    own = Drawing("a cat", 3, 832, 1216, 30, 4.0)
    assert drawing("a cat --seed 3 --width 832 --height 1216 --steps 30 --guidance 4", seed=7) == own
    assert drawing("a cat --d 3 --w 832 --h 1216 --s 30 --g 4.0") == own
    assert drawing("a cat --seed=3 --width=832  --height  1216 --steps 30 --guidance 4") == own


def test_dashes_are_text() -> None:
    assert drawing("a well-known cat -- in a hat --9 lives").prompt == "a well-known cat -- in a hat --9 lives"


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("a cat --sede 3", "--sede is not known. Did you mean --seed?"),
        ("a cat --ar 16:9", "--ar is not known. Known behind a prompt are --seed"),
        ("a cat --n blurry", "FLUX.1 draws without a negative prompt"),
        ("a cat --width 1000", "--width: 1000 is not a multiple of 16 from 64 to 4096. Write 992"),
        ("a cat --steps 0", "--steps 0 is out of range"),
        ("a cat --seed", "--seed: '' is not a number"),
        ("a cat --seed 1 --d 2", "a setting stands there twice"),
        ("--seed 1", "there is no prompt before the settings"),
        ("a cat --seed 1 in the rain", "--seed: '1 in the rain' is not a number"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(prompt: str, told: str) -> None:
    with pytest.raises(JobError) as error:
        parse_job(f'{START}sample:\n  prompts:\n    - "a dog"\n    - "{prompt}"\n', "a.yaml")
    (problem,) = error.value.problems
    assert str(problem).startswith("a.yaml:8: sample.prompts[1]: ")
    assert told in str(problem)
    with pytest.raises(JobError) as error:
        parse_prompts(f"# what I train\na dog\n\n{prompt}\n", "prompts.txt")
    (problem,) = error.value.problems
    assert str(problem).startswith("prompts.txt:4: ")
    assert told in str(problem)


def test_a_file_of_prompts() -> None:
    assert parse_prompts("# remark\n\n a cat --seed 1 \r\na dog\n", "") == ("a cat --seed 1", "a dog")
    with pytest.raises(JobError, match="there is no prompt in it"):
        parse_prompts("\n# none\n", "prompts.txt")


def test_prompts_stand_in_one_place() -> None:
    with pytest.raises(JobError, match="both tell what to draw"):
        parse_job(f"{START}sample: {{prompts: [a], prompts_file: b.txt}}\n")
    assert parse_job(f"{START}sample: {{every: 5, prompts_file: b.txt}}\n").job.sample.prompts_file == "b.txt"
