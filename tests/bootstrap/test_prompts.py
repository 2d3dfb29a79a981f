"""A job's prompts in a file of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.prompts import with_prompts
from bootstrap.volume import Volume
from jobs.problem import JobError
from tests.runs import make_job


def test_the_job_has_the_prompts_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\ufeffa cat --seed 1\n# not this\na dog", encoding="utf-8")
    job = with_prompts(make_job(sample={"prompts_file": "prompts.txt", "width": 512}), Volume(tmp_path))
    drawings = [(each.prompt, each.seed, each.width) for each in job.sample.drawings]
    assert drawings == [("a cat", 1, 512), ("a dog", 42, 512)]
    assert type(job).model_validate_json(job.model_dump_json()) == job  # as run.json tells it to the trainer
    plain = make_job(sample={"prompts": ["a"]})
    assert with_prompts(plain, Volume(tmp_path)) is plain


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "prompts.txt cannot be read: No such file"),
        (b"a cat\n\xff\xfe", "is no UTF-8 text"),
        ("a cat".encode("utf-16-le"), "is no UTF-8 text .it holds zero bytes"),
        (b"a cat --seed x\na dog --sid 3", "prompts.txt:1: .*\nprompts.txt:2: "),
        (b"x" * 1_000_001, "too large for prompts"),
    ],
)
def test_a_file_that_cannot_be_used(content: bytes | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(JobError, match=told):
        with_prompts(make_job(sample={"prompts_file": "prompts.txt"}), Volume(tmp_path))
