"""Which GPUs a job takes and which way of training fits on them.

Every way is tried, and of those that fit the fastest is taken; but the optimizer's states leave the device only where
none fits with them on it: streaming them asks much of a pod's RAM and PCIe, which differ from pod to pod. So it is with
a frozen base, which is quantised no further than it must be, and with samples, which are decoded whole if they can be.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bootstrap import estimate
from bootstrap.drivers import branch, least_driver
from bootstrap.estimate import TILE, USABLE, Arrangement, Work
from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import GIB, PCIE, GpuModel, find_gpu, has_bf16
from bootstrap.lora_targets import lora_problems
from bootstrap.outcome import PodError
from bootstrap.pod import Gpu, Pod
from bootstrap.precision import FAITHFULNESS, MOST_FAITHFUL, Precision
from bootstrap.shortage import FailedPlan, room_after
from jobs.problem import JobError, Problem
from jobs.schema import Job

ACCUMULATION_COST = 1.05  # several passes must be this much faster than one: bf16 sums of gradients lose digits
ANY_MEMORY = 1 << 60
FP8 = (8, 9)  # the compute capability from which cards multiply in fp8
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
    if multiplies_in_fp8(job) and wish.base_precision not in (None, "bf16"):
        message = f"a base in {wish.base_precision} is taken back to bf16 for each product"
        refuse("products", message, "Leave one of products and base_precision out")
    if job.lora:
        problems += lora_problems(estimate.linear_layers(base), job.lora)
    if problems:
        raise JobError(problems)


def multiplies_in_fp8(job: Job) -> bool:
    return job.plan.products not in (None, "bf16")


def refuse_products(job: Job, gpus: Sequence[Gpu], processes: int) -> None:
    """Raises PodError where these cards cannot multiply as the job says, JobError where so many processes cannot."""
    if not multiplies_in_fp8(job):
        return
    if job.method == "full" and processes > 1:
        message = f"{job.plan.products} is for one process where all weights are trained; there are {processes}"
        raise JobError([Problem(message, "Write gpus: 1, or leave the key out", "plan.products")])
    lacking = sorted({gpu.name for gpu in gpus if gpu.capability and gpu.capability < FP8})
    if lacking:
        raise PodError(
            f"{', '.join(lacking)} has no fp8 arithmetic, which plan.products asks for: that came with compute "
            "capability 8.9. Leave the key out, or choose an Ada, Hopper or Blackwell card, such as L40S or H100."
        )


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


def choose_way(
    job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], failed: Sequence[FailedPlan] = ()
) -> Arrangement | None:
    """The fastest way that fits, also by what plans that failed have taught; None where there is none.

    What comes after a plan that failed leaves the numbers as they were: a frozen base keeps its format.
    """
    base = failed[-1].base if failed else None
    for room in (usable_memory(gpus), min(gpu.memory for gpu in gpus)):
        best = fastest(job, pod, work, slowest(gpus), len(gpus), room_after(room, failed), base)
        if best is not None or not overridden(job):
            return best
    return None  # an override may use what is kept back for fragmentation, and even so


def overridden(job: Job) -> list[str]:
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


def fastest(
    job: Job, pod: Pod, work: Work, gpu: GpuModel, processes: int, room: int, base: Precision | None = None
) -> Arrangement | None:
    """Of the ways whose peak is no more than ``room``; ``base``: only those with a frozen base of this format."""
    gpu = linked(gpu, pod)
    fitting = [
        way
        for way in ways(job, pod, work, processes)
        if peak_of(work, way) <= room and (base is None or way.base == base)
    ]
    share = max(split_images(job.images_per_step, processes))

    def cost(way: Arrangement) -> tuple[bool, bool, int, bool, float, int, int, int, int, bool]:
        seconds = estimate.seconds_per_step(work, way, gpu, share) * (ACCUMULATION_COST if way.passes > 1 else 1)
        return (
            way.states_on_host > 0,
            way.ema_on_host,
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


def ways(job: Job, pod: Pod, work: Work, processes: int) -> Iterator[Arrangement]:
    """Every way to run the job in so many processes that its overrides and the host's memory allow."""
    wish = job.plan
    full = job.method == "full"
    share = max(split_images(job.images_per_step, processes))
    sharded = full and processes > 1
    per_pass = [min(wish.images_per_pass, share)] if wish.images_per_pass else pass_sizes(share)
    bases = (
        (wish.base_precision,)
        if wish.base_precision
        else ("bf16",)
        if full or multiplies_in_fp8(job)
        else MOST_FAITHFUL
    )
    decodings = (False, True) if work.sample_pixels > TILE**2 else (False,)
    averages = (False, True) if full and work.ema else (False,)
    for images, base, tiled, average in itertools.product(per_pass, bases, decodings, averages):
        for checkpointed in _checkpointed(job, work.shape.blocks):
            for reshard in (False, True) if sharded else (False,):
                for on_host in _state_places(job, pod, work, processes, average):
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
                        ema_on_host=average,
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
    alone = way.processes == 1 and way.passes == 1 and (way.ema_on_host or not work.ema)
    if alone and way.states_on_host == blocks and way.in_backward and work.fused and way.checkpointed == blocks:
        for count in [*range(GRADE, blocks, GRADE), blocks]:
            if host_memory(work, 1, blocks, count, average=way.ema_on_host) <= pod.memory:
                yield replace(way, streamed=count)


def pass_sizes(share: int) -> list[int]:
    """Sizes of a pass worth trying: the smallest for each number of passes, so that passes are about alike."""
    return sorted({math.ceil(share / passes) for passes in range(1, share + 1)}, reverse=True)


def _checkpointed(job: Job, blocks: int) -> list[int]:
    """How many blocks may be checkpointed: none, all, and about a dozen numbers between."""
    if job.plan.checkpointing is not None:
        return [blocks if job.plan.checkpointing else 0]
    return [*range(0, blocks, GRADE // 2), blocks]


def _state_places(job: Job, pod: Pod, work: Work, processes: int, average: bool) -> list[int]:
    """Of how many blocks the optimizer's states may lie on the host, beside the weights' average or without it."""
    blocks = work.shape.blocks
    if not work.fused or job.method == "lora":
        counts = [0]
    elif job.optimizer.startswith("Paged") or job.plan.optimizer_states == "host":
        counts = [blocks]
    elif job.plan.optimizer_states == "device" or work.optimizer < GIB:
        counts = [0]
    else:
        counts = [0, *range(GRADE, blocks, GRADE), blocks]
    return [
        count
        for count in counts
        if not (count or average) or host_memory(work, processes, count, average=average) <= pod.memory
    ]


def host_memory(work: Work, processes: int, states: int, streamed: int = 0, *, average: bool = False) -> int:
    """Bytes of RAM the training takes, with the optimizer's states and the weights of so many blocks, and with the
    weights' average."""
    held = estimate.host_states(work, states) + estimate.streamed_bytes(work, streamed)
    held += estimate.host_average(work) if average else 0
    return processes * estimate.HOST_PER_PROCESS + held


def peak_of(work: Work, way: Arrangement) -> int:
    return estimate.memory_per_gpu(work, way).peak


def usable_memory(gpus: tuple[Gpu, ...]) -> int:
    return int(min(gpu.memory for gpu in gpus) * USABLE)


def cpu_way(job: Job, work: Work, failed: Sequence[FailedPlan] = ()) -> Arrangement | None:
    """On CPU memory is no question at the sizes allowed there: one pass, nothing computed twice. Where it was one all
    the same, the first way that needs less; None where there is none."""
    wish = job.plan
    full = job.method == "full"
    processes = min(wish.processes or job.gpus or 1, job.images_per_step)
    if full and needs_whole_model(job.optimizer):
        processes = 1
    share = math.ceil(job.images_per_step / processes)
    most = [min(wish.images_per_pass, share)] if wish.images_per_pass else pass_sizes(share)
    blocks = work.shape.blocks
    checkpointed = [0, blocks] if wish.checkpointing is None else [blocks if wish.checkpointing else 0]
    every = (
        Arrangement(
            processes=processes,
            images_per_pass=images,
            passes=math.ceil(share / images),
            sharded=full and processes > 1,
            reshard=False,
            checkpointed=count,
            compiled=bool(wish.compile),
            in_backward=_in_backward(job),
            states_on_host=0,
            streamed=0,
            base=wish.base_precision or "bf16",
        )
        for images, count in itertools.product(most, checkpointed)
    )
    room = room_after(ANY_MEMORY, failed)
    return next((way for way in every if peak_of(work, way) <= room), None)


def _in_backward(job: Job) -> bool:
    """Whether each weight is updated as soon as its gradient is there."""
    if job.plan.optimizer_in_backward is not None:
        return job.plan.optimizer_in_backward
    return job.method == "full" and not needs_whole_model(job.optimizer) and job.max_grad_norm is None
