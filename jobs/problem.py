"""What is wrong with a job, told so that its writer can put it right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def _sentence(text: str) -> str:
    return text if not text or text[-1] in ".?!" else text + "."


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or, as a warning, one thing that will hurt."""

    message: str  # what is wrong, with the value
    remedy: str = ""  # what to do about it
    key: str = ""  # "datasets[0].path"
    file: str = ""
    line: int | None = None  # from 1
    column: int | None = None  # from 1
    excerpt: str = ""  # the source line with a caret below, where the place matters more than the key

    def __str__(self) -> str:
        place = ":".join([part for part in (self.file, "" if self.line is None else str(self.line)) if part])
        told = " ".join(_sentence(part) for part in (self.message, self.remedy) if part)
        text = ": ".join(part for part in (place, self.key, told) if part)
        return f"{text}\n{self.excerpt}" if self.excerpt else text


class JobError(Exception):
    """The job is wrong; holds every problem found, not only the first. Ends a run with code 64."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        assert self.problems, "a JobError needs at least one problem"
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)
