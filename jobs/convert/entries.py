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
from jobs.convert.values import as_number, is_empty, is_off, path_here
from jobs.reference import spelled


@dataclass(frozen=True)
class Outcome:
    """What one value of a dataset's key becomes: its fate, and what it sets in the entry.

    With ``only_with``, a key of the entry, it is not needed where nothing sets that one.
    """

    kind: str
    told: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""
    only_with: str = ""


Row = Callable[[Any], Outcome]
Rows = Mapping[str, Row]
Level = Mapping[str, Given]
Chain = Sequence[Level]
"""The levels that reach one dataset, the outermost first."""
_WEIGHTS = (NOT_NEEDED, MAPPED, NOT_SUPPORTED)  # of a key that reaches several datasets, the last of these is told


def sets(key: str, value: Any, remark: str = "", only_with: str = "") -> Outcome:
    return Outcome(MAPPED, f"datasets[].{key}: {spelled(value)}", {key: value}, remark, only_with)


def as_text(key: str) -> Row:
    return lambda value: Outcome(NOT_NEEDED, OFF) if is_empty(value) else sets(key, str(value).strip())


def as_number_of(key: str, *, whole: bool = False, usual: float | None = None, only_with: str = "") -> Row:
    """A number; the ``usual`` one is what the entry has without it."""

    def row(value: Any) -> Outcome:
        number = as_number(value)
        if number is None:
            return Outcome(NOT_SUPPORTED, "This is no number. Write the value into the job by hand")
        if number == usual:
            return Outcome(NOT_NEEDED, "is the default here too")
        return sets(key, int(number) if whole or number.is_integer() else number, only_with=only_with)

    return row


def as_switch(key: str, value: Any = True, remark: str = "") -> Row:
    """Sets ``value`` where the key is on."""
    return lambda written: Outcome(NOT_NEEDED, OFF) if is_off(written) else sets(key, value, remark)


def as_path(key: str, folder: str) -> Row:
    return lambda value: Outcome(NOT_NEEDED, OFF) if is_empty(value) else sets(key, *path_here(str(value), folder))


def needless(why: str) -> Row:
    return lambda value: Outcome(NOT_NEEDED, why)


def unsupported(remedy: str, *harmless: Any, only_with: str = "") -> Row:
    """Not supported where it is on; ``harmless`` values change nothing."""

    def row(value: Any) -> Outcome:
        if is_off(value) or value in harmless or as_number(value) in harmless:
            return Outcome(NOT_NEEDED, OFF if is_off(value) else "has no effect with this value")
        return Outcome(NOT_SUPPORTED, remedy, only_with=only_with)

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


def entry_of(
    draft: Draft,
    path: tuple[str, str],
    chain: Chain,
    table: Rows,
    path_given: Sequence[Given],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Adds an entry to the draft, and gives the keys that made it their fates. ``path`` has its remark with it, and
    ``more`` is what the entry has besides."""
    place = f"datasets[{len(draft.datasets)}]"
    entry: dict[str, Any] = {"path": path[0], **(more or {})}
    _remark(draft, f"{place}.path", path[1])
    draft.origins[f"{place}.path"] = list(path_given)
    for given in path_given:
        _tell(draft, given, sets("path", path[0]))
    found = {name: given for name, given in effective(chain).items() if name in table}
    outcomes = {name: table[name](given.value) for name, given in found.items()}
    there = {key for outcome in outcomes.values() for key in outcome.sets}
    for name, outcome in outcomes.items():
        if outcome.only_with and outcome.only_with not in there:
            outcome = Outcome(NOT_NEEDED, f"has no effect without {outcome.only_with}")
        _tell(draft, found[name], outcome)
        entry |= outcome.sets
        for key in outcome.sets:
            draft.origins.setdefault(f"{place}.{key}", []).append(found[name])
            _remark(draft, f"{place}.{key}", outcome.remark)
    draft.datasets.append(entry)


def _tell(draft: Draft, given: Given, outcome: Outcome) -> None:
    known = draft.fates.get(given.key)
    if known is None or _WEIGHTS.index(outcome.kind) > _WEIGHTS.index(known.kind):
        draft.fates[given.key] = Fate(given, outcome.kind, outcome.told)


def _remark(draft: Draft, key: str, remark: str) -> None:
    if remark:
        draft.remarks[key] = remark


def caption_ending(value: Any) -> Outcome:
    if str(value).strip().lower().lstrip(".") in ("txt", "caption", ""):
        return Outcome(NOT_NEEDED, "name.txt and name.caption are both found")
    return Outcome(NOT_SUPPORTED, "Captions are read from name.txt or name.caption: rename the files")


REGULARISING = "regularisation images; weight says how much they count"
# Where a regularisation set becomes a dataset of its own.
REGULARISATION = "There, regularisation images repeat until they number as many as the others. Here repeats say it."


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


def join(draft: Draft) -> None:
    """Entries that differ in nothing but their resolution become one that is trained at each: the other tools have no
    shorter way to say so. What all entries agree in, of what a job can say for all, the job says."""
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
    for place, each in enumerate(joined):
        if each.sizes:
            each.entry["resolution"] = _one_or_list(sorted(each.sizes))
            draft.origins[f"datasets[{place}].resolution"] = each.origins
    _lift(draft, "resolution")
    for entry in draft.datasets:
        entry.setdefault("caption_dropout", 0)  # what the other tools do where nothing is said
    _lift(
        draft, "caption_dropout", "" if any(e["caption_dropout"] for e in draft.datasets) else "the source drops none"
    )


@dataclass
class _Joined:
    entry: dict[str, Any]
    index: int  # of the first of them
    sizes: list[int]
    origins: list[Given]


def _lift(draft: Draft, key: str, remark: str = "") -> None:
    """Makes a key in which all entries agree one of the job."""
    values = [entry.get(key) for entry in draft.datasets]
    if any(value is None or value != values[0] for value in values):
        return
    draft.job[key] = values[0]
    _remark(draft, key, remark)
    origins = [each for i in range(len(values)) for each in draft.origins.pop(f"datasets[{i}].{key}", [])]
    draft.origins[key] = origins
    if not origins:
        draft.implied.add(key)
    for given in origins:
        draft.fates[given.key] = Fate(given, MAPPED, f"{key}: {spelled(values[0])}")
    for entry in draft.datasets:
        del entry[key]


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
