"""Dataset entries of a job from the datasets of another tool, whose settings fall through levels.

In sd-scripts a key of a subset wins over one of its dataset, that over ``[general]``, and that over the training
file; ai-toolkit has one level. The keys of an entry are rows of a table here too, each a function of its value alone,
so that one key, however many entries it reaches, has one fate.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.convert.draft import MAPPED, NOT_NEEDED, NOT_SUPPORTED, OFF, Draft, Fate, Given
from jobs.convert.values import as_number, is_empty, is_off
from jobs.reference import spelled


@dataclass(frozen=True)
class Outcome:
    """What one value of a dataset's key becomes: its fate, and what it sets in the entry."""

    kind: str
    told: str
    sets: Mapping[str, Any] = field(default_factory=dict)


Row = Callable[[Any], Outcome]
Rows = Mapping[str, Row]
Level = Mapping[str, Given]
Chain = Sequence[Level]
"""The levels that reach one dataset, the outermost first."""


def sets(key: str, value: Any) -> Outcome:
    return Outcome(MAPPED, f"datasets[].{key}: {spelled(value)}", {key: value})


def as_text(key: str) -> Row:
    return lambda value: Outcome(NOT_NEEDED, OFF) if is_empty(value) else sets(key, str(value))


def as_count(key: str) -> Row:
    def row(value: Any) -> Outcome:
        number = as_number(value)
        if number is None:
            return Outcome(NOT_SUPPORTED, "This is no number. Write the value into the job by hand")
        return sets(key, int(number))

    return row


def as_switch(key: str) -> Row:
    return lambda value: Outcome(NOT_NEEDED, OFF) if is_off(value) else sets(key, True)


def needless(why: str) -> Row:
    return lambda value: Outcome(NOT_NEEDED, why)


def unsupported(remedy: str, *harmless: Any) -> Row:
    """Not supported where it is on; ``harmless`` values change nothing."""

    def row(value: Any) -> Outcome:
        if is_off(value) or value in harmless or as_number(value) in harmless:
            return Outcome(NOT_NEEDED, OFF if is_off(value) else "has no effect with this value")
        return Outcome(NOT_SUPPORTED, remedy)

    return row


def rows(*table: tuple[str, Row]) -> dict[str, Row]:
    """A table of "key key key", row as a mapping of single keys."""
    return {name: row for names, row in table for name in names.split()}


def effective(chain: Chain) -> dict[str, Given]:
    """The keys that hold for a dataset: the innermost that says something."""
    found: dict[str, Given] = {}
    for level in chain:
        found |= {name: given for name, given in level.items() if not is_empty(given.value)}
    return found


def entry_of(draft: Draft, path: str, remark: str, chain: Chain, table: Rows, path_given: Sequence[Given]) -> None:
    """Adds an entry to the draft, and gives the keys that made it their fates."""
    place = f"datasets[{len(draft.datasets)}]"
    entry: dict[str, Any] = {"path": path}
    if remark:
        draft.remarks[f"{place}.path"] = remark
    for given in path_given:
        draft.tell(given, MAPPED, f"datasets[].path: {spelled(path)}")
    draft.origins[f"{place}.path"] = list(path_given)
    for name, given in effective(chain).items():
        if name in table:
            outcome = table[name](given.value)
            entry |= outcome.sets
            draft.tell(given, outcome.kind, outcome.told)
            for key in outcome.sets:
                draft.origins.setdefault(f"{place}.{key}", []).append(given)
    draft.datasets.append(entry)


def tell_unused(draft: Draft, levels: Sequence[Level], names: Container[str]) -> None:
    """Keys called ``names`` of outer levels that inner ones replace everywhere. Called when all entries are made."""
    for level in levels:
        for name, given in level.items():
            if name in names and not is_empty(given.value):
                draft.tell(given, NOT_NEEDED, "every dataset has a value of its own")


def hoist(
    draft: Draft, name: str, found: Sequence[Given], choose: Callable[[Sequence[Any]], Any] | None = None
) -> None:
    """Makes a key that datasets may differ in one of the whole job: the first value, or the one that ``choose`` picks.

    Those that are alike share its fate; others are told.
    """
    if not found:
        return
    values = [given.value for given in found]
    chosen = found[values.index(choose(values))] if choose is not None else found[0]
    if name in draft.given and draft.given[name] not in found:
        draft.tell(draft.given[name], NOT_NEEDED, "every dataset has a value of its own")
    draft.given[name] = chosen
    draft.alike[name] = [given for given in found if given.value == chosen.value and given is not chosen]
    for given in found:
        if given.value != chosen.value:
            draft.tell(given, NOT_SUPPORTED, f"One value holds for the whole job here; {spelled(chosen.value)} is used")


def join_resolutions(draft: Draft) -> None:
    """Entries that differ in nothing but their resolution become one that is trained at each: the other tools have no
    shorter way to say so. Where all entries agree, it becomes the job's."""
    joined: list[_Joined] = []
    for index, entry in enumerate(draft.datasets):
        size = entry.pop("resolution", None)
        origins = draft.origins.pop(f"datasets[{index}].resolution", [])
        sizes = [] if size is None else list(size) if isinstance(size, (list, tuple)) else [size]
        twin = next((each for each in joined if each.entry == entry and sizes and each.sizes), None)
        if twin is None:
            joined.append(_Joined(entry, index, sizes, list(origins)))
        else:
            twin.sizes += [size for size in sizes if size not in twin.sizes]
            twin.origins += origins
    _renumber(draft, [each.index for each in joined])
    draft.datasets = [each.entry for each in joined]
    agree = len({tuple(sorted(each.sizes)) for each in joined}) == 1
    for place, each in enumerate(joined):
        if each.sizes:
            key = "resolution" if agree else f"datasets[{place}].resolution"
            (draft.job if agree else each.entry)["resolution"] = _one_or_list(sorted(each.sizes))
            draft.origins.setdefault(key, []).extend(each.origins)
            for given in each.origins if agree else ():
                draft.fates[given.key] = Fate(given, MAPPED, f"resolution: {spelled(draft.job['resolution'])}")


@dataclass
class _Joined:
    entry: dict[str, Any]
    index: int  # of the first of them
    sizes: list[int]
    origins: list[Given]


def _one_or_list(sizes: Sequence[int]) -> int | list[int]:
    return sizes[0] if len(sizes) == 1 else list(sizes)


def _renumber(draft: Draft, kept: Sequence[int]) -> None:
    """Remarks and origins of the entries that stay, under their new numbers."""
    for table in (draft.remarks, draft.origins):
        moved: dict[str, Any] = {}
        for new, old in enumerate(kept):
            prefix = f"datasets[{old}]."
            moved |= {f"datasets[{new}].{k.removeprefix(prefix)}": v for k, v in table.items() if k.startswith(prefix)}
        for key in [key for key in table if key.startswith("datasets[")]:
            del table[key]
        table |= moved
