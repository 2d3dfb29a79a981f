"""The choices in a caption: one of its lines, one word of ``{red|green|blue}``. Pure.

``{a|b|c}`` is one of its alternatives, each as likely as the others; an alternative may be empty (``{|bright }red``)
and may hold choices of its own. ``{{`` and ``}}`` are plain braces, as in the tools people come from (inside a nested
choice ``}}`` closes two), and a backslash makes any of ``{ | } \\`` plain. A brace without its partner is plain too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

DEEPEST = 20  # choices inside choices; braces beyond are plain
_MARKS = ("{", "|", "}", "\\")


@dataclass(frozen=True)
class Choice:
    """One of several, each as likely as the others."""

    of: tuple[Parts, ...]


Parts = tuple["str | Choice", ...]  # one after another


def parse(text: str, wildcards: bool, multiline: bool) -> Parts:
    """The choices in a caption: a line first (blank ones are none), then the wildcards in it."""
    if multiline:
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if len(lines) > 1:
            return (Choice(tuple(parse(line, wildcards, False) for line in lines)),)
        text = "".join(lines)
    if not wildcards or not any(mark in text for mark in "{}\\"):
        return (text,)
    return _build(_tokens(text)[0])


def unmatched(text: str) -> bool:
    """Whether a brace in ``text`` has no partner: it is taken as plain, which may not be meant."""
    return _tokens(text)[1]


def count(parts: Parts) -> int:
    """How many texts can be chosen, those that come out alike counted apart."""
    return math.prod(sum(count(option) for option in part.of) for part in parts if isinstance(part, Choice))


def every(parts: Parts) -> Iterator[str]:
    """Every text that can be chosen, in the order of the choices; alike ones come again.

    Those of each choice are held in memory: ask ``count`` first.
    """
    of_part = [
        [part] if isinstance(part, str) else [text for option in part.of for text in every(option)] for part in parts
    ]
    return map("".join, product(*of_part))


def choose(parts: Parts, generator: np.random.Generator) -> str:
    """One text, drawn choice by choice from the left."""
    return "".join(
        part if isinstance(part, str) else choose(part.of[int(generator.integers(len(part.of)))], generator)
        for part in parts
    )


def _build(tokens: Iterable[_Token]) -> Parts:
    frames: list[list[list[str | Choice]]] = [[[]]]  # of the choices that are open: their alternatives so far
    for token in tokens:
        parts = frames[-1][-1]
        if not token.mark:
            if parts and isinstance(parts[-1], str):
                parts[-1] += token.letter
            else:
                parts.append(token.letter)
        elif token.letter == "{":
            frames.append([[]])
        elif token.letter == "|":
            frames[-1].append([])
        else:
            choice = Choice(tuple(tuple(option) for option in frames.pop()))
            frames[-1][-1].append(choice)
    return tuple(frames[0][0])


@dataclass
class _Token:
    """A letter, and whether it is a mark: ``{``, ``|`` or ``}`` of a choice."""

    letter: str
    mark: bool = False


def _tokens(text: str) -> tuple[list[_Token], bool]:
    """The letters of ``text``, and whether a brace lacks its partner."""
    tokens: list[_Token] = []
    opened: list[int] = []  # where the braces that are open at this place stand in ``tokens``
    bars: list[int] = []
    lonely, place = False, 0
    while place < len(text):
        letter, behind = text[place], text[place + 1 : place + 2]
        if (letter == "\\" and behind in _MARKS) or (letter == behind == "{") or _is_pair(text, place, len(opened)):
            tokens.append(_Token(behind))
            place += 2
            continue
        token = _Token(letter)
        if letter == "{" and len(opened) < DEEPEST:
            opened.append(len(tokens))
        elif letter == "}" and opened:
            begin = opened.pop()
            inside = [bar for bar in bars if bar > begin]
            bars = bars[: len(bars) - len(inside)]
            for mark in (tokens[begin], *(tokens[bar] for bar in inside), token):
                mark.mark = True
        elif letter == "|":
            bars.append(len(tokens))
        elif letter in "{}":
            lonely = True
        tokens.append(token)
        place += 1
    return tokens, lonely or bool(opened)


def _is_pair(text: str, place: int, depth: int) -> bool:
    """Whether ``}}`` here is a plain brace: outside of choices it is, inside two it closes both, and inside one it is
    where an even number of braces stands here (of ``}}}`` the first closes)."""
    if text[place : place + 2] != "}}" or depth >= 2:
        return False
    rest = text[place:]
    return depth == 0 or (len(rest) - len(rest.lstrip("}"))) % 2 == 0
