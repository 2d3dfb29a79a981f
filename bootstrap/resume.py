"""Which state a run goes on from, and what of an edited job it cannot take along."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap.estimate import linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import adapters_of
from bootstrap.run_file import RunFile
from bootstrap.state import State, StateError, list_states, newest_whole, set_aside, verify
from bootstrap.volume import RunFolder, Volume
from jobs.on_resume import ROWS
from jobs.problem import JobError, Problem
from jobs.schema import Job


@dataclass(frozen=True)
class GoOn:
    """Where a run goes on: None is its start. ``notes``: what to say of it."""

    state: State | None
    notes: tuple[str, ...] = ()


def choose_state(folder: RunFolder, job: Job) -> GoOn:
    """The newest state whose every byte is right, or the one that ``resume_from`` names; what lies beyond that one is
    set aside first. Raises JobError where the job does not fit it, or where there is none to go back to."""
    notes: list[str] = []
    if job.resume_from is not None:
        notes += _go_back(folder, job, job.resume_from)
    state, damaged = newest_whole(folder.states)
    if state and (problems := resume_problems(state, job)):
        raise JobError(problems)
    return GoOn(state, (*notes, *damaged))


def beyond(states: list[State], step: int) -> list[State]:
    """What goes when a run goes back to ``step``. A state that was saved under the same ``resume_from`` belongs to the
    line that branched off there and stays; so going back is done once, however often the job is started. Raises
    JobError where there is no state to go back to."""
    others = [s for s in states if s.step > step and s.manifest.resume_from != step]
    if not others and any(s.manifest.resume_from == step and s.resumable for s in states):
        return []
    found = next((s for s in states if s.step == step), None)
    if found is None or not found.resumable:
        raise JobError([_nothing_there(step, found, states)])
    return others


def _go_back(folder: RunFolder, job: Job, step: int) -> list[str]:
    states, _ = list_states(folder.states)
    going = beyond(states, step)
    if not going:
        return []
    found = next(s for s in states if s.step == step)
    if problems := resume_problems(found, job):
        raise JobError(problems)
    try:
        verify(found)
    except StateError as error:
        remedy = "Name another step, or delete the line"
        raise JobError([Problem(f"cannot go back to {step}: {error}", remedy, key="resume_from")]) from error
    samples = [path for path in folder.samples.glob("step-*.png") if step_of(path) > step]
    figures = []
    for file in (folder.metrics, folder.validation):
        if file.exists():  # the run cuts its own off at the step it goes on from
            figures.append(shutil.copyfile(file, file.with_name(f"{file.stem}-before.jsonl")))
    # States last, the newest first: what a kill leaves is gone on with at the next start.
    moved = set_aside([*figures, *samples, *(s.path for s in reversed(going))], folder.root)
    steps = ", ".join(str(s.step) for s in going)
    return [f"going back to step {step}: the states of steps {steps}, their samples and figures lie in {moved} now"]


def step_of(sample: Path) -> int:
    """Of a sample's file; 0 for what only looks like one."""
    number = sample.name.split("-")[1]
    return int(number) if number.isdecimal() else 0


def _nothing_there(step: int, found: State | None, states: list[State]) -> Problem:
    whole = [str(s.step) for s in states if s.resumable]
    there = f"Whole are those of {', '.join(whole)}" if whole else "There is no whole one"
    if found is None:
        return Problem(f"there is no state of step {step}", there, key="resume_from")
    told = f"the state of step {step} has no optimizer any more (save.states): a checkpoint to use, not to go on from"
    anew = "" if found.manifest.method == "lora" else f". To start a new run from it: {_as_base(found)}"
    return Problem(told, there + anew, key="resume_from")


def resume_problems(state: State, job: Job) -> list[Problem]:
    """What in the job would make the state meaningless. Everything else may change; the job's new value wins."""
    kept, state_of = state.manifest, f"the state of step {state.step} was trained with"
    refused = {key: row for key, row in ROWS.items() if row.same is not None}
    if kept.method != job.method:
        refused = {"method": ROWS["method"]}
    problems = []
    for key, row in refused.items():
        before, now = _value(kept, key), _value(job, key)
        assert row.same is not None
        if not row.same(before, now):
            told = f"{_spelled(now)} cannot go on: {state_of} {_spelled(before)}, and {row.effect}"
            problems.append(Problem(told, f"Put {_spelled(before)} back, or {_start_anew(state, key)}", key=key))
    return problems


def refuse_absent_adapter(job: Job, volume: Volume) -> None:
    """Raises JobError where lora.start names no file."""
    if job.lora and job.lora.start and not volume.resolve(job.lora.start).is_file():
        told = f"there is no file {volume.resolve(job.lora.start)}"
        remedy = "Name a finished LoRA on the volume, such as runs/my-lora/output/my-lora.safetensors"
        raise JobError([Problem(told, remedy, key="lora.start")])


def refuse_unlike_adapter(job: Job, volume: Volume, shape: FluxShape) -> None:
    """Raises JobError where lora.start is another adapter than the job's, or none: now, not when the GPU waits."""
    from bootstrap.lora_file import LoraFileError, check_alike, read_lora
    from bootstrap.tensor_files import TensorFileError

    if job.lora is None or job.lora.start is None:
        return
    path, linear = volume.resolve(job.lora.start), linear_layers(shape)
    ranks = {name: layer.rank for name, layer in adapters_of(linear, job.lora).items()}
    try:
        check_alike(read_lora(path, ranks), job.lora, linear, f"{path}")
    except (LoraFileError, TensorFileError) as error:
        raise JobError([Problem(f"{error}", "Give a LoRA of this rank and these targets", key="lora.start")]) from error


def _value(of: Any, key: str) -> Any:
    """The value of a key. Of one in a list's entries, their values, but for entries of lora.layers that change the
    learning rate alone."""
    for part in key.split("."):
        if isinstance(of, tuple):
            of = tuple(getattr(each, part) for each in of if each.rank is not None or each.alpha is not None)
        else:
            of = getattr(of, part, None)
    return of


def _spelled(value: Any) -> str:
    return "none" if value in (None, {}) else str(value)


def _start_anew(state: State, key: str) -> str:
    anew = "give the job another name to start anew"
    if state.manifest.method == "full":
        return f"{anew} from these weights: {_as_base(state)}"
    if key in ("optimizer", "optimizer_args"):
        return f"{anew} from this adapter: lora: {{start: {state.model}}}"
    return anew


def _as_base(state: State) -> str:
    """What a new job writes to start from a full state's weights."""
    try:
        weights = RunFile.read(state.path.parent.parent / "run.json").weights
    except (OSError, ValueError):
        return f"base: {state.model}, with vae and text_encoders"
    encoders = f"text_encoders: {{clip: {weights.clip}, t5: {weights.t5}}}"
    return f"base: {state.model}, vae: {weights.vae}, {encoders}"


def changed_settings(run_file: Path, job: Job) -> list[str]:
    """What the job now says otherwise than at the last start, and how that takes effect."""
    try:
        before = RunFile.read(run_file).job.model_dump(mode="json")
    except (OSError, ValueError):  # the first start, or an older program's
        return []
    lines = []
    now = job.model_dump(mode="json")
    for key in now:
        old, new = before.get(key), now[key]
        if key not in ROWS and isinstance(old, dict) and isinstance(new, dict):
            inner = sorted(old.keys() | new.keys())
            lines += [_change(f"{key}.{k}", old.get(k), new.get(k)) for k in inner if old.get(k) != new.get(k)]
        elif old != new:
            lines.append(_change(key, old, new))
    return lines


def _change(key: str, before: Any, now: Any) -> str:
    row = ROWS.get(key) or next((row for name, row in ROWS.items() if name.startswith(f"{key}.")), None)
    effect = f" ({row.effect})" if row else ""
    if key.startswith(("notify", "datasets")):  # addresses are as good as passwords
        return f"changed: {key}{effect}"
    return f"changed: {key} was {before}, is now {now}{effect}"
