"""What to change where a job does not fit, or did not: each single change, what it then needs, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bootstrap import estimate
from bootstrap.estimate import USABLE, Arrangement, Work, in_gib
from bootstrap.gpus import GIB, find_gpu
from bootstrap.outcome import PodError
from bootstrap.pod import Gpu, Pod
from bootstrap.precision import FAITHFULNESS, MOST_FAITHFUL, Precision
from bootstrap.shortage import FailedPlan, room_after
from bootstrap.ways import (
    ANY_MEMORY,
    fastest,
    host_memory,
    linked,
    multiplies_in_fp8,
    needs_whole_model,
    overridden,
    pass_sizes,
    peak_of,
    slowest,
    split_images,
    usable_memory,
    ways,
)
from jobs.problem import JobError, Problem
from jobs.schema import Job

MOST_TOLD = 3  # ways out of memory that ran out
STEPS_DOWN = (1536, 1280, 1024, 896, 768, 640, 512, 384, 256)  # resolutions worth falling back to
# What a way out changes: nothing but the order of sums; how numbers are kept; how many images a step has; what is
# learned.
SAME, ARITHMETIC, STEP, PICTURES = range(4)

Sizes = Sequence[tuple[int, int, float]]  # width, height and frequency of the images


@dataclass(frozen=True)
class WayOut:
    """A single change that makes a job fit."""

    change: str  # as it is written into the job, or what else to do
    kind: int  # see above; a lesser one is told first
    peak: int  # bytes on each GPU
    seconds: float | None = None  # of a step, predicted; None for a card that the table lacks

    def __str__(self) -> str:
        speed = "" if self.seconds is None else f", {self.seconds:.2f} s a step"
        return f"{self.change} ({in_gib(self.peak)}{speed})"


@dataclass(frozen=True)
class _Change:
    key: str  # of one key only the first change that fits is told
    text: str
    kind: int
    job: Job
    work: Work
    processes: int


def ways_out(
    job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], sizes: Sizes, room: int, base: Precision | None = None
) -> list[WayOut]:
    """The changes that fit into ``room`` bytes: those that change the least first, of these the fastest.

    ``base``: the format that a frozen base has and keeps, but where that is what changes; None where it has none yet.
    """
    gpu, known = slowest(gpus), all(find_gpu(each.name) for each in gpus)
    found: dict[str, WayOut] = {}
    for change in _changes(job, work, sizes, len(gpus)):
        if change.key in found:
            continue
        kept = None if change.key == "plan.base_precision" else base
        way = fastest(change.job, pod, change.work, gpu, change.processes, room, kept)
        if way is None:
            continue
        share = max(split_images(change.job.images_per_step, change.processes))
        seconds = estimate.seconds_per_step(change.work, way, linked(gpu, pod), share) if known else None
        found[change.key] = WayOut(change.text, change.kind, peak_of(change.work, way), seconds)
    return sorted(found.values(), key=lambda each: (each.kind, each.seconds or 0.0))


def _changes(job: Job, work: Work, sizes: Sizes, processes: int) -> Iterator[_Change]:
    """Every change worth telling; of one key the gentlest first."""
    yield from _other_plans(job, work, processes)
    full = job.method == "full"
    if job.ema:
        yield replace(_changed(job, work, processes, "no ema", ARITHMETIC, ema=None), work=replace(work, ema=0))
    if full and job.max_grad_norm is not None and not needs_whole_model(job.optimizer):
        yield _changed(job, work, processes, "no max_grad_norm", ARITHMETIC, max_grad_norm=None)
    if full:
        yield from _lighter_optimizers(job, work, processes)
    for count in _fewer(job.images_per_step, processes):
        yield _changed(job, work, processes, f"images_per_step: {count}", STEP, images_per_step=count)
    yield from _smaller_pictures(job, work, sizes, processes)


def _fewer(images: int, least: int) -> list[int]:
    """Numbers of images worth falling back to, about a quarter fewer each time: trying every one takes long."""
    counts = []
    while images > least:
        images = max(least, min(images - 1, images * 3 // 4))
        counts.append(images)
    return counts


def _changed(job: Job, work: Work, processes: int, text: str, kind: int, **keys: object) -> _Change:
    return _Change(next(iter(keys)), text, kind, job.model_copy(update=keys), work, processes)


def _other_plans(job: Job, work: Work, processes: int) -> Iterator[_Change]:
    """What ``plan:`` could say, or could leave to the plan."""
    wish, full = job.plan, job.method == "full"

    def planned(key: str, value: object, text: str = "", kind: int = SAME) -> _Change:
        spelled = text or f"plan: {{{key}: {str(value).lower() if isinstance(value, bool) else value}}}"
        change = _changed(job, work, processes, spelled, kind, plan=wish.model_copy(update={key: value}))
        return replace(change, key=f"plan.{key}")

    if wish.retry is False:
        yield planned("retry", True)
    for key in overridden(job):
        yield planned(key, None, f"no plan.{key}", ARITHMETIC if key == "base_precision" else SAME)
    if wish.checkpointing is None:
        yield planned("checkpointing", True)
    if wish.images_per_pass is None:
        for images in pass_sizes(max(split_images(job.images_per_step, processes)))[1:]:
            yield planned("images_per_pass", images)
    if full and work.fused and wish.optimizer_states is None and not job.optimizer.startswith("Paged"):
        yield planned("optimizer_states", "host")
    for base in () if full or multiplies_in_fp8(job) else MOST_FAITHFUL[1:]:
        if FAITHFULNESS[base] > FAITHFULNESS[wish.base_precision or "bf16"]:
            yield planned("base_precision", base, kind=ARITHMETIC)


def _lighter_optimizers(job: Job, work: Work, processes: int) -> Iterator[_Change]:
    """The same arithmetic with states in 8 bits, or on the host; not Lion or Adafactor, which want other rates."""
    shapes = list(work.shape.tensors().values())
    for name in ("AdamW8bit", "PagedAdamW32bit"):
        size = estimate.optimizer_bytes(name, shapes, {})
        paged = name.startswith("Paged") and not work.fused
        if paged or size < work.optimizer:
            lighter = replace(work, optimizer=size, fused=True)
            other = job.model_copy(update={"optimizer": name, "optimizer_args": {}})
            yield _Change("optimizer", f"optimizer: {name}", ARITHMETIC, other, lighter, processes)


def _smaller_pictures(job: Job, work: Work, sizes: Sizes, processes: int) -> Iterator[_Change]:
    if any(dataset.resolution is not None for dataset in job.datasets):
        return
    largest = max(job.resolutions)
    for side in (side for side in STEPS_DOWN if side < largest):
        kept = tuple(sorted({min(side, each) for each in job.resolutions}))
        spelled = str(kept[0]) if len(kept) == 1 else f"[{', '.join(map(str, kept))}]"
        other = job.model_copy(update={"resolution": kept})
        smaller = estimate.work_of(
            other, work.shape, [_within(width, height, side, n) for width, height, n in sizes], work.assistant
        )
        yield _Change(
            "resolution", f"resolution: {spelled}", PICTURES, other, replace(smaller, fused=work.fused), processes
        )


def _within(width: int, height: int, side: int, often: float) -> tuple[int, int, float]:
    """An image of no more pixels than a square of ``side``, in about its proportions."""
    shrink = min(1.0, side / math.sqrt(width * height))
    return max(16, int(width * shrink) // 16 * 16), max(16, int(height * shrink) // 16 * 16), often


# ---------------------------------------------------------------- where nothing fits


def no_way(
    job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], sizes: Sizes, failed: Sequence[FailedPlan]
) -> JobError | PodError:
    """Why no way fits, as an error to raise: the job's own overrides, or this pod."""
    if not gpus:
        return PodError(f"out of memory: {failed[-1].told}. No plan needs less. Choose a machine with more RAM.")
    room = room_after(usable_memory(gpus), failed)
    if failed:
        told = f"out of GPU memory: {failed[-1].told}. No plan is left that would give the same numbers in less"
        return PodError(f"{told}. {spelled_out(job, pod, work, gpus, sizes, failed)}")
    free = job.model_copy(update={"plan": type(job.plan)(processes=job.plan.processes)})
    if overridden(job) and (other := fastest(free, pod, work, slowest(gpus), len(gpus), room)):
        least = peak_of(work, _least(job, pod, work, len(gpus)))
        keys = ", ".join(overridden(job))
        message = f"with {keys} the job needs {in_gib(least)} on each GPU, which has {in_gib(room)} to use"
        if least <= room:
            ram = in_gib(host_memory(work, len(gpus), work.shape.blocks, average=work.ema > 0))
            message = f"with {keys} the job needs {ram} of RAM, more than there is"
        remedy = f"Leave it out: the plan's own choice fits in {in_gib(peak_of(work, other))}"
        return JobError([Problem(message, remedy, f"plan.{keys}")])
    return PodError(_why_not(job, pod, work, gpus, sizes, room))


def spelled_out(
    job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], sizes: Sizes, failed: Sequence[FailedPlan]
) -> str:
    """The cheapest ways out of memory that ran out with these plans, in a sentence."""
    room = room_after(usable_memory(gpus), failed)
    found = [str(way) for way in ways_out(job, pod, work, gpus, sizes, room, failed[-1].base)[:MOST_TOLD]]
    if len(found) < MOST_TOLD:
        found.append(_larger_gpu(job, pod, work, gpus, room))
    return f"Ways out, the one that changes least first: {'; or '.join(found)}."


def _larger_gpu(job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], room: int) -> str:
    """The size that would do, where these cards turned out to hold only ``room`` of what they should."""
    least = peak_of(work, _least(job, pod, work, len(gpus))) + usable_memory(gpus) - room
    return f"a GPU of {math.ceil(least / USABLE / GIB)} GB or more"


def _why_not(job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], sizes: Sizes, room: int) -> str:
    """Why no way fits, with figures, and what would."""
    least = _least(job, pod, work, len(gpus))
    memory = estimate.memory_per_gpu(work, least)
    cards = f"{len(gpus)} x {gpus[0].name}" if len(gpus) > 1 else gpus[0].name
    what = "Full fine-tuning" if job.method == "full" else "This LoRA"
    told = (
        f"{what} needs at least {in_gib(memory.peak)} on each GPU (GiB: {memory}); {cards} has {in_gib(room)} to use."
    )
    cures = [_larger_gpu(job, pod, work, gpus, room)]
    if _fits(job, replace(pod, memory=ANY_MEMORY), work, len(gpus), room):  # RAM is all that lacks
        average = f" and the average's {in_gib(estimate.host_average(work))}" if work.ema else ""
        need = host_memory(work, len(gpus), work.shape.blocks, average=work.ema > 0)
        ram = (
            f"With the optimizer's {in_gib(work.optimizer)}{average} on the host this pod needs {in_gib(need)} of RAM; "
            f"it has {in_gib(pod.memory)}."
        )
        told = ram if least.states_on_host else f"{told} {ram}"
        cures = ["a pod with more RAM"] if least.states_on_host else [*cures, "a pod with more RAM"]
    cures += _more_gpus(job, pod, work, len(gpus), room)
    cures += [str(way) for way in ways_out(job, pod, work, gpus, sizes, room)]
    cures += _adapter_instead(job, pod, work, len(gpus), room)
    return f"{told} Choose {', or '.join(cures)}."


def _least(job: Job, pod: Pod, work: Work, processes: int) -> Arrangement:
    """The way that needs the least memory of a GPU; one that lacks RAM only where all do."""
    every = list(ways(job, pod, work, processes)) or ways(job, replace(pod, memory=ANY_MEMORY), work, processes)
    return min(every, key=lambda way: peak_of(work, way))


def _fits(job: Job, pod: Pod, work: Work, processes: int, room: int) -> bool:
    return any(peak_of(work, way) <= room for way in ways(job, pod, work, processes))


def _more_gpus(job: Job, pod: Pod, work: Work, processes: int, room: int) -> list[str]:
    if job.method == "lora" or needs_whole_model(job.optimizer):
        return []
    counts = range(processes + 1, min(8, job.images_per_step) + 1)
    return [f"{n} of these GPUs" for n in counts if _fits(job, pod, work, n, room)][:1]


def _adapter_instead(job: Job, pod: Pod, work: Work, processes: int, room: int) -> list[str]:
    """A LoRA's need as that of this job without anything trained: the adapter is small."""
    if job.method == "lora":
        return []
    lora = replace(
        _least(job, pod, work, processes),
        images_per_pass=1,
        passes=job.images_per_step,
        sharded=False,
        checkpointed=work.shape.blocks,
        states_on_host=0,
        streamed=0,
        base=MOST_FAITHFUL[-1],
    )
    fits = peak_of(replace(work, lora=True, trained=0, optimizer=0), lora) <= room
    return ["method: lora"] if fits else []
