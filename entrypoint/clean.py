"""``fluxpod clean``: what may go from a volume, by size and age; removed only with ``--yes``.

Four kinds, all of them made by fluxpod: models and datasets that were fetched and that no job names any more; what is
cached and can be computed again; and of runs that are done, weights of older steps and the optimizer of the last state.
Pictures, jobs, logs, samples, outputs and whatever else lies on the volume are never touched, and nothing that a run in
progress may need.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bootstrap.bases import EMBEDDED
from bootstrap.manifest import MANIFEST, Manifest, repo_folder
from bootstrap.outcome import DONE, Outcome
from bootstrap.remote import find_fetched, is_remote, parse_hub
from bootstrap.state import OPTIMIZER_FILE, SET_ASIDE, State, best_of, list_states, thin
from bootstrap.volume import RunFolder, Volume, read_json
from jobs import yaml12
from jobs.problem import JobError

Kind = Literal["models", "datasets", "caches", "states"]
WEIGHTS = ("base", "vae", "text_encoders", "assistant_lora")  # keys of a job that name what lies in models/
KINDS: tuple[Kind, ...] = ("models", "datasets", "caches", "states")
DAYS = 7.0  # what was used within a week is likely to be used again
LEFT = 1.0  # days after which what an interrupted write left is nobody's: a save or a fetch takes minutes or hours
DAY = 86400.0
ACTIVE = ("preparing", "training", "stopping")
# Folders below cache/ that programs fill: what is known of pictures, compiled kernels, what libraries download. Not
# huggingface/ as a whole, where a login may lie, and not tmp/, which running programs use.
FOLDERS = ("parts", "pictures", "inductor", "triton", "cuda", "torch", "xdg", "huggingface/hub", "huggingface/xet")


@dataclass(frozen=True)
class Removable:
    """One thing that may go."""

    kind: Kind
    path: Path
    what: str  # in words
    size: int  # bytes that come free
    age: float  # days since it was written
    remove: Callable[[], None]


def clean(volume: Volume, *, yes: bool, days: float = DAYS, kinds: Sequence[Kind] = KINDS) -> int:
    """Prints what may go, largest first, and with ``yes`` removes it."""
    found, kept = find(volume, days, kinds, time.time())
    for line in kept:
        print(f"kept: {line}")
    if not found:
        print(f"nothing to remove that is older than {days:g} days")
        return DONE
    for each in found:
        name = each.path.relative_to(volume.root)
        print(f"{each.size / 1e9:9.3f} GB  {each.age:5.0f} days  {each.kind:6}  {name}: {each.what}")
    total = f"{sum(each.size for each in found) / 1e9:.3f} GB"
    if not yes:
        print(f"{total} may go. Nothing was removed: `fluxpod clean --yes` does it.")
        return DONE
    freed = 0
    for each in found:
        try:
            each.remove()
            freed += each.size
        except OSError as error:
            print(f"{each.path} was not removed: {error}")
    print(f"{freed / 1e9:.3f} GB removed")
    return DONE


def find(volume: Volume, days: float, kinds: Sequence[Kind], now: float) -> tuple[list[Removable], list[str]]:
    """Everything of ``kinds`` that is older than ``days``, largest first, and why other things stay."""
    runs = _runs(volume)
    active = sorted(run.root.name for run in runs if is_active(run))
    found: list[Removable] = []
    kept = []
    if active:
        names = ", ".join(active)
        kept.append(f"models, fetched datasets and caches, which {names} may be using. Clean when nothing runs.")
    if not active and ("models" in kinds or "datasets" in kinds):
        bases, datasets, unreadable = _wanted(volume)
        if unreadable:
            kept.append(f"what was fetched, since {', '.join(unreadable)} cannot be read and may name any of it")
        if "models" in kinds:
            found += _models(volume, None if unreadable else bases, now)
        if "datasets" in kinds:
            found += _datasets(volume, None if unreadable else datasets, now)
    if "caches" in kinds and not active:
        found += _caches(volume, days, now)
    if "states" in kinds:
        for run in runs:
            if run.root.name not in active:
                found += _states(run, now)
    old = [each for each in found if each.age >= days]
    return sorted(old, key=lambda each: (-each.size, str(each.path))), kept


def _runs(volume: Volume) -> list[RunFolder]:
    return [RunFolder(path) for path in _entries(volume.runs) if path.is_dir()]


def is_active(run: RunFolder) -> bool:
    """Whether the run is at work here or on another pod, or was when its pod went away (then it goes on at a start)."""
    status = read_json(run.status)
    return run.lease.exists() or (isinstance(status, dict) and status.get("phase") in ACTIVE)


# ---- models


def _models(volume: Volume, bases: set[str] | None, now: float) -> Iterator[Removable]:
    """``bases``: what jobs name; None where that is not known, and only leftovers may go."""
    for repo in _entries(volume.models):
        if repo.name in EMBEDDED and repo.is_dir():
            if bases is not None and repo.name not in bases:
                yield _tree("models", repo, "made anew where a job names it", now)
            continue
        for folder in filter(Path.is_dir, _entries(repo)):
            manifest = Manifest.read(folder)
            if manifest and not manifest.complete:
                if _age(folder, now) >= LEFT:
                    yield _tree("models", folder, "a fetch that was not finished", now)
            elif manifest and bases is not None and not _is_wanted(manifest, bases):
                what = f"{manifest.repo} ({', '.join(manifest.revisions)}), named by no job; can be fetched again"
                yield _tree("models", folder, what, now, first=folder / MANIFEST)


def _wanted(volume: Volume) -> tuple[set[str], set[str], list[str]]:
    """What the jobs on the volume name as base, VAE or encoders, and as datasets; the job files that cannot be read."""
    wanted: set[str] = set()
    datasets: set[str] = set()
    unreadable = []
    for path in _entries(volume.jobs):
        if path.suffix not in (".yaml", ".yml"):
            continue
        try:
            value: Any = yaml12.parse(yaml12.decode(path.read_bytes(), path.name), path.name).value
        except (JobError, OSError):
            unreadable.append(path.name)
            continue
        if isinstance(value, dict):
            wanted.update(_texts([value.get(key) for key in WEIGHTS]))
            datasets.update(_texts(value.get("datasets")))
    return wanted, datasets, unreadable


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _is_wanted(manifest: Manifest, bases: Iterable[str]) -> bool:
    """By its name on the hub and revision, or by a path that leads through its folder or its commit."""
    folder = manifest.repo.replace("/", "--")
    for base in bases:
        named = re.fullmatch(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/.*)?", base)
        if named and named[1] == manifest.repo and (named[2] or "main") in (*manifest.revisions, manifest.commit):
            return True
        if folder in base or manifest.commit in base:
            return True
    return False


# ---- datasets


def _datasets(volume: Volume, wanted: set[str] | None, now: float) -> Iterator[Removable]:
    """``wanted``: every text below ``datasets`` in the jobs; None where that is not known."""
    links = volume.fetched / "links"
    for path in _entries(links):
        if (path.name.startswith(".") or path.suffix == ".arrived") and _age(path, now) >= LEFT:
            yield _file("datasets", path, "a fetch that was not finished", now)
    if wanted is None:
        return
    remote = [path for path in wanted if is_remote(path)]
    used = {find_fetched(path, volume) for path in remote}
    for path in _entries(links):
        if path.suffix == ".zip" and path not in used:
            yield _file("datasets", path, "behind a link that no job names; can be fetched again", now)
    repos = {repo_folder(volume.fetched, hub.repo) for path in remote if (hub := parse_hub(path))}
    for folder in _entries(volume.fetched):
        if folder.is_dir() and "--" in folder.name and folder not in repos:
            yield _tree("datasets", folder, "of the hub, named by no job; can be fetched again", now)


# ---- caches


def _caches(volume: Volume, days: float, now: float) -> Iterator[Removable]:
    ages = {path: _age(path, now) for path in _entries(volume.cache) if path.match("shard-*.safetensors")}
    old = [path for path, age in ages.items() if age >= days]
    if old:
        what = f"{len(old)} files of encoded pictures and captions; made anew where a job needs them"
        path, size = volume.cache / "shard-*.safetensors", sum(map(_size, old))
        yield Removable("caches", path, what, size, min(ages[each] for each in old), lambda: _unlink(old))
    for path in _entries(volume.cache):
        if path.name.startswith(".shard-") and path.suffix == ".part" and _age(path, now) >= LEFT:
            yield _file("caches", path, "what an interrupted write left", now)
    for name in FOLDERS:
        folder = volume.cache / name
        if folder.is_dir() and not folder.is_symlink() and any(folder.iterdir()):
            yield _tree("caches", folder, "made or fetched anew by the programs that need it", now)


# ---- states


def _states(run: RunFolder, now: float) -> Iterator[Removable]:
    """Of a run that is done: its output stays, its newest weights and those of the lowest validation loss stay, every
    sample and number stays."""
    for leftover in _entries(run.states):
        if leftover.name.startswith(".step-") and leftover.is_dir() and _age(leftover, now) >= LEFT:
            yield _tree("states", leftover, "a save that was not finished", now)
    for folder in _entries(run.root / SET_ASIDE):
        yield _tree("states", folder, "what a run that went back to an older state had made beyond it", now)
    outcome = Outcome.read(run.outcome)
    status = read_json(run.status)
    waits = isinstance(status, dict) and status.get("phase") != "done"  # it was edited since, and is to go on
    if outcome is None or outcome.code != DONE or waits or run.states.is_symlink():
        return
    states = [state for state in list_states(run.states)[0] if not state.path.is_symlink()]
    best = best_of(states)
    for state in (state for state in states[:-1] if state is not best):
        what = f"weights of step {state.step}, of a run that is done"
        yield _tree("states", state.path, what, now, hide=True)
    for state in states[-1:]:
        if state.resumable:
            yield _optimizer(state, now)


def _optimizer(state: State, now: float) -> Removable:
    what = f"optimizer of step {state.step}, of a run that is done; without it the run cannot be made longer"
    path = state.path / OPTIMIZER_FILE
    return Removable("states", path, what, _size(path), _age(path, now), lambda: thin(state))


# ---- one thing


def _tree(
    kind: Kind, folder: Path, what: str, now: float, *, first: Path | None = None, hide: bool = False
) -> Removable:
    """A folder that goes as a whole. ``first`` is removed before the rest, so that what a kill leaves is not taken for
    whole; ``hide``: by renaming it to what the next save or clean takes away."""

    def remove() -> None:
        if first is not None:
            first.unlink(missing_ok=True)
        gone = folder.rename(folder.with_name(f".{folder.name}.old")) if hide else folder
        shutil.rmtree(gone)

    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return Removable(kind, folder, what, sum(map(_size, files)), _age(folder, now), remove)


def _file(kind: Kind, path: Path, what: str, now: float) -> Removable:
    return Removable(kind, path, what, _size(path), _age(path, now), lambda: _unlink([path]))


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    """Bytes that come free: none of a file that has another name elsewhere, as a run's output may have."""
    try:
        stat = path.stat()
    except OSError:  # gone since it was listed
        return 0
    return stat.st_size if stat.st_nlink == 1 else 0


def _age(path: Path, now: float) -> float:
    """Days since anything in it was written."""
    newest = 0.0
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        try:
            newest = max(newest, each.lstat().st_mtime)
        except OSError:
            continue
    return max(0.0, (now - newest) / DAY)


def _entries(folder: Path) -> list[Path]:
    """What lies directly in a folder, by name; nothing behind a link, which leads to what somebody else keeps."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.is_symlink())
