"""``fluxpod check``: what is wrong with a job, and how it would run here or on pods that are not there yet.

Changes nothing on any disk, but for the sheet of pictures that ``--preview`` asks for, and asks no network, but for the
right to upload where the job has ``output.hub``.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bootstrap.assistant import assistant_bytes, find_assistant
from bootstrap.doubts import doubts_of_base, doubts_of_pictures, doubts_of_start
from bootstrap.estimate import in_gib, in_time
from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import GIB, MOST_GPUS, counted, find_gpu, nearest_names
from bootstrap.outcome import ACCESS_REFUSED, DONE, JOB_WRONG, POD_WRONG, AccessError, NotNowError, PodError
from bootstrap.plan import DataSummary, Plan, make_plan, predict
from bootstrap.pod import Gpu, Pod, read_pod
from bootstrap.prompts import with_prompts
from bootstrap.resume import beyond, refuse_absent_adapter, refuse_unlike_adapter, resume_problems
from bootstrap.room import refuse_without_room
from bootstrap.shortage import read_failed
from bootstrap.state import list_states
from bootstrap.volume import Volume
from jobs.load import LoadedJob, load_job
from jobs.problem import JobError, Problem
from jobs.schema import Job

WIDTH = 120
UNKNOWN_DATA = DataSummary(images=0, items_per_epoch=0, buckets=())
# What rented pods have for each GPU, where a pod is only named: an A40 came with 9 CPUs and 50 GB of RAM; cards of
# 80 GB and more usually bring more RAM than they have themselves.
CPUS_PER_GPU = 8
RAM_PER_GPU = 50_000_000_000


@dataclass(frozen=True)
class NamedPod:
    """A pod as a user names it: "2xA100 80GB@3.28"."""

    text: str
    pod: Pod
    price: float | None  # of the whole pod, per hour


def check(job_path: Path, volume: Volume, pods: str | None = None, preview: Path | None = None) -> int:
    """Prints plan and problems; gives the exit code that running the job would end with now: 0, 64, 65 or 69.

    With ``pods``, 65 means that none of them fits. ``preview`` is the file for the contact sheet; the empty path stands
    for one beside the job's file.
    """
    try:
        loaded = load_job(job_path)
        named = parse_pods(pods) if pods is not None else ()
    except JobError as error:
        return _tell(error)
    job, file = loaded.job, job_path.name
    _warn(loaded, file, loaded.warnings)
    job, unreadable = _prompts(job, volume)
    known, problems = _base_shape(job, volume)
    base = known or FluxShape()
    problems += unreadable
    warn = partial(_warn, loaded, file)
    warn(doubts_of_base(job, base) if not problems else [])
    if preview == Path():
        preview = job_path.with_suffix(".preview.jpg")
    data, more = _data(job, volume, preview, warn)
    problems += more
    try:
        _start(job, known, volume, warn)
        assistant = _assistant(job, base, volume)
        if named:
            code = _compare(job, named, base, data, assistant)
        else:
            code = _here(job, volume, base, data, assistant)
    except JobError as error:
        problems += error.problems
        code = JOB_WRONG
    if problems:
        return _tell(JobError(loaded.placed(p, file) for p in problems))
    return code or (_output(job) if job.output.hub and not named else DONE)


def _output(job: Job) -> int:
    """Whether the result may go where the job says."""
    from entrypoint.uploads import look_at

    try:
        print(look_at(job, os.environ))
    except NotNowError as error:
        print(textwrap.fill(f"note: output.hub was not asked: {error}", WIDTH))
    except AccessError as error:
        print(textwrap.fill(f"output.hub: {error}", WIDTH), file=sys.stderr)
        return ACCESS_REFUSED
    return DONE


def _tell(error: JobError) -> int:
    for problem in error.problems:
        print(problem, file=sys.stderr)
    count = len(error.problems)
    print(f"{count} problem{'s' if count > 1 else ''}; nothing was changed.", file=sys.stderr)
    return JOB_WRONG


def _prompts(job: Job, volume: Volume) -> tuple[Job, tuple[Problem, ...]]:
    """The job with the prompts of its file, or without them and the reasons."""
    try:
        return with_prompts(job, volume), ()
    except JobError as error:
        return job, error.problems


def _base_shape(job: Job, volume: Volume) -> tuple[FluxShape | None, tuple[Problem, ...]]:
    """The base's dimensions; None while they cannot be known, and FLUX.1-dev's count."""
    from bootstrap.weights import peek_shape  # loads slowly, and a wrong job should be told at once

    try:
        shape = peek_shape(job.base, volume)
    except JobError as error:
        return None, error.problems
    if shape is None:
        print(f"note: the dimensions of {job.base} are not known before it is fetched; counted like FLUX.1-dev.")
    return shape, ()


def _start(job: Job, base: FluxShape | None, volume: Volume, warn: Callable[[list[Problem]], None]) -> None:
    """What is to be said of lora.start, where a run would begin from it. Raises JobError."""
    if any(state.resumable for state in list_states(volume.run(job.name).states)[0]):
        return
    refuse_absent_adapter(job, volume)
    if base is not None:
        refuse_unlike_adapter(job, volume, base)
        warn(doubts_of_start(job, volume))


def _assistant(job: Job, base: FluxShape, volume: Volume) -> int:
    """Bytes of assistant_lora on each GPU."""
    size = assistant_bytes(job, base, volume)
    if size and find_assistant(job, volume) is None:
        print(f"note: the size of {job.assistant_lora} is not known before it is fetched; {in_gib(size)} are counted.")
    return size


def _warn(loaded: LoadedJob, file: str, doubts: Iterable[Problem]) -> None:
    for doubt in doubts:
        print(f"warning: {loaded.placed(doubt, file)}")


def _data(
    job: Job, volume: Volume, preview: Path | None, warn: Callable[[list[Problem]], None]
) -> tuple[DataSummary, tuple[Problem, ...]]:
    """What the data are, or nothing known and the reasons."""
    from bootstrap.dataset import scan  # what reads pictures loads slowly
    from entrypoint.data_table import render_data
    from entrypoint.preview import write_preview

    try:
        dataset = scan(job, volume)
    except JobError as error:
        return UNKNOWN_DATA, error.problems
    for note in dataset.notes:
        print(textwrap.fill(f"data: {note}", WIDTH, subsequent_indent="  "))
    if not dataset.items:  # all of it is yet to be fetched
        return UNKNOWN_DATA, ()
    print(render_data(dataset))
    warn(doubts_of_pictures(job, dataset.items))
    if preview is not None:
        try:
            print(write_preview(job, dataset, volume, preview))
        except OSError as error:
            return dataset.summary(), (Problem(f"{preview} cannot be written: {error.strerror}", key="--preview"),)
    return dataset.summary(), ()


def _here(job: Job, volume: Volume, base: FluxShape, data: DataSummary, assistant: int) -> int:
    pod = read_pod(volume.root)
    try:
        failed = read_failed(volume.run(job.name).memory)
        plan = make_plan(job, pod, base, data, failed, assistant=assistant)
        refuse_without_room(plan, job, volume.run(job.name), pod.disk_free)
    except PodError as error:
        print(render_pod(pod))
        print(textwrap.fill(str(error), WIDTH), file=sys.stderr)
        return POD_WRONG
    print(render_plan(plan, job, pod))
    states, notes = list_states(volume.run(job.name).states)
    for note in notes:
        print(f"states: {note}")
    going = beyond(states, job.resume_from) if job.resume_from is not None else []
    whole = [state for state in states if state.resumable and state not in going]
    if not whole:
        return DONE
    if problems := resume_problems(whole[-1], job):
        raise JobError(problems)
    print(f"states: a run would go on at step {whole[-1].step}")
    if going:
        print(f"states: those of steps {', '.join(str(state.step) for state in going)} would be set aside")
    return DONE


# ---------------------------------------------------------------- this pod


def render_pod(pod: Pod) -> str:
    """GPUs, CPUs, memory and disks in a few lines."""
    rows = [f"GPU {gpu.index}: {gpu.name}, {in_gib(gpu.memory)}{_driver(gpu)}" for gpu in pod.gpus] or ["no GPU"]
    rows.append(
        f"{pod.cpus} CPUs, {in_gib(pod.memory)} of RAM, {in_gib(pod.shm)} of /dev/shm, "
        f"{pod.disk_free / 1e9:.0f} GB free on the volume"
    )
    return "\n".join(["This pod", *(f"  {row}" for row in (*rows, *pod.notes))])


def _driver(gpu: Gpu) -> str:
    return f", driver {gpu.driver}" if gpu.driver else ""


def render_plan(plan: Plan, job: Job, pod: Pod, width: int = WIDTH) -> str:
    """The plan as a table of choices, each with its reason, then what to beware of."""
    names = max(len(choice.name) for choice in plan.choices)
    values = max(len(choice.value) for choice in plan.choices)
    indent = names + values + 6
    lines = [f"{job.name}: {job.method} on {job.base}"]
    for choice in plan.choices:
        start = f"  {choice.name:<{names}}  {choice.value:<{values}}  "
        reason = textwrap.wrap(choice.reason, max(40, width - indent)) or [""]
        lines += [(start + reason[0]).rstrip(), *(" " * indent + more for more in reason[1:])]
    for text in (*pod.notes, *plan.warnings):
        lines.append(textwrap.fill(text, width, initial_indent="! ", subsequent_indent="  "))
    return "\n".join(lines)


# ---------------------------------------------------------------- pods that are not there


def parse_pods(text: str) -> tuple[NamedPod, ...]:
    """Reads "A40, L40S@0.86, 2xA100 80GB@3.28, 8xH100"; the price is that of the pod per hour.

    :raises JobError: with every part that cannot be read.
    """
    pods: list[NamedPod] = []
    problems: list[Problem] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            pods.append(_parse_pod(part))
        except ValueError as error:
            message, remedy = error.args
            problems.append(Problem(message, remedy, key="--pods"))
    if not pods and not problems:
        problems.append(Problem("no pod is named", 'Write for example --pods "A40@0.44, 2xA100 80GB"', key="--pods"))
    if problems:
        raise JobError(problems)
    return tuple(pods)


def _parse_pod(part: str) -> NamedPod:
    named, _, price_text = part.partition("@")
    price = re.fullmatch(r"\s*[$€]?\s*(\d+(?:\.\d*)?|\.\d+)\s*", price_text)
    if "@" in part and price is None:
        raise ValueError(f"{price_text.strip()!r} is not a price", "Write a number per hour after @, such as A40@0.44")
    written, name = counted(named)
    count = 1 if written is None else written
    if not name or not 1 <= count <= MOST_GPUS:
        raise ValueError(f"{part!r} is not a number of GPUs with a name", "Write for example 2xA100 80GB")
    model = find_gpu(name)
    if model is None:
        near = nearest_names(name)
        remedy = f"Did you mean {', or '.join(near)}?" if near else "Known are for example A40, L40S, A100 80GB, H100"
        raise ValueError(f"{name!r} is no GPU known here", remedy)
    gpu = Gpu(index=0, name=model.name, memory=model.bytes, capability=model.capability)
    pod = Pod(
        gpus=tuple(replace(gpu, index=index) for index in range(count)),
        cpus=CPUS_PER_GPU * count,
        memory=max(RAM_PER_GPU, model.bytes) * count,
        shm=count * GIB,
        disk_free=0,
    )
    return NamedPod(f"{count} x {model.name}" if count > 1 else model.name, pod, float(price[1]) if price else None)


def _compare(job: Job, named: tuple[NamedPod, ...], base: FluxShape, data: DataSummary, assistant: int) -> int:
    """A row for each pod; before it the whole plan where there is only one."""
    rows = [_Row.of(job, each, base, data, assistant) for each in named]
    if len(rows) == 1 and rows[0].plan:
        print(render_plan(replace(rows[0].plan, warnings=()), job, rows[0].named.pod))
        print()
    print(render_rows(rows))
    if job.epochs is not None and not data.items_per_epoch:
        print("The pictures are not known here: each epoch is counted as one step, so time and cost are far too low.")
    print(
        f"Assumed for each GPU: {CPUS_PER_GPU} CPUs, {RAM_PER_GPU / 1e9:.0f} GB of RAM or, if more, its own memory.\n"
        "Time and cost are estimates from the card's figures on paper; downloads come on top."
    )
    return DONE if any(row.plan for row in rows) else POD_WRONG


@dataclass(frozen=True)
class _Row:
    named: NamedPod
    plan: Plan | None
    why_not: str
    step: float = 0
    images_per_second: float = 0
    seconds: float = 0

    @property
    def cost(self) -> float | None:
        return None if self.named.price is None or not self.plan else self.named.price * self.seconds / 3600

    @classmethod
    def of(cls, job: Job, named: NamedPod, base: FluxShape, data: DataSummary, assistant: int) -> _Row:
        try:
            plan = make_plan(job, named.pod, base, data, assistant=assistant)
        except (PodError, JobError) as error:
            return cls(named, None, str(error))
        found = predict(plan, job, named.pod, base, data)
        assert found, "a named pod has only GPUs of the table"
        return cls(named, plan, "", found.step, found.images_per_second, found.total)


def render_rows(rows: list[_Row]) -> str:
    """The pods side by side, then what is to be said of each, then the cheapest and the fastest."""
    columns: dict[str, Callable[[_Row, Plan], str]] = {
        "GiB a GPU": lambda row, plan: f"{plan.memory_per_gpu / GIB:.1f} of {row.named.pod.gpus[0].memory / GIB:.1f}",
        "images": lambda row, plan: _split(plan.split),
        "how": lambda row, plan: _how(plan),
        "s/step": lambda row, plan: f"{row.step:.2f}",
        "images/s": lambda row, plan: f"{row.images_per_second:.2f}",
        "time": lambda row, plan: in_time(row.seconds),
        "cost": lambda row, plan: "-" if row.cost is None else f"{row.cost:.2f}",
    }
    table = [["pod", *columns]]
    for row in rows:
        cells = [show(row, row.plan) if row.plan else "-" for show in columns.values()]
        table.append([row.named.text, *(cells if row.plan else ["does not fit", *[""] * (len(columns) - 1)])])
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([*lines, *_remarks(rows), *_best(rows)])


def _remarks(rows: list[_Row]) -> list[str]:
    """Why pods do not fit and what to beware of; what is true of several is told once."""
    pods: dict[str, list[str]] = {}
    for row in rows:
        for text in (row.why_not, *(row.plan.warnings if row.plan else ())):
            if text:
                pods.setdefault(text, []).append(row.named.text)
    several = max(2, sum(row.plan is not None for row in rows))
    told = {text: "" if len(names) >= several else f"{', '.join(names)}: " for text, names in pods.items()}
    return [
        textwrap.fill(names + text, WIDTH, initial_indent="! ", subsequent_indent="  ") for text, names in told.items()
    ]


def _split(split: tuple[int, ...]) -> str:
    even = split[0] == split[-1]
    return f"{len(split)} x {split[0]}" if even else "+".join(map(str, split))


def _how(plan: Plan) -> str:
    """The choices that differ from pod to pod, in a few words."""
    words = [f"{plan.passes} passes"] if plan.passes > 1 else []
    words += ["sharded"] if plan.sharding == "fsdp" else []
    words += [f"{plan.base_precision} base"] if plan.base_precision != "bf16" else []
    words += ["checkpointing"] if plan.checkpointing else []
    words += ["states on host"] if plan.optimizer_states == "host" else []
    return ", ".join(words) or "plain"


def _best(rows: list[_Row]) -> list[str]:
    fitting = [row for row in rows if row.plan]
    priced = [(row.cost, row) for row in fitting if row.cost is not None]
    lines = []
    if len(priced) > 1:
        cost, row = min(priced, key=lambda pair: pair[0])
        lines.append(f"Cheapest: {row.named.text}, {cost:.2f} in {in_time(row.seconds)}.")
    if len(fitting) > 1:
        row = min(fitting, key=lambda each: each.seconds)
        lines.append(f"Fastest: {row.named.text}, {in_time(row.seconds)}.")
    return lines
