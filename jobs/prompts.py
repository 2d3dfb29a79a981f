"""Prompts as people write them, in a job, in a file or on a command line: text, and behind it what holds for it alone.

    pprflwr in the rain --seed 7 --width 832 --height 1216 --steps 30 --guidance 4

The short options are those of sd-scripts' prompt files (--d 7 --w 832 --h 1216 --s 30 --g 4), which can be used as they
are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from jobs.problem import JobError, Problem
from jobs.values import MOST_SEED, Count, Number, Side, Text, wrong

MOST_BYTES = 1_000_000  # of a file of prompts: thousands of them
_KINDS: dict[str, TypeAdapter[Any]] = {
    "seed": TypeAdapter(Annotated[Count, Field(ge=0, le=MOST_SEED)]),
    "width": TypeAdapter(Side),
    "height": TypeAdapter(Side),
    "steps": TypeAdapter(Annotated[Count, Field(ge=1, le=1000)]),
    "guidance": TypeAdapter(Annotated[Number, Field(ge=0, le=100)]),
}
_SHORT = {"d": "seed", "w": "width", "h": "height", "s": "steps", "g": "guidance"}
_REFUSED = {
    "n": "FLUX.1 draws without a negative prompt: delete it",
    "l": "FLUX.1 is drawn with embedded guidance, not with CFG: write --guidance, 3.5 for example",
}
_OPTION = re.compile(r"(?:^|\s)--(?=[A-Za-z])")
_NAMES = ", ".join(f"--{name}" for name in _KINDS)


@dataclass(frozen=True)
class Drawing:
    """One picture to draw, with all that decides what it looks like beside the model."""

    prompt: str
    seed: int
    width: int  # pixels
    height: int
    steps: int  # of denoising
    guidance: float

    def __str__(self) -> str:
        """The settings, as they stand in a sample."""
        size = f"{self.width}x{self.height}"
        return f"seed {self.seed}, {self.steps} steps, guidance {self.guidance:g}, {size}"


def parse_prompt(text: str) -> tuple[str, dict[str, Any]]:
    """The prompt itself, and its own settings by name. Raises PydanticCustomError for what is none."""
    prompt, *options = _OPTION.split(text)
    settings = dict(_setting(option) for option in options)
    if len(settings) < len(options):
        raise wrong("a setting stands there twice", "Delete one of the two")
    if not prompt.strip():
        raise wrong("there is no prompt before the settings", "Write what to draw, then --seed 7, for example")
    return prompt.strip(), settings


def _setting(option: str) -> tuple[str, Any]:
    name, _, value = re.sub(r"[\s=]+", " ", option.strip(), count=1).partition(" ")
    ours = _SHORT.get(name, name)
    if name in _REFUSED:
        raise wrong(f"--{name} cannot be used here", _REFUSED[name])
    if ours not in _KINDS:
        near = difflib.get_close_matches(name, _KINDS, n=1)
        remedy = f"Did you mean --{near[0]}?" if near else f"Known behind a prompt are {_NAMES}"
        raise wrong(f"--{name} is not known", remedy)
    try:
        return ours, _KINDS[ours].validate_python(value)
    except ValidationError as error:
        told = error.errors()[0]
        if told["type"] == "job":
            raise wrong(f"--{name}: {told['ctx']['message']}", told["ctx"]["remedy"]) from None
        raise wrong(
            f"--{name} {value} is out of range", f"{told['msg'].replace('Input should', 'It should')}"
        ) from None


def _checked(text: str) -> str:
    parse_prompt(text)
    return text


Prompt = Annotated[Text, AfterValidator(_checked)]
_PROMPT = TypeAdapter(Prompt)


def parse_prompts(text: str, file: str) -> tuple[str, ...]:
    """The prompts of a file, one a line; empty lines and those that begin with # are none.

    :raises JobError: with every problem, ``file`` and line.
    """
    found, problems = [], []
    for number, line in _lines(text):
        try:
            found.append(_PROMPT.validate_python(line))
        except ValidationError as error:
            told = error.errors()[0]["ctx"]
            problems.append(Problem(told["message"], told["remedy"], file=file, line=number))
    if not found and not problems:
        problems.append(Problem("there is no prompt in it", "Write one a line", file=file))
    if problems:
        raise JobError(problems)
    return tuple(found)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line.strip()
