from __future__ import annotations

import pytest

from jobs.problem import JobError, Problem


def test_a_problem_says_where_what_and_what_to_do() -> None:
    problem = Problem("'fast' is not a number", "Write e.g. 1e-4", "learning_rate", "my-job.yaml", 12)
    assert str(problem) == "my-job.yaml:12: learning_rate: 'fast' is not a number. Write e.g. 1e-4."


def test_what_is_not_known_is_left_out() -> None:
    assert str(Problem("the file is empty")) == "the file is empty."
    assert str(Problem("is missing", "Add it?", "name")) == "name: is missing. Add it?"
    assert str(Problem("no", file="a.yaml")) == "a.yaml: no."


def test_an_error_tells_all_problems() -> None:
    error = JobError([Problem("one"), Problem("two")])
    assert str(error) == "one.\ntwo."
    assert [problem.message for problem in error.problems] == ["one", "two"]
    with pytest.raises(AssertionError):
        JobError([])
