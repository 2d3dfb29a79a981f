"""A job while it is made from another tool's file, and what becomes of every key of that file.

Each key has one fate: mapped, not needed, not supported, or not known. ``Draft`` hands them out once; a key that no
rule took is not known, and so nothing is ever dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.convert.values import Drawn, as_number, is_empty, is_off
from jobs.reference import spelled

MAPPED, NOT_NEEDED, NOT_SUPPORTED, NOT_KNOWN = "mapped", "not needed", "not supported", "not known"
FATES = (MAPPED, NOT_SUPPORTED, NOT_KNOWN, NOT_NEEDED)  # in the order of a report: what matters first

OFF = "is off, or empty"


@dataclass(frozen=True)
class Given:
    """One key of the source file."""

    key: str  # where it stands, as its file writes it: "datasets[0].subsets[1].image_dir"
    value: Any


@dataclass(frozen=True)
class Fate:
    given: Given
    kind: str  # one of FATES
    told: str  # what it became, why it is not needed, or what to do instead


Rule = Callable[["Draft", Sequence[str]], None]
"""Takes the keys it is named for, all at once, and gives each a fate."""
Table = Sequence[tuple[str, Rule]]
"""Rows of "key key key", rule."""


@dataclass
class Draft:
    """The job in the making. ``given`` holds the source's keys by the names that rules know them by."""

    given: dict[str, Given]
    gpus: int | None = None  # what the user says that the source was run on
    images: int | None = None  # items of an epoch, where the pictures can be counted
    samples: Sequence[Drawn] = ()  # the prompts to draw, where they stand in a file of their own
    job: dict[str, Any] = field(default_factory=dict)  # flat: "lora.rank" -> 16
    datasets: list[dict[str, Any]] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)  # key of the job -> what is said beside it
    notes: list[str] = field(default_factory=list)  # what concerns no key of the source
    fates: dict[str, Fate] = field(default_factory=dict)  # by Given.key
    origins: dict[str, list[Given]] = field(default_factory=dict)  # key of the job -> what it came from
    implied: set[str] = field(default_factory=set)  # keys of the job that stand for a default of the source
    # By name: other keys that say the same as the one in ``given``, and share its fate.
    alike: dict[str, list[Given]] = field(default_factory=dict)

    def follow(self, table: Table) -> None:
        for names, rule in table:
            rule(self, names.split())

    # ------------------------------------------------------------ what the source says

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a key, or ``default`` where it is absent or empty."""
        given = self.given.get(name)
        return default if given is None or is_empty(given.value) else given.value

    def on(self, name: str) -> bool:
        return not is_off(self.value(name))

    def number(self, name: str, default: float) -> float:
        """A number; what is none is told, and counts as absent."""
        value = self.value(name)
        if value is None:
            return default
        number = as_number(value)
        if number is None:
            self.not_supported([name], "This is no number. Write the value into the job by hand")
            return default
        return number

    def count(self, name: str, default: int = 0) -> int:
        return int(self.number(name, default))

    def text(self, name: str, default: str = "") -> str:
        return str(self.value(name, default)).strip()

    def below(self, group: str) -> list[str]:
        """The names of all keys of a group: optimizer_args.betas, optimizer_args.eps."""
        return [name for name in self.given if name.startswith(f"{group}.")]

    def waits(self, given: Given) -> bool:
        """Whether a rule will still come to this key, by its own name or beside one that says the same."""
        return any(given is each for each in self.given.values()) or any(given in each for each in self.alike.values())

    # ------------------------------------------------------------ what becomes of it

    def write(self, key: str, value: Any, *names: str, remark: str = "") -> None:
        """Sets a key of the job, and says so of the keys called ``names`` that it came from."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        self.job[key] = value
        if not any(name in self.given for name in names):
            self.implied.add(key)
        if remark:
            self.remarks[key] = remark
        self.origins[key] = [self.given[name] for name in names if name in self.given]
        self.mapped(names, f"{key}: {spelled(value)}")

    def mapped(self, names: Iterable[str], told: str) -> None:
        self._tell(names, MAPPED, told)

    def not_needed(self, names: Iterable[str], why: str) -> None:
        self._tell(names, NOT_NEEDED, why)

    def not_supported(self, names: Iterable[str], remedy: str) -> None:
        names = list(names)
        self._tell([name for name in names if self.value(name) is None], NOT_NEEDED, "is empty")
        self._tell(names, NOT_SUPPORTED, remedy)

    def tell(self, given: Given, kind: str, told: str) -> None:
        """The fate of one key, or of a part of one that has a row of its own."""
        self.fates.setdefault(given.key, Fate(given, kind, told))

    def _tell(self, names: Iterable[str], kind: str, told: str) -> None:
        for name in names:
            if name in self.given:
                for given in (self.given[name], *self.alike.get(name, ())):
                    self.tell(given, kind, told)

    def take_back(self, key: str, why: str) -> bool:
        """Removes a key of the job that our own loader refuses; its origins are then not supported."""
        prefixes = (f"{key}.", f"{key}[")
        dropped = [k for k in self.job if k == key or k.startswith(prefixes) or key.startswith((f"{k}.", f"{k}["))]
        for each in dropped:
            del self.job[each]
        place = re.fullmatch(r"datasets\[(\d+)\]\.(\w+).*", key)
        if place and place[2] != "path" and place[2] in self.datasets[int(place[1])]:
            del self.datasets[int(place[1])][place[2]]
            dropped.append(f"datasets[{place[1]}].{place[2]}")
        for each in dropped:
            self.remarks.pop(each, None)
            for given in self.origins.pop(each, []):
                self.fates[given.key] = Fate(given, NOT_SUPPORTED, why)
        return bool(dropped)

    def finish(self) -> None:
        for given in self.given.values():
            if is_empty(given.value):
                self.tell(given, NOT_NEEDED, "is empty")
            self.tell(given, NOT_KNOWN, "Look for its meaning in jobs/reference.yaml, and write that key by hand")


# ---------------------------------------------------------------- rules for single keys


def no_need(why: str) -> Rule:
    return lambda draft, names: draft.not_needed(names, why)


def missing(remedy: str, *harmless: Any) -> Rule:
    """Not supported where it is on. ``harmless`` are values, beside those that mean off, which change nothing."""

    def rule(draft: Draft, names: Sequence[str]) -> None:
        for name in names:
            value = draft.value(name)
            if is_off(value) or value in harmless or as_number(value) in harmless:
                draft.not_needed([name], OFF if is_off(value) else "has no effect with this value")
            else:
                draft.not_supported([name], remedy)

    return rule


def same(key: str) -> Rule:
    """A number or a text that means the same under another name."""

    def rule(draft: Draft, names: Sequence[str]) -> None:
        for name in names:
            if draft.value(name) is not None:
                draft.write(key, draft.value(name), name)

    return rule


def options(text: Any) -> dict[str, str]:
    """``["a=1", "b=2"]`` or "a=1 b=2" by name; a part without = is an option that has no value."""
    if isinstance(text, Mapping):
        return {str(name): str(value) for name, value in text.items()}
    parts = [str(part) for part in text] if isinstance(text, (list, tuple)) else _words(str(text or ""))
    return {name.strip(): value.strip().strip("\"'") for name, _, value in (part.partition("=") for part in parts)}


def _words(text: str) -> list[str]:
    return re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", text)
