"""What a way of training needs: memory on each GPU, seconds per step, bytes of a state. Plain arithmetic, no torch.

Every figure comes from a measurement on one H200 with FLUX.1-dev (11.9 B parameters, batch 1, 1024 px, 512 text
tokens: 4608 tokens) or is marked as not measured:

  22.2 GiB  weights in bf16
  24.7 GiB  peak with checkpointing and the step in the backward pass (SGD): 22.2 + 1.5 kept between 57 blocks
            + 0.5 inside the block at work + 0.6 of that block's gradients = 24.8
  50.3 GiB  the same, compiled, without checkpointing: 22.2 + 0.6 + 27.5, that is 36.6 bytes per token, width and block
  0.48 s    a whole step with AdamW8bit, compiled, without checkpointing: 3 x 74.4 TFLOP in 0.42 s, 53 % of the card's
            989 TFLOP/s on paper, and an update of 0.06 s;   0.81 s  not compiled, with checkpointing: 37 %
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import GIB, GpuModel
from bootstrap.layout import bfl_tensors, module_in_bfl
from bootstrap.lora_targets import adapters_of, target_layers
from bootstrap.precision import Precision, base_bytes, unpacked_bytes
from jobs.schema import Job, Lora

BF16, FP32 = 2, 4  # bytes

# Of the memory that nvidia-smi shows, what training may fill: the driver keeps about 1 %, and torch's allocator loses
# a few percent between blocks of different sizes.
USABLE = 0.955
CONTEXT = int(1.3 * GIB)  # CUDA context, cuBLAS and cuDNN, kernels, one communicator: 1.30 to 1.35 at the end of runs
NCCL = int(0.7 * GIB)  # buffers of a communicator, with more than one process
ACTIVATION = 36.6  # bytes kept for the backward pass per token, width and block, compiled (above)
DORA_ACTIVATION = 17  # more, with DoRA on attention and feed-forward: each layer's output before it is stretched
EAGER = 1.4  # not compiled, more of them: norms, gates and GELU inputs are kept apart. Not measured
AVERAGE_COPIES = 3  # 32-bit copies of one tensor while its average follows it or changes places with it
UPDATE_COPIES = 2  # 32-bit copies of the one tensor being updated, weight and gradient, where no fused kernel does it
SLOTS = 3  # blocks whose streamed states, or weights, are on the GPU at a time (trainer/ring.py)
GATHERED_BLOCKS = 3  # sharded: the block at work, the next one under way, the last one not yet given back
VAE = int(0.2 * GIB)  # 84 M parameters, in bf16
DECODE = 3 * GIB / 2**20  # bytes per pixel while the VAE decodes a sample. Not measured here; 2.5 to 3 GiB at 1024 px
TILE = 512  # pixels; the side of the tiles that a sample is decoded in where it cannot be decoded whole

# Whole steps on one H200 (bench/NOTES.md): a full one at 1024 px 0.48 s, eight images at 512 px with checkpointing and
# streamed states 1.35 s, an adapter's at 1024 px 0.39 s.
EFFICIENCY_HOPPER = 0.52  # of the bf16 rate on paper, compiled, with cuDNN's attention
EFFICIENCY = 0.44  # with flash attention: as measured there; not measured on other cards
EFFICIENCY_EAGER = 0.37
LORA_SLOWDOWN = 0.82  # of the above: the adapters' many small products and their traffic
UPDATE_SLOWDOWN = 2.4  # times what its bytes alone take: encoding 8-bit states and rounding are arithmetic
DEQUANTISE_SLOWDOWN = 2  # times what its bytes alone take. Not measured
HOST_LINK = 20.0  # GB/s between a GPU and pinned host memory, both directions at once: PCIe 4 x16
HOST_LINK_HOPPER = 50.0  # as measured
HOST_PER_PROCESS = 3 * GIB  # libraries, compiler and buffers of one training process
VOLUME_SPEED = 300e6  # bytes/s written to a network volume, advertised as 200 to 400 MB/s
BLOCK_8BIT = 256  # values that share one absmax in an 8-bit state

# Bytes of state per parameter: 32-bit, and, where the optimizer has 8-bit states, (values, absmax blocks) of 1 byte.
_STATES_32BIT = {"Lion8bit": 4, "PagedLion8bit": 4, "Prodigy": 16}  # Prodigy: two averages, start, distance; else 8
_STATES_8BIT = {"AdamW8bit": 2, "PagedAdamW8bit": 2, "Lion8bit": 1, "PagedLion8bit": 1}
COPY_BUFFERS = 3  # blocks that the GPUs see of each other (trainer/peer_copies.py): two to gather, one to sum
FUSED = ("AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit", "Lion8bit", "PagedLion8bit")


@dataclass(frozen=True)
class Work:
    """What a job trains, in numbers."""

    shape: FluxShape
    lora: bool
    weights: int  # parameters of the base
    trained: int  # parameters that are trained: all of them, or the adapter's
    largest: int  # parameters of the largest trained tensor
    optimizer: int  # bytes of the optimizer's states, whole
    ema: int  # bytes of the average of the weights, whole; 0 without one
    ema_every: int  # steps from one time it follows them to the next
    fused: bool  # whether one kernel steps a weight, without 32-bit copies
    tokens: int  # of the largest image and its text
    forward: float  # floating-point operations of an average image's forward pass
    sample_pixels: int  # of the largest sample; 0 without samples
    pictures: int  # of a round of samples
    sample_flops: float  # floating-point operations of a round of samples, but for the VAE's
    weights_file: int  # bytes of a state's weights: the whole model in bf16, or the adapter's file
    dora: bool = False
    assistant: int = 0  # bytes of a frozen adapter beside the trained one

    @property
    def state(self) -> int:
        return self.weights_file + self.optimizer + self.ema


@dataclass(frozen=True)
class Arrangement:
    """How the work lies on the GPUs."""

    processes: int
    images_per_pass: int
    passes: int
    sharded: bool
    reshard: bool
    checkpointed: int  # blocks
    compiled: bool
    in_backward: bool
    states_on_host: int  # blocks whose optimizer states are on the host
    streamed: int  # blocks whose weights are on the host too
    base: Precision = "bf16"  # number format of a frozen base
    ema_on_host: bool = False  # the average of the blocks' weights lies on the host
    tiled: bool = False  # samples are decoded tile by tile


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    weights: int  # as they are held, and as they are gathered or taken back to bf16
    gradients: int
    optimizer: int  # states, and the copies an update works with
    activations: int
    outside: int  # of torch's allocator
    drawing: int  # what a sample adds to weights and optimizer, when there are no gradients and activations
    average: int = 0  # of the weights, and the copies that following and showing it work with

    @property
    def peak(self) -> int:
        training = self.gradients + self.activations
        return self.weights + self.optimizer + self.average + self.outside + max(training, self.drawing)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "optimizer": self.optimizer, "outside torch": self.outside}
        parts |= {"average": self.average} if self.average else {}
        if self.drawing > self.gradients + self.activations:
            parts["drawing a sample"] = self.drawing
        else:
            parts |= {"gradients": self.gradients, "activations": self.activations}
        return " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


def work_of(job: Job, shape: FluxShape, sizes: Iterable[tuple[int, int, float]], assistant: int = 0) -> Work:
    """``sizes``: width and height in pixels of the images, with how often each occurs; at least one. ``assistant``:
    bytes of assistant_lora."""
    sizes = list(sizes)
    text = text_tokens(shape)
    shapes = list(shape.tensors().values())
    weights = shape.parameters()
    if job.lora is not None:
        shapes = adapter_shapes(shape, job.lora)
    often = sum(weight for _, _, weight in sizes)
    drawings = job.sample.drawings
    return Work(
        shape=shape,
        lora=job.lora is not None,
        weights=weights,
        trained=sum(math.prod(each) for each in shapes),
        largest=max((math.prod(each) for each in shapes), default=0),
        optimizer=optimizer_bytes(job.optimizer, shapes, job.optimizer_args),
        ema=average_bytes(job, shapes),
        ema_every=job.ema.every if job.ema else 1,
        fused=job.optimizer in FUSED,
        tokens=max(width * height for width, height, _ in sizes) // 256 + text,
        forward=sum(shape.forward_flops(width, height, text) * weight for width, height, weight in sizes) / often,
        sample_pixels=max((each.width * each.height for each in drawings), default=0),
        pictures=len(drawings),
        sample_flops=sum(each.steps * shape.forward_flops(each.width, each.height, text) for each in drawings),
        dora=job.lora is not None and job.lora.dora,
        assistant=assistant,
        weights_file=_adapter_file(shape, job.lora) if job.lora is not None else BF16 * weights,
    )


def adapter_shapes(shape: FluxShape, lora: Lora) -> list[tuple[int, ...]]:
    """Of every tensor of an adapter: A and B of each layer and, with DoRA, the lengths of its rows."""
    linear = linear_layers(shape)
    shapes: list[tuple[int, ...]] = []
    for name, layer in adapters_of(linear, lora).items():
        out, size = linear[name]
        shapes += [(layer.rank, size), (out, layer.rank), *([(out,)] if lora.dora else [])]
    return shapes


def _adapter_file(shape: FluxShape, lora: Lora) -> int:
    """Bytes of an adapter's file, in fp32. In kohya's layout parts of one BFL matrix become one adapter of their joint
    rank, which has rows for every part, those without an adapter included (bootstrap/lora_file.py)."""
    linear = linear_layers(shape)
    if lora.layout == "diffusers":
        return FP32 * sum(math.prod(each) for each in adapter_shapes(shape, lora))
    ranks: dict[str, int] = defaultdict(int)
    inputs: dict[str, int] = {}
    for module, layer in adapters_of(linear, lora).items():
        name = module_in_bfl(module)[0]
        ranks[name] += layer.rank
        inputs[name] = linear[module][1]
    values = 0
    for name, rank in ranks.items():
        rows = bfl_tensors(shape)[f"{name}.weight"][0]
        values += rank * (inputs[name] + rows) + 1 + (rows if lora.dora else 0)
    return FP32 * values


def text_tokens(shape: FluxShape) -> int:
    """T5 tokens of a caption: 512, or 256 with the distilled schnell (the one without guidance)."""
    return 512 if shape.guidance else 256


def adapter_layers(shape: FluxShape, targets: str | tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Linear layers that get an adapter, by diffusers module name, with their (out, in) sizes."""
    linear = linear_layers(shape)
    return {name: linear[name] for name in target_layers(linear, targets)}


def linear_layers(shape: FluxShape) -> dict[str, tuple[int, int]]:
    """All of the model's, by diffusers module name, with their (out, in) sizes."""
    return {name.removesuffix(".weight"): (s[0], s[1]) for name, s in shape.tensors().items() if len(s) == 2}


def optimizer_bytes(optimizer: str, shapes: Iterable[tuple[int, ...]], options: Mapping[str, Any]) -> int:
    """Bytes of an optimizer's states. One given by import path is counted like AdamW, with two 32-bit values, unless it
    is an Adafactor too."""
    total = 0.0
    factored = optimizer.rpartition(".")[2] == "Adafactor"
    for shape in shapes:
        values = math.prod(shape)
        if factored:  # a row and a column of averages in place of a matrix
            total += FP32 * (shape[0] + shape[1] if len(shape) == 2 else values)
        elif optimizer in _STATES_8BIT and stored_in_8bit(shape):
            total += _STATES_8BIT[optimizer] * values * (1 + FP32 / BLOCK_8BIT)
        elif optimizer == "Prodigy":  # slice_p keeps start and distance of every p-th weight only
            total += values * (8 + 8 / max(1, _whole(options.get("slice_p"), 1)))
        else:
            total += values * _STATES_32BIT.get(optimizer, 8)
    return math.ceil(total)


def average_bytes(job: Job, shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of the average of the weights, in memory and on the disk alike (trainer/ema.py)."""
    return (BF16 if job.ema.dtype == "bf16" else FP32) * sum(math.prod(s) for s in shapes) if job.ema else 0


def stored_in_8bit(shape: tuple[int, ...]) -> bool:
    """An 8-bit optimizer keeps a state in 8 bits if and only if rows are whole blocks, so that any number of GPUs,
    each with some of the rows, has the same blocks."""
    return len(shape) == 2 and shape[1] % BLOCK_8BIT == 0


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def memory_per_gpu(work: Work, way: Arrangement) -> Memory:
    """Estimated peak on the fullest GPU."""
    parts = way.processes if way.sharded else 1
    block = BF16 * work.shape.block_parameters()
    whole = base_bytes(work.shape, way.base)
    gathered = 0 if not way.sharded else GATHERED_BLOCKS * block if way.reshard else whole
    if work.lora:
        gradients = FP32 * work.trained
        # weights of the adapter itself, in fp32, stand with the optimizer
        optimizer = FP32 * work.trained + work.optimizer
    else:
        # Gradients of the block at work; of two while a sharded one's are being summed up over the GPUs. All of
        # them, in shards, where the step waits for the whole model or for the last of several passes.
        gradients = block * (2 if way.sharded else 1)
        if not way.in_backward or way.passes > 1:
            gradients += BF16 * work.trained // parts
        copies = 0 if work.fused else UPDATE_COPIES * FP32 * work.largest
        slots = SLOTS * work.optimizer * work.shape.block_parameters() // work.trained if way.states_on_host else 0
        optimizer = (copies + slots + work.optimizer - host_states(work, way.states_on_host)) // parts
    outside = CONTEXT + (NCCL if way.processes > 1 else 0)
    if way.sharded and not way.reshard:
        outside += COPY_BUFFERS * block
    decoded = min(work.sample_pixels, TILE**2) if way.tiled else work.sample_pixels
    drawing = VAE + int(decoded * DECODE) if decoded else 0
    if way.streamed:
        whole += SLOTS * block - streamed_bytes(work, way.streamed)
    return Memory(
        weights=whole // parts + gathered + work.assistant + unpacked_bytes(work.shape, way.base),
        gradients=gradients,
        optimizer=optimizer,
        activations=way.images_per_pass * activation_bytes(work, way),
        outside=outside,
        drawing=drawing,
        average=_average_memory(work, way) // parts,
    )


def _average_memory(work: Work, way: Arrangement) -> int:
    """Bytes of the average of the weights on the GPU, or, streamed, of a few blocks of it and what is in none."""
    if not work.ema:
        return 0
    copies = AVERAGE_COPIES * FP32 * work.largest
    if not way.ema_on_host:
        return work.ema + copies
    slots = SLOTS * work.ema * work.shape.block_parameters() // work.trained
    return work.ema - host_average(work) + slots + copies


def host_average(work: Work) -> int:
    """Bytes of the average of the blocks' weights, the part that may lie on the host."""
    return work.ema * _parameters(work, work.shape.blocks) // work.trained if work.ema else 0


def streamed_bytes(work: Work, count: int) -> int:
    """Of the weights of ``count`` blocks, spread evenly over all."""
    return BF16 * _parameters(work, count)


def host_states(work: Work, count: int) -> int:
    """Bytes of the optimizer's states of ``count`` blocks, spread evenly over all."""
    return work.optimizer * _parameters(work, count) // work.trained if count else 0


def _parameters(work: Work, count: int) -> int:
    """Of ``count`` blocks, spread evenly over all."""
    return work.shape.parameters_of_spread(count)


def activation_bytes(work: Work, way: Arrangement) -> int:
    """Bytes that one image of the largest size keeps from its forward pass for its backward pass."""
    values = work.tokens * work.shape.width
    inside = values * (ACTIVATION + (DORA_ACTIVATION if work.dora else 0)) * (1 if way.compiled else EAGER)
    # A checkpointed block keeps its input. All of one that is computed again counts where none keeps it anyway: those
    # are the first blocks, whose turn in the backward pass comes when the others' has passed.
    whole = max(1, work.shape.blocks - way.checkpointed)
    return int(way.checkpointed * values * BF16 + whole * inside)


def seconds_per_step(work: Work, way: Arrangement, gpu: GpuModel, images: int) -> float:
    """Of a step in which the busiest process has ``images``.

    Traffic between GPUs is taken to hide under the arithmetic as far as that lasts (not measured yet), and so is that
    of streamed states under the backward pass (measured: it does).
    """
    parts = way.processes if way.sharded else 1
    again = way.checkpointed / work.shape.blocks
    backward = (1.2 if work.lora else 2) + again
    forward = images * work.forward / _rate(work, way, gpu)  # seconds
    compute = forward * (1 + backward)
    if way.base != "bf16":  # each pass reads the codes and writes bf16: forward, again where checkpointed, and backward
        dequantised = base_bytes(work.shape, way.base) + BF16 * work.weights
        compute += way.passes * (2 + again) * dequantised * DEQUANTISE_SLOWDOWN / (gpu.bandwidth * 1e9)
    foreign = (way.processes - 1) / way.processes  # of every tensor, what lies on the other GPUs
    if way.sharded:  # gradients are summed up in each pass, weights gathered once a step, or twice a pass
        traffic = way.passes * (3 if way.reshard else 1) * BF16 * work.weights * foreign
        traffic += 0 if way.reshard else BF16 * work.weights * foreign
    else:  # the adapter's gradients, once
        traffic = 2 * FP32 * work.trained * foreign
    waiting = max(0.0, traffic / (gpu.link * 1e9) - compute)
    # The update reads and writes weights and states and reads gradients; every further pass adds its own to those
    # before it.
    moved = 3 * BF16 * work.trained + 2 * work.optimizer
    moved += (way.passes - 1) * 3 * (FP32 if work.lora else BF16) * work.trained
    update = moved / parts / (gpu.bandwidth * 1e9) * (1 if work.lora else UPDATE_SLOWDOWN)
    if work.ema:  # the weights are read; the average is read and written, twice
        update += (BF16 * work.trained + 4 * work.ema) / work.ema_every / parts / (gpu.bandwidth * 1e9)
    link = (HOST_LINK_HOPPER if gpu.capability >= (9, 0) else HOST_LINK) * 1e9
    if way.ema_on_host:  # taken to hide under nothing. Not measured
        waiting += host_average(work) / work.ema_every / parts / link
    if way.states_on_host:
        weights = streamed_bytes(work, way.streamed)
        waiting += max(0.0, weights / link - forward)
        states = host_states(work, way.states_on_host) / parts
        waiting += max(0.0, (states + weights) / link - forward * backward - update)
    return compute + update + waiting


def seconds_forward(work: Work, way: Arrangement, gpu: GpuModel, images: int) -> float:
    """Of as many images, forward only."""
    return images * work.forward / _rate(work, way, gpu)


def _rate(work: Work, way: Arrangement, gpu: GpuModel) -> float:
    """Floating-point operations per second that training reaches."""
    share = EFFICIENCY_HOPPER if gpu.capability == (9, 0) else EFFICIENCY
    share = share if way.compiled else min(share, EFFICIENCY_EAGER)
    adapters = work.lora + work.dora + (work.assistant > 0)  # each as much as the first. Not measured
    return gpu.tflops * 1e12 * share * LORA_SLOWDOWN**adapters


def seconds_of_samples(work: Work, processes: int, gpu: GpuModel) -> float:
    """Of a round: its pictures are shared out to the processes, one at a time."""
    pictures = work.pictures
    turns = math.ceil(pictures / processes) if pictures else 0
    return turns * work.sample_flops / max(1, pictures) / (gpu.tflops * 1e12 * EFFICIENCY)


def in_gib(size: float) -> str:
    """Binary, as memory is counted."""
    return f"{size / GIB:.1f} GiB"


def in_time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def decimal(size: float) -> str:
    """Decimal, as disks and clouds count."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1e3:.0f} kB"
