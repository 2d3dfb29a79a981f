"""Which GPUs a job takes and which way of training fits on them.

Every way is tried, and of those that fit the fastest is taken; but the optimizer's states leave the device only where
none fits with them on it: streaming them asks much of a pod's RAM and PCIe, which differ from pod to pod. So it is with
a frozen base, which is quantised no further than it must be, and with samples, which are decoded whole if they can be.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from bootstrap import estimate
from bootstrap.drivers import branch, least_driver
from bootstrap.estimate import TILE, USABLE, Arrangement, Work, in_gib
from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import GIB, PCIE, GpuModel, find_gpu, has_bf16
from bootstrap.lora_targets import lora_problems
from bootstrap.outcome import PodError
from bootstrap.pod import Gpu, Pod
from bootstrap.precision import FAITHFULNESS, MOST_FAITHFUL
from jobs.problem import JobError, Problem
from jobs.schema import Job

ACCUMULATION_COST = 1.05  # several passes must be this much faster than one: bf16 sums of gradients lose digits
ANY_MEMORY = 1 << 60
GRADE = 4  # blocks by which more are checkpointed or streamed: about 2 GiB
UNKNOWN_GPU = GpuModel("", "", 0, 100, 800, (8, 0))  # only to compare ways on a card that the table lacks


def split_images(images: int, processes: int) -> tuple[int, ...]:
    """As even as can be, the larger parts first: 4 on 3 is (2, 1, 1)."""
    part, more = divmod(images, processes)
    return tuple(part + (place < more) for place in range(processes))


# ---------------------------------------------------------------- what cannot be


def refuse_contradictions(job: Job, base: FluxShape) -> None:
    """JobError with all that no pod can follow: overrides that contradict the job, patterns that match no layer."""
    wish = job.plan
    lora = job.method == "lora"
    problems: list[Problem] = []

    def refuse(key: str, message: str, remedy: str) -> None:
        problems.append(Problem(message, remedy, key=f"plan.{key}"))

    if wish.processes and wish.processes > job.images_per_step:
        message = f"{wish.processes} processes cannot share {job.images_per_step} images per step"
        refuse("processes", message, f"Write {job.images_per_step} or fewer, or raise images_per_step")
    if wish.sharding == "fsdp" and lora:
        refuse("sharding", "a LoRA is replicated, never sharded", "Leave the key out")
    if wish.optimizer_in_backward and lora:
        refuse("optimizer_in_backward", "an adapter's gradients are small, so a LoRA steps after them", "Leave it out")
    if wish.optimizer_in_backward and not lora and needs_whole_model(job.optimizer):
        message = f"{job.optimizer} looks at all gradients before it changes a weight"
        refuse("optimizer_in_backward", message, "Leave the key out, or take AdamW8bit")
    if wish.optimizer_in_backward and not lora and job.max_grad_norm is not None:
        message = f"max_grad_norm {job.max_grad_norm:g} needs all gradients before the first weight changes"
        refuse("optimizer_in_backward", message, "Leave one of the two out")
    if wish.optimizer_states == "host" and (lora or job.optimizer not in estimate.FUSED):
        why = "the states of a LoRA are small" if lora else f"{job.optimizer} steps what lies on the device"
        refuse("optimizer_states", f"{why}, so they stay there", f"Leave the key out, or take {estimate.FUSED[0]}")
    if wish.optimizer_states == "device" and not lora and job.optimizer.startswith("Paged"):
        message = f"{job.optimizer} keeps its states on the host"
        refuse("optimizer_states", message, f"Leave the key out, or take {job.optimizer.removeprefix('Paged')}")
    if wish.processes and wish.processes > 1 and not lora and needs_whole_model(job.optimizer):
        message = f"{job.optimizer} finds one rate from all weights of a full model, so it runs in one process"
        refuse("processes", message, "Write 1, leave the key out, or take AdamW8bit")
    if wish.base_precision not in (None, "bf16") and not lora:
        refuse("base_precision", "method full trains all weights, in bf16", "Leave the key out, or take method: lora")
    if job.lora:
        problems += lora_problems(estimate.linear_layers(base), job.lora)
    if problems:
        raise JobError(problems)


def needs_whole_model(optimizer: str) -> bool:
    """Whether an optimizer derives something from all weights before it changes one, as Prodigy and D-Adaptation do."""
    return bool(re.match(r"(prodigy|dadapt)", optimizer.rpartition(".")[2].lower()))


# ---------------------------------------------------------------- GPUs


def usable_gpus(pod: Pod) -> tuple[Gpu, ...]:
    """Those that can train; PodError with the reason where there is none."""
    if not pod.gpus:
        because = f": {'; '.join(pod.notes)}" if pod.notes else ""
        raise PodError(
            f"This pod has no GPU{because}. It can prepare the job, but not train it; the job goes on by itself when "
            "the pod is started with a GPU."
        )
    usable = tuple(gpu for gpu in pod.gpus if gpu.capability is None or has_bf16(gpu.capability))
    if not usable:
        names = ", ".join(sorted({gpu.name for gpu in pod.gpus}))
        raise PodError(
            f"{names} has no bf16, the number format that FLUX is trained in: that came with compute capability 8.0. "
            "Choose an Ampere, Ada, Hopper or Blackwell card, such as A40, L40S, A100 or H100."
        )
    least = least_driver(pod.cuda)
    old = {gpu.driver for gpu in usable if least and (number := branch(gpu.driver)) and number < least}
    if old:
        raise PodError(
            f"The driver of this host is {min(old)}; this image's torch is built with CUDA {pod.cuda}, which needs "
            f"{least} or newer. Deploy the pod anew with the filter CUDA version {pod.cuda} or newer: the driver is "
            "the host's and cannot be changed here."
        )
    return usable


def choose_gpus(job: Job, pod: Pod) -> tuple[tuple[Gpu, ...], str]:
    """As many as the job asks for and can feed, the fastest where some stay idle, in order of index; and why.

    Raises PodError where none can train, JobError where ``plan:`` asks for more than there are.
    """
    usable = usable_gpus(pod)
    count, why = _processes(job, len(usable))
    by_speed = sorted(usable, key=lambda gpu: (-_model(gpu).tflops, -gpu.memory, gpu.index))
    chosen, idle = by_speed[:count], sorted(gpu.index for gpu in by_speed[count:])
    if idle:
        why += f"; idle: GPU {', '.join(map(str, idle))}"
    if len({gpu.name for gpu in chosen}) > 1:
        why += f"; all wait for the slowest, {chosen[-1].name}"
    return tuple(sorted(chosen, key=lambda gpu: gpu.index)), why


def _processes(job: Job, gpus: int) -> tuple[int, str]:
    wish = job.plan.processes
    if wish and wish > gpus:
        message = f"{wish} processes need {wish} GPUs; there are {gpus}"
        raise JobError([Problem(message, f"Write {gpus} or fewer, or leave the key out", "plan.processes")])
    if wish:
        count, why = wish, "plan.processes says so"
    elif job.method == "full" and needs_whole_model(job.optimizer) and gpus > 1:
        count, why = 1, f"{job.optimizer} finds one rate from all weights of a full model, so it runs on one GPU"
    elif job.images_per_step < min(gpus, job.gpus or gpus):
        count, why = job.images_per_step, f"images_per_step: {job.images_per_step} occupies no more"
    elif job.gpus and job.gpus < gpus:
        count, why = job.gpus, f"gpus: {job.gpus}"
    else:
        count, why = (
            gpus,
            f"all there are, though gpus: {job.gpus}" if job.gpus and job.gpus > gpus else "all there are",
        )
    if job.plan.sharding == "none" and job.method == "full" and count > 1:
        message = "full fine-tuning in several processes is always sharded"
        raise JobError([Problem(message, "Leave the key out, or use one GPU (gpus: 1)", "plan.sharding")])
    return count, why


def _model(gpu: Gpu) -> GpuModel:
    return find_gpu(gpu.name) or UNKNOWN_GPU


def slowest(gpus: tuple[Gpu, ...]) -> GpuModel:
    return min((_model(gpu) for gpu in gpus), key=lambda model: model.tflops)


# ---------------------------------------------------------------- the way through memory


def choose_way(job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...]) -> Arrangement:
    """The fastest way that fits; errors with figures where none does."""
    room = usable_memory(gpus)
    best = fastest(job, pod, work, slowest(gpus), len(gpus), room)
    if best is None and _overridden(job):  # an override may use what is kept back for fragmentation
        best = fastest(job, pod, work, slowest(gpus), len(gpus), min(gpu.memory for gpu in gpus))
    if best is not None:
        return best
    free = _changed(job, plan=type(job.plan)(processes=job.plan.processes))
    if _overridden(job) and (other := fastest(free, pod, work, slowest(gpus), len(gpus), room)):
        least = peak_of(work, _least(job, pod, work, len(gpus)))
        keys = ", ".join(_overridden(job))
        message = f"with {keys} the job needs {in_gib(least)} on each GPU, which has {in_gib(room)} to use"
        if least <= room:
            ram = in_gib(host_memory(work, len(gpus), work.shape.blocks))
            message = f"with {keys} the job needs {ram} of RAM, more than there is"
        remedy = f"Leave it out: the plan's own choice fits in {in_gib(peak_of(work, other))}"
        raise JobError([Problem(message, remedy, f"plan.{keys}")])
    raise PodError(_why_not(job, pod, work, gpus, room))


def _overridden(job: Job) -> list[str]:
    """The overrides that change what fits."""
    keys = (
        "checkpointing",
        "compile",
        "images_per_pass",
        "base_precision",
        "optimizer_in_backward",
        "optimizer_states",
    )
    return [key for key in keys if getattr(job.plan, key) is not None]


def linked(gpu: GpuModel, pod: Pod) -> GpuModel:
    """The model with the link that this pod gives it: without P2P all goes through the host's memory."""
    return gpu if pod.p2p else replace(gpu, link=min(gpu.link, PCIE))


def fastest(job: Job, pod: Pod, work: Work, gpu: GpuModel, processes: int, room: int) -> Arrangement | None:
    gpu = linked(gpu, pod)
    fitting = [way for way in _ways(job, pod, work, processes) if peak_of(work, way) <= room]
    share = max(split_images(job.images_per_step, processes))

    def cost(way: Arrangement) -> tuple[bool, int, bool, float, int, int, int, int, bool]:
        seconds = estimate.seconds_per_step(work, way, gpu, share) * (ACCUMULATION_COST if way.passes > 1 else 1)
        return (
            way.states_on_host > 0,
            FAITHFULNESS[way.base],
            way.tiled,
            round(seconds, 4),
            way.streamed,
            way.states_on_host,
            way.passes,
            way.checkpointed,
            way.reshard,
        )

    return min(fitting, key=cost, default=None)


def _ways(job: Job, pod: Pod, work: Work, processes: int) -> Iterator[Arrangement]:
    """Every way to run the job in so many processes that its overrides and the host's memory allow."""
    wish = job.plan
    full = job.method == "full"
    share = max(split_images(job.images_per_step, processes))
    sharded = full and processes > 1
    per_pass = [min(wish.images_per_pass, share)] if wish.images_per_pass else _pass_sizes(share)
    bases = (wish.base_precision,) if wish.base_precision else ("bf16",) if full else MOST_FAITHFUL
    decodings = (False, True) if work.sample_pixels > TILE**2 else (False,)
    for images, base, tiled in itertools.product(per_pass, bases, decodings):
        for checkpointed in _checkpointed(job, work.shape.blocks):
            for reshard in (False, True) if sharded else (False,):
                for on_host in _state_places(job, pod, work, processes):
                    way = Arrangement(
                        processes=processes,
                        images_per_pass=images,
                        passes=math.ceil(share / images),
                        sharded=sharded,
                        reshard=reshard,
                        checkpointed=checkpointed,
                        compiled=wish.compile is not False,
                        in_backward=_in_backward(job),
                        states_on_host=on_host,
                        streamed=0,
                        base=base,
                        tiled=tiled,
                    )
                    yield way
                    yield from _streaming(way, pod, work)


def _streaming(way: Arrangement, pod: Pod, work: Work) -> Iterator[Arrangement]:
    """The same with weights on the host, of about a dozen numbers of blocks.

    Each must be checkpointed and updated at once, or its weights would be needed on the GPU from one pass to the other;
    and only the fused optimizers step a weight wherever it is.
    """
    blocks = work.shape.blocks
    alone = way.processes == 1 and way.passes == 1
    if alone and way.states_on_host == blocks and way.in_backward and work.fused and way.checkpointed == blocks:
        for count in [*range(GRADE, blocks, GRADE), blocks]:
            if host_memory(work, 1, blocks, count) <= pod.memory:
                yield replace(way, streamed=count)


def _pass_sizes(share: int) -> list[int]:
    """Sizes of a pass worth trying: the smallest for each number of passes, so that passes are about alike."""
    return sorted({math.ceil(share / passes) for passes in range(1, share + 1)}, reverse=True)


def _checkpointed(job: Job, blocks: int) -> list[int]:
    """How many blocks may be checkpointed: none, all, and about a dozen numbers between."""
    if job.plan.checkpointing is not None:
        return [blocks if job.plan.checkpointing else 0]
    return [*range(0, blocks, GRADE // 2), blocks]


def _state_places(job: Job, pod: Pod, work: Work, processes: int) -> list[int]:
    """Of how many blocks the optimizer's states may lie on the host."""
    if not work.fused or job.method == "lora":
        return [0]
    blocks = work.shape.blocks
    if job.optimizer.startswith("Paged") or job.plan.optimizer_states == "host":
        counts = [blocks]
    elif job.plan.optimizer_states == "device" or work.optimizer < GIB:
        return [0]
    else:
        counts = [0, *range(GRADE, blocks, GRADE), blocks]
    return [count for count in counts if not count or host_memory(work, processes, count) <= pod.memory]


def host_memory(work: Work, processes: int, states: int, streamed: int = 0) -> int:
    """Bytes of RAM the training takes, with the optimizer's states and the weights of so many blocks."""
    held = estimate.host_states(work, states) + estimate.streamed_bytes(work, streamed)
    return processes * estimate.HOST_PER_PROCESS + held


def peak_of(work: Work, way: Arrangement) -> int:
    return estimate.memory_per_gpu(work, way).peak


def usable_memory(gpus: tuple[Gpu, ...]) -> int:
    return int(min(gpu.memory for gpu in gpus) * USABLE)


def _why_not(job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], room: int) -> str:
    """Why no way fits, with figures, and what would."""
    least = _least(job, pod, work, len(gpus))
    memory = estimate.memory_per_gpu(work, least)
    cards = f"{len(gpus)} x {gpus[0].name}" if len(gpus) > 1 else gpus[0].name
    what = "Full fine-tuning" if job.method == "full" else "This LoRA"
    told = (
        f"{what} needs at least {in_gib(memory.peak)} on each GPU (GiB: {memory}); {cards} has {in_gib(room)} to use."
    )
    cures = [f"a GPU of {math.ceil(memory.peak / USABLE / GIB)} GB or more"]
    if _fits(job, replace(pod, memory=ANY_MEMORY), work, len(gpus), room):  # RAM is all that lacks
        ram = (
            f"With the optimizer's {in_gib(work.optimizer)} on the host this pod needs "
            f"{in_gib(host_memory(work, len(gpus), work.shape.blocks))} of RAM; it has {in_gib(pod.memory)}."
        )
        told = ram if least.states_on_host else f"{told} {ram}"
        cures = ["a pod with more RAM"] if least.states_on_host else [*cures, "a pod with more RAM"]
    cures += _cures(job, pod, work, len(gpus), room)
    return f"{told} Choose {', or '.join(cures)}."


def _least(job: Job, pod: Pod, work: Work, processes: int) -> Arrangement:
    """The way that needs the least memory of a GPU; one that lacks RAM only where all do."""
    ways = list(_ways(job, pod, work, processes)) or _ways(job, replace(pod, memory=ANY_MEMORY), work, processes)
    return min(ways, key=lambda way: peak_of(work, way))


def _cures(job: Job, pod: Pod, work: Work, processes: int, room: int) -> list[str]:
    """Changes of the job or the number of GPUs that make it fit, each by itself."""
    cures = []
    if job.method == "full" and not needs_whole_model(job.optimizer):
        counts = range(processes + 1, min(8, job.images_per_step) + 1)
        cures += [f"{n} of these GPUs" for n in counts if _fits(job, pod, work, n, room)][:1]
    fewer = range(job.images_per_step - 1, processes - 1, -1)
    smaller = (count for count in fewer if _fits(_changed(job, images_per_step=count), pod, work, processes, room))
    cures += [f"images_per_step: {count}" for count in smaller][:1]
    if job.method == "lora":
        return cures
    if job.max_grad_norm is not None and _fits(_changed(job, max_grad_norm=None), pod, work, processes, room):
        cures.append("no max_grad_norm")
    eight_bit = estimate.optimizer_bytes("AdamW8bit", work.shape.tensors().values(), {})
    light = replace(work, optimizer=eight_bit, fused=True)
    if work.optimizer > light.optimizer and _fits(_changed(job, optimizer="AdamW8bit"), pod, light, processes, room):
        cures.append("optimizer: AdamW8bit")
    way = _least(job, pod, work, processes)
    lora = replace(
        way,
        images_per_pass=1,
        passes=job.images_per_step,
        sharded=False,
        checkpointed=work.shape.blocks,
        states_on_host=0,
        streamed=0,
        base=MOST_FAITHFUL[-1],
    )
    if peak_of(replace(work, lora=True, trained=0, optimizer=0), lora) <= room:
        cures.append("method: lora")
    return cures


def _changed(job: Job, **changes: object) -> Job:
    return job.model_copy(update=changes)


def _fits(job: Job, pod: Pod, work: Work, processes: int, room: int) -> bool:
    return any(peak_of(work, way) <= room for way in _ways(job, pod, work, processes))


def cpu_way(job: Job, work: Work) -> Arrangement:
    """On CPU memory is no question at the sizes allowed there: one pass, nothing computed twice."""
    wish = job.plan
    full = job.method == "full"
    processes = min(wish.processes or job.gpus or 1, job.images_per_step)
    if full and needs_whole_model(job.optimizer):
        processes = 1
    share = math.ceil(job.images_per_step / processes)
    images = min(wish.images_per_pass or share, share)
    return Arrangement(
        processes=processes,
        images_per_pass=images,
        passes=math.ceil(share / images),
        sharded=full and processes > 1,
        reshard=False,
        checkpointed=work.shape.blocks if wish.checkpointing else 0,
        compiled=bool(wish.compile),
        in_backward=_in_backward(job),
        states_on_host=0,
        streamed=0,
        base=wish.base_precision or "bf16",
    )


def _in_backward(job: Job) -> bool:
    """Whether each weight is updated as soon as its gradient is there."""
    if job.plan.optimizer_in_backward is not None:
        return job.plan.optimizer_in_backward
    return job.method == "full" and not needs_whole_model(job.optimizer) and job.max_grad_norm is None
