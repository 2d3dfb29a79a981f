"""How a job runs on a pod: which GPUs, how the images of a step are split, what is kept where, and why.

``make_plan`` is pure: the same job, pod, base and data give the same plan, and no GPU is needed to ask. What a job's
``plan:`` says is not up for choice; of the ways left it takes the one that ``ways.py`` finds best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bootstrap import estimate
from bootstrap.estimate import Arrangement, Work, decimal, in_gib, in_time
from bootstrap.flux_shape import FluxShape, shift_of_tokens
from bootstrap.gpus import GpuModel, find_gpu, has_bf16
from bootstrap.pod import Gpu, Pod, lacks_shm
from bootstrap.precision import Precision
from bootstrap.reasons import Choice as Choice
from bootstrap.reasons import explain
from bootstrap.shortage import FailedPlan, Shortage, setting_of
from bootstrap.ways import (
    choose_gpus,
    choose_way,
    cpu_way,
    fastest,
    host_memory,
    linked,
    refuse_contradictions,
    refuse_products,
    slowest,
    split_images,
    usable_memory,
)
from bootstrap.ways_out import no_way, spelled_out
from jobs.schema import Job
from jobs.values import Products

CPU_PARAMETERS = 100_000_000  # flux-tiny has a few millions; one step of a real FLUX on a CPU takes most of an hour
LORA_STEPS = 1000
FULL_EPOCHS, FULL_LEAST, FULL_MOST = 100, 1000, 4000
MANY_VIEWS = {"full": 200, "lora": 300}  # times one image is seen, from where on a model repeats it by heart
DAY_IN_MINUTES = 24 * 60
MOST_WORKERS = 2  # per process: cached images are read, not decoded; more only costs memory


@dataclass(frozen=True)
class DataSummary:
    images: int
    items_per_epoch: int  # images x repeats x resolutions
    buckets: tuple[tuple[int, int, int], ...]  # width, height, items per epoch


@dataclass(frozen=True)
class Plan:
    device: Literal["cuda", "cpu"]
    gpus: tuple[int, ...]  # nvidia-smi's indices of the GPUs used; () on CPU
    processes: int
    split: tuple[int, ...]  # images of a full step per process, the most first
    images_per_pass: int  # most images one process takes in one forward and backward
    passes: int  # of a full step whose images are all of one bucket
    sharding: Literal["none", "fsdp"]
    reshard_after_forward: bool
    checkpointed_blocks: int  # the first so many keep their inputs alone and are computed again in the backward pass
    compile: bool
    optimizer_in_backward: bool
    host_state_blocks: int  # blocks whose optimizer states lie on the host
    streamed_blocks: int  # blocks whose weights do; all states do then. Both spread evenly
    base_precision: Precision
    tiled_decoding: bool  # of samples, which are then decoded in tiles of estimate.TILE pixels
    threads: int  # CPU threads per process
    workers: int  # data loading threads per training process
    steps: int
    steps_per_epoch: int
    memory_per_gpu: int  # estimated peak, bytes
    state_bytes: int  # of one complete state
    weights_bytes: int  # of its weights, and of the output
    disk_bytes: int  # of all states at most, the one being written included
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]
    ema_on_host: bool = False  # the average of the blocks' weights lies on the host
    p2p: bool = True  # whether NCCL may let the GPUs talk to each other directly
    products: Products = "bf16"  # number format in which the blocks' large matrices are multiplied
    setting: str = ""  # what of job and cards the plan's memory hangs on: bootstrap/shortage.py
    assistant_bytes: int = 0  # of assistant_lora, on each GPU

    @property
    def checkpointing(self) -> bool:
        return self.checkpointed_blocks > 0

    @property
    def optimizer_states(self) -> Literal["device", "host"]:
        return "host" if self.host_state_blocks else "device"

    def that_failed(self, shortage: Shortage) -> FailedPlan:
        """For the record, from which the next plan is made."""
        return FailedPlan(self.setting, self.memory_per_gpu, shortage.needed, self.base_precision, str(shortage))


@dataclass(frozen=True)
class Prediction:
    """What a run will take on GPUs that the table knows."""

    step: float  # seconds
    images_per_second: float
    training: float  # seconds of all steps
    drawing: float  # seconds of all samples
    validating: float  # seconds of all rounds of validation
    saving: float  # seconds of all saves, on a network volume

    @property
    def total(self) -> float:
        return self.training + self.drawing + self.validating + self.saving


def make_plan(
    job: Job,
    pod: Pod,
    base: FluxShape,
    data: DataSummary,
    failed: Sequence[FailedPlan] = (),
    *,
    assistant: int = 0,
) -> Plan:
    """``failed``: plans on record that ran out of GPU memory; those of this job on these cards leave more room.
    ``assistant``: bytes of assistant_lora.

    Raises PodError where this pod cannot run the job, JobError where an override of the job cannot be.
    """
    refuse_contradictions(job, base)
    sizes = image_sizes(job, data)
    work = estimate.work_of(job, base, sizes, assistant)
    on_gpu = bool(pod.gpus) or base.parameters() >= CPU_PARAMETERS
    gpus, why = choose_gpus(job, pod) if on_gpu else ((), "")
    setting = setting_of(job, work, gpus)
    failed = [each for each in failed if each.setting == setting and job.plan.retry is not False]
    if on_gpu:
        chosen = choose_way(job, pod, work, gpus, failed)
        device = Choice("GPUs", _names(gpus), why)
    else:
        chosen = cpu_way(job, work, failed)
        device = Choice("device", "CPU", f"no GPU here; {work.weights / 1e6:.1f} M parameters need none")
    if chosen is None:
        raise no_way(job, pod, work, gpus, sizes, failed)
    way = chosen
    refuse_products(job, gpus, way.processes)
    split = split_images(job.images_per_step, way.processes)
    steps, per_epoch, length_reason = run_length(job, data)
    disk, disk_reason = disk_needed(job, work, steps, per_epoch)
    threads = max(1, pod.cpus // way.processes)
    workers, workers_reason = _workers(pod, way)
    memory = estimate.memory_per_gpu(work, way)
    choices = (
        device,
        *explain(job, pod, work, gpus, way, split),
        *_learned(failed, memory.peak),
        Choice("memory", _of(memory.peak, gpus), f"GiB: {memory}"),
        Choice("CPU", f"threads {threads}, loaders {workers}", workers_reason),
        _explain_noise(job, base, sizes),
        Choice("length", f"{steps} steps", length_reason),
        Choice("disk", decimal(disk), disk_reason),
    )
    plan = Plan(
        device="cuda" if gpus else "cpu",
        gpus=tuple(gpu.index for gpu in gpus),
        processes=way.processes,
        split=split,
        images_per_pass=way.images_per_pass,
        passes=way.passes,
        sharding="fsdp" if way.sharded else "none",
        reshard_after_forward=way.reshard,
        checkpointed_blocks=way.checkpointed,
        compile=way.compiled,
        optimizer_in_backward=way.in_backward,
        host_state_blocks=way.states_on_host,
        streamed_blocks=way.streamed,
        base_precision=way.base,
        ema_on_host=way.ema_on_host,
        tiled_decoding=way.tiled,
        threads=threads,
        workers=workers,
        steps=steps,
        steps_per_epoch=per_epoch,
        memory_per_gpu=memory.peak,
        state_bytes=work.state,
        weights_bytes=work.weights_file,
        disk_bytes=disk,
        choices=choices,
        warnings=(),
        p2p=pod.p2p,
        products=job.plan.products or "bf16",
        setting=setting,
        assistant_bytes=assistant,
    )
    warnings = [*_warn_data(job, data, plan), *_warn_gpus(pod, gpus), *_warn_pod(pod, work, way, plan)]
    warnings += _warn_scaling(job, pod, work, gpus, way)
    return replace(plan, choices=(*choices, *_times(job, pod, base, data, plan)), warnings=tuple(warnings))


def _learned(failed: Sequence[FailedPlan], peak: int) -> tuple[Choice, ...]:
    """What plans that ran out of memory have to do with this one."""
    if not failed:
        return ()
    last = failed[-1]
    reason = (
        f"the one before was estimated at {in_gib(last.planned)} and ran out at {in_gib(last.needed)}; this one is "
        f"estimated at {in_gib(peak)} and gives the same numbers"
    )
    return (Choice("retry", f"plan {len(failed) + 1}", reason),)


def ways_out_of(plan: Plan, job: Job, pod: Pod, base: FluxShape, data: DataSummary, failed: FailedPlan) -> str:
    """What to change after a plan that ran out of memory, in a sentence; "" on CPU."""
    gpus = tuple(gpu for gpu in pod.gpus if gpu.index in plan.gpus)
    if not gpus:
        return ""
    sizes = image_sizes(job, data)
    work = estimate.work_of(job, base, sizes, plan.assistant_bytes)
    return spelled_out(job, pod, work, gpus, sizes, [failed])


def predict(plan: Plan, job: Job, pod: Pod, base: FluxShape, data: DataSummary) -> Prediction | None:
    """None on CPU and on a GPU that the table does not know."""
    models = [find_gpu(gpu.name) for gpu in pod.gpus if gpu.index in plan.gpus]
    known = [model for model in models if model]
    if not known or len(known) < len(models):
        return None
    slowest = linked(min(known, key=lambda model: model.tflops), pod)
    work = estimate.work_of(job, base, image_sizes(job, data), plan.assistant_bytes)
    step = estimate.seconds_per_step(work, _way_of(plan), slowest, max(plan.split))
    rounds = 1 + math.ceil(plan.steps / job.sample.every)
    saves = count_saves(job, plan.steps, plan.steps_per_epoch)
    return Prediction(
        step=step,
        images_per_second=job.images_per_step / step,
        training=plan.steps * step,
        drawing=rounds * estimate.seconds_of_samples(work, plan.processes, slowest),
        validating=_validating(job, plan, work, slowest),
        saving=saves * plan.state_bytes / estimate.VOLUME_SPEED,
    )


def _validating(job: Job, plan: Plan, work: Work, gpu: GpuModel) -> float:
    """Seconds of all rounds; those before saves, where they are not at the same steps, are not counted."""
    if job.validation is None:
        return 0.0
    rounds = 1 + math.ceil(plan.steps / job.validation.every)
    images = math.ceil(job.validation.images * job.validation.levels / plan.processes)
    return rounds * estimate.seconds_forward(work, _way_of(plan), gpu, images)


# ---------------------------------------------------------------- images, steps, disk


def image_sizes(job: Job, data: DataSummary) -> list[tuple[int, int, float]]:
    """Width, height and frequency of the images; squares of the job's resolutions while the data are not known."""
    if data.buckets:
        return [(width, height, float(items)) for width, height, items in data.buckets]
    sides: list[int] = []
    for dataset in job.datasets:
        own = dataset.resolution
        sides += job.resolutions if own is None else own if isinstance(own, tuple) else (own,)
    return [(side, side, float(count)) for side, count in Counter(sides).items()]


def epoch_steps(job: Job, data: DataSummary) -> int:
    """Steps of an epoch, which shows every item once: see bootstrap/order.py."""
    if job.mixes_buckets or not data.buckets:
        return max(1, math.ceil(data.items_per_epoch / job.images_per_step))
    return sum(math.ceil(items / job.images_per_step) for _, _, items in data.buckets)


def run_length(job: Job, data: DataSummary) -> tuple[int, int, str]:
    """Steps in all, steps per epoch, and the reason in words.

    Where the images do not come out even, the last step of an epoch (of a bucket, for full) is smaller.
    """
    per_epoch = epoch_steps(job, data)
    epoch = f"an epoch is {per_epoch} steps ({data.items_per_epoch} items, {job.images_per_step} a step)"
    if not data.items_per_epoch:
        epoch = "the data are not known yet"
    if job.steps is not None:
        return job.steps, per_epoch, f"the job says so; {epoch}"
    if job.epochs is not None:
        return job.epochs * per_epoch, per_epoch, f"{job.epochs} epochs; {epoch}"
    if job.method == "lora":
        return LORA_STEPS, per_epoch, f"the default for lora; {epoch}"
    steps = min(max(FULL_EPOCHS * per_epoch, FULL_LEAST), FULL_MOST)
    return steps, per_epoch, f"the default: {FULL_EPOCHS} epochs within {FULL_LEAST} to {FULL_MOST} steps; {epoch}"


def count_saves(job: Job, steps: int, per_epoch: int) -> int:
    """Of a run; where they go by the clock, as many as a day has, which is longer than most runs."""
    kind, number = job.save.interval
    if kind == "minutes":
        return min(steps, math.ceil(DAY_IN_MINUTES / number))
    return math.ceil(steps / (number * (per_epoch if kind == "epochs" else 1)))


def disk_needed(job: Job, work: Work, steps: int, per_epoch: int) -> tuple[int, str]:
    """Bytes of all states at the fullest moment, while a new one is written and none is removed yet; and in words."""
    saves = count_saves(job, steps, per_epoch)
    weights = saves if job.save.weights == "all" else max(int(job.save.weights), job.save.states)
    if job.save.keep_every:
        weights += steps // job.save.keep_every
    if job.validation and job.validation.keeps_best:
        weights += 1
    most_weights, most_optimizers = min(saves, weights + 1), min(saves, job.save.states + 1)
    average = f" with {decimal(work.ema)} of the weights' average" if work.ema else ""
    total = most_weights * work.weights_file + most_optimizers * (work.optimizer + work.ema)
    return total, (
        f"at most {most_weights} x weights of {decimal(work.weights_file)} and {most_optimizers} x optimizer of "
        f"{decimal(work.optimizer)}{average}, the one being written included; saves: {saves}"
    )


def _explain_noise(job: Job, base: FluxShape, sizes: Sequence[tuple[int, int, float]]) -> Choice:
    """The levels of noise that images are trained at, and the guidance that the model is told with them."""
    told = f"guidance {job.guidance:g} while training" if base.guidance else "no guidance: the base takes none"
    if job.timestep_sampling == "shift":
        told = f"shift {job.discrete_flow_shift:g}; {told}"
    elif job.timestep_sampling == "flux_shift":
        tokens = sorted(width * height // 256 for width, height, _ in sizes)
        shifts = dict.fromkeys(f"{shift_of_tokens(each):.2f}" for each in (tokens[0], tokens[-1]))
        told = f"shift {' to '.join(shifts)}, by the images' sizes; {told}"
    return Choice("noise", job.timestep_sampling, told)


# ---------------------------------------------------------------- loaders


def _workers(pod: Pod, way: Arrangement) -> tuple[int, str]:
    """Loading threads for each training process, and why. Threads, not processes: they need no /dev/shm."""
    workers = max(1, min(MOST_WORKERS, pod.cpus // way.processes - 1))
    if workers == MOST_WORKERS:
        return workers, f"enough to read cached images; {pod.cpus} CPUs"
    return workers, f"{pod.cpus} CPUs for {way.processes} process{'es' if way.processes > 1 else ''}"


def _way_of(plan: Plan) -> Arrangement:
    return Arrangement(
        processes=plan.processes,
        images_per_pass=plan.images_per_pass,
        passes=plan.passes,
        sharded=plan.sharding == "fsdp",
        reshard=plan.reshard_after_forward,
        checkpointed=plan.checkpointed_blocks,
        compiled=plan.compile,
        in_backward=plan.optimizer_in_backward,
        states_on_host=plan.host_state_blocks,
        streamed=plan.streamed_blocks,
        base=plan.base_precision,
        ema_on_host=plan.ema_on_host,
        tiled=plan.tiled_decoding,
    )


def _times(job: Job, pod: Pod, base: FluxShape, data: DataSummary, plan: Plan) -> tuple[Choice, ...]:
    found = predict(plan, job, pod, base, data)
    if found is None:
        why = "no estimate for a CPU" if plan.device == "cpu" else "this GPU is not in the table of known ones"
        return (Choice("speed", "not known", why),)
    parts = {"training": found.training, "samples": found.drawing, "validation": found.validating}
    parts |= {"saves": found.saving}
    told = ", ".join(f"{name} {in_time(seconds)}" for name, seconds in parts.items() if seconds)
    return (
        Choice(
            "speed",
            f"{found.step:.2f} s a step, {found.images_per_second:.2f} images/s",
            "estimated from the card's figures on paper and whole steps measured on one H200",
        ),
        Choice("time", in_time(found.total), f"{told}; downloads and the cache of images come before"),
    )


# ---------------------------------------------------------------- warnings


def _warn_data(job: Job, data: DataSummary, plan: Plan) -> list[str]:
    warnings: list[str] = []
    if not data.images:
        return warnings
    views = plan.steps * job.images_per_step / data.images
    if views >= MANY_VIEWS[job.method]:
        least = max(1, round(plan.steps * MANY_VIEWS[job.method] / 2 / views))
        warnings.append(
            f"{plan.steps} steps show each of the {data.images} images about {views:.0f} times: the model will repeat "
            f"them by heart. Use more images or fewer steps (such as {least}), and judge the earlier states too."
        )
    if data.items_per_epoch < job.images_per_step:
        warnings.append(
            f"A step asks for {job.images_per_step} images, but the data have {data.items_per_epoch}: each step is the "
            "whole data set. Lower images_per_step or use more images."
        )
        return warnings
    rest = data.items_per_epoch % job.images_per_step
    idle = (plan.processes - rest) / (plan.processes * plan.steps_per_epoch)
    if 0 < rest < plan.processes and idle > 0.1:
        warnings.append(
            f"{data.items_per_epoch} items in steps of {job.images_per_step}: the last step of every epoch has {rest} "
            f"for {plan.processes} processes, so that {idle:.0%} of the paid time is idle."
        )
    return warnings


def _warn_gpus(pod: Pod, gpus: tuple[Gpu, ...]) -> list[str]:
    warnings: list[str] = []
    refused = sorted({gpu.name for gpu in pod.gpus if gpu.capability and not has_bf16(gpu.capability)})
    if gpus and refused:
        warnings.append(f"{', '.join(refused)}: stays idle, having no bf16.")
    for gpu in gpus:
        if gpu.free is not None and gpu.free < 0.9 * gpu.memory:
            taken, who = in_gib(gpu.memory - gpu.free), ", ".join(gpu.processes) or "something else"
            warnings.append(f"GPU {gpu.index} has {taken} in use by {who}, which the plan does not count: end it.")
        if gpu.capability is None:
            warnings.append(f"GPU {gpu.index} ({gpu.name}) does not say whether it has bf16; it is tried.")
    return warnings


def _warn_pod(pod: Pod, work: Work, way: Arrangement, plan: Plan) -> list[str]:
    warnings: list[str] = []
    if plan.device == "cpu":
        return warnings
    need = host_memory(work, way.processes, way.states_on_host, way.streamed, average=way.ema_on_host)
    if 0 < pod.memory < need:
        warnings.append(
            f"{plan.processes} process{'es' if plan.processes > 1 else ''} will need about {in_gib(need)} of RAM; this "
            f"container may use {in_gib(pod.memory)}. A process that ends with SIGKILL (-9) ran out of it: use fewer "
            "GPUs (gpus:) or a pod with more RAM."
        )
    if lacks_shm(plan.processes, pod.shm):
        warnings.append(
            f"/dev/shm has {in_gib(pod.shm)}, too little for the traffic of {plan.processes} GPUs through host memory: "
            "NCCL is told to do without, which is slower where the GPUs have no direct link. Start the container with "
            "--shm-size 1g or more."
        )
    room = usable_memory(tuple(gpu for gpu in pod.gpus if gpu.index in plan.gpus))
    if plan.memory_per_gpu > room:
        warnings.append(
            f"With what plan: says, {in_gib(plan.memory_per_gpu)} of each GPU will be in use; {in_gib(room)} are safe. "
            "Leave it out if memory runs out."
        )
    return warnings


def _warn_scaling(job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], way: Arrangement) -> list[str]:
    """Says when several GPUs hardly beat one of them."""
    if way.processes < 2 or not gpus or find_gpu(gpus[0].name) is None:
        return []
    gpu = slowest(gpus)
    alone = fastest(job, pod, work, gpu, 1, usable_memory(gpus))
    if alone is None:
        return []
    single = estimate.seconds_per_step(work, alone, gpu, job.images_per_step)
    together = estimate.seconds_per_step(work, way, gpu, math.ceil(job.images_per_step / way.processes))
    if single / together >= 1.2:
        return []
    return [
        f"{way.processes} GPUs are estimated at {together:.2f} s a step, one of them at {single:.2f} s: the traffic "
        "between them eats the gain. One GPU (gpus: 1), or more images_per_step, uses the money better."
    ]


# ---------------------------------------------------------------- words


def _names(gpus: tuple[Gpu, ...]) -> str:
    kinds = Counter(gpu.name for gpu in gpus)
    return " + ".join(f"{number} x {name}" for name, number in kinds.items())


def _of(peak: int, gpus: tuple[Gpu, ...]) -> str:
    return f"{in_gib(peak)} of {in_gib(usable_memory(gpus))}" if gpus else in_gib(peak)
