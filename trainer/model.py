"""The FLUX transformer as it is trained: made without memory, cut for the GPUs, filled from the files row by row."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from bootstrap.flux_shape import FluxShape, spread
from bootstrap.layout import clip_rows, placements
from bootstrap.plan import Plan
from bootstrap.precision import Precision, quantised_tensors
from bootstrap.tensor_files import Rows, load_rows, read_header
from jobs.schema import Job
from trainer.adapter import add_adapter
from trainer.assistant import add_assistant
from trainer.data import Batch
from trainer.dora import share_lengths
from trainer.dropout import tell_images
from trainer.fp8_products import multiply_in_fp8
from trainer.peer_copies import use_copy_engines
from trainer.quantised import QuantisedLinear
from trainer.streamed import StreamedBlock, StreamedWeights
from trainer.trained import held_rows, local, plain_name
from trainer.world import World

Layout = Literal["bfl", "diffusers"]


def build_model(
    job: Job,
    plan: Plan,
    shape: FluxShape,
    world: World,
    fill_weights: Callable[[FluxTransformer2DModel], None],
    assistant: Path | None = None,
) -> FluxTransformer2DModel:
    """The transformer on this process's device, in bf16, with what the plan asks for; ``assistant`` is a LoRA file.

    Cut before it is filled, so that no process ever holds more than its rows; an adapter comes after its frozen base.
    """
    model = bare_model(shape, plan.base_precision)
    if plan.products != "bf16":
        multiply_in_fp8(model, plan.products)
    if job.lora is None:
        if plan.streamed_blocks:
            StreamedWeights(model, spread(plan.streamed_blocks, shape.blocks), world.device)
        prepare(model, plan, world)
    give_memory(model, world.device)
    fill_weights(model)
    if job.lora is not None:
        add_adapter(model, job.lora, job.seed, plan.images_per_pass)
        if world.size > 1:
            share_lengths(model)
        if assistant is not None:
            add_assistant(model, assistant, shape)
        prepare(model, plan, world)
    return model


def give_memory(model: FluxTransformer2DModel, device: torch.device) -> None:
    """On the device, but for blocks that have theirs on the host."""
    streamed = {id(part) for block in model.modules() if isinstance(block, StreamedBlock) for part in block.modules()}
    for module in model.modules():
        if id(module) not in streamed:
            module.to_empty(device=device, recurse=False)


def bare_model(shape: FluxShape, precision: Precision = "bf16") -> FluxTransformer2DModel:
    """The model without memory (on the meta device), in bf16 but for what ``precision`` quantises."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(**shape.config()).to(torch.bfloat16)
    for name in quantised_tensors(shape) if precision != "bf16" else ():
        layer = name.removesuffix(".weight")
        model.set_submodule(layer, QuantisedLinear(model.get_submodule(layer), precision))
    return model


def prepare(model: FluxTransformer2DModel, plan: Plan, world: World) -> None:
    """Checkpointing, compiling, sharding, in the order in which they work together."""
    if plan.checkpointing:
        checkpoint_blocks(model, plan.checkpointed_blocks)
    if plan.compile:
        avoid_compiler_faults()
        model.compile_repeated_blocks(fullgraph=True)
    if plan.sharding == "fsdp":
        shard(model, plan, world)


def avoid_compiler_faults() -> None:
    """Switches off what fails once a second size of image, or number of them, makes sizes symbols.

    Both were met on a GPU with torch 2.11. The analysis of tilings compares sizes that it has hints for with some that
    it has not, and asserts. The fused reductions along both axes cut their workspace by a sum without parentheses (they
    have them in 2.13).
    """
    settings = torch._inductor.config.triton
    settings.coalesce_tiling_analysis = False
    if torch.__version__ < "2.13":  # compares versions, not letters
        settings.mix_order_reduction = False
    # A block compiles anew for training and drawing, for one image and several, for an assistant on and off, for each
    # rank of an adapter; past the limit, 8 by default, a run would end.
    torch._dynamo.config.recompile_limit = 64


def checkpoint_blocks(model: FluxTransformer2DModel, count: int) -> None:
    """Of the first ``count`` blocks only the inputs are kept, and the rest is computed again in the backward pass.

    The first, since the others' memory is free again when backward comes to them.
    """
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks][:count]
    chosen = {id(block) for block in blocks}

    def run(block: nn.Module, *inputs: Any) -> Any:
        if id(block) not in chosen:
            return block(*inputs)
        return checkpoint(_run_twice(block), *inputs, use_reentrant=False)

    model.enable_gradient_checkpointing(run)


def _run_twice(block: nn.Module) -> Callable[..., Any]:
    """The block, which is told when it runs for the second time."""
    if not isinstance(block, StreamedBlock):
        return block
    runs = itertools.count()
    return lambda *inputs: block(*inputs, again=next(runs) > 0)


def shard(model: FluxTransformer2DModel, plan: Plan, world: World) -> None:
    """FSDP2, block by block. Gradients are summed, not divided: each loss is a share of the step's.

    Between GPUs they travel in bf16, as backward makes them; between processes on a CPU in float32.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if world.device.type == "cuda" else torch.float32)
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum; gloo knows no scaled one
    if world.device.type == "cuda" and plan.p2p and not plan.reshard_after_forward:  # else memory is short
        use_copy_engines(modules, max(_padded_bytes(group, world.size) for group in _groups(model)), world)


def _groups(model: FluxTransformer2DModel) -> list[list[nn.Parameter]]:
    """The parameters that FSDP2 sends together: a block's, and all that are in none."""
    blocks = [[*block.parameters()] for block in [*model.transformer_blocks, *model.single_transformer_blocks]]
    inside = {id(parameter) for block in blocks for parameter in block}
    return [*blocks, [parameter for parameter in model.parameters() if id(parameter) not in inside]]


def _padded_bytes(parameters: list[nn.Parameter], parts: int) -> int:
    """Of all of them together, each with as many rows as divide into equal parts."""
    rows = (math.ceil(p.shape[0] / parts) * parts * (p.numel() // p.shape[0]) * p.itemsize for p in parameters)
    return sum(rows)


def keep_gathered(model: FluxTransformer2DModel, keep: bool) -> None:
    """Whether the weights of a sharded model stay whole after a backward pass: for the step's next pass, which would
    gather them again. Not after the last one, which changes them."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(not keep)


@dataclass(frozen=True)
class Source:
    """Rows ``first`` to ``first + count`` of a parameter lie in a file's tensor from row ``file_first``."""

    parameter: str
    first: int
    count: int
    path: Path
    file_name: str
    file_first: int


def sources(shape: FluxShape, files: Sequence[Path], layout: Layout, prefix: str = "") -> list[Source]:
    """Where every row of every parameter lies; ``prefix`` stands before every name in the file."""
    if layout == "bfl":
        (path,) = files
        return [
            Source(name, part.first, part.count, path, prefix + part.file_name, part.file_first)
            for name, placement in placements(shape).items()
            for part in placement
        ]
    sizes = shape.tensors()
    return [
        Source(plain, 0, sizes[plain][0], path, prefix + plain, 0)
        for path in files
        for plain in (name.removeprefix(prefix) for name in read_header(path).tensors)
    ]


def fill(model: FluxTransformer2DModel, places: Sequence[Source], world: World | None = None) -> None:
    """Reads this process's rows of every parameter, file by file in the order of their bytes.

    Host memory holds some buffers beside the model, never a shard; of a base that is quantised, one tensor at a time is
    in bf16 on the GPU. Without a world the model must be whole.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    quantised = {
        f"{plain_name(name)}.weight": layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantisedLinear)
    }
    told = world.place.move if world else lambda: None  # a slow volume may take long, as long as something comes
    # Memory that nothing fills holds anything.
    assert {source.parameter for source in places} == parameters.keys() | quantised.keys()
    by_file: dict[Path, list[Source]] = defaultdict(list)
    for source in places:
        by_file[source.path].append(source)
    for path, wanted in by_file.items():
        held = (_held_rows(parameters[s.parameter], s, world) for s in wanted if s.parameter in parameters)
        load_rows(path, [rows for rows in held if rows], told)
        entries = read_header(path).tensors
        for source in sorted(wanted, key=lambda s: (entries[s.file_name].offset, s.file_first)):
            if layer := quantised.get(source.parameter):
                weight = torch.empty((source.count, layer.in_features), dtype=torch.bfloat16, device=layer.codes.device)
                load_rows(path, [Rows(weight, source.file_name, source.file_first)], told)
                layer.take(weight, source.first)


def _held_rows(parameter: nn.Parameter, source: Source, world: World | None) -> Rows | None:
    """Which of the source's rows this process keeps, and where; None where it keeps none of them."""
    target = local(parameter)
    first, count = 0, parameter.shape[0]
    if target.shape != parameter.shape:
        assert world
        first, count = held_rows(count, world.rank, world.size)
    start, stop = max(first, source.first), min(first + count, source.first + source.count)
    if start >= stop:
        return None
    return Rows(target[start - first : stop - first], source.file_name, start + source.file_first - source.first)


def rows_in_bfl(name: str, first: int, count: int, shape: FluxShape) -> list[tuple[str, int, slice]]:
    """Where rows of a parameter belong in the BFL file: (tensor, its row, which of these rows)."""
    parts = clip_rows(placements(shape)[name], first, first + count)
    return [
        (part.file_name, part.file_first, slice(part.first - first, part.first - first + part.count)) for part in parts
    ]


def predict(model: FluxTransformer2DModel, batch: Batch, guidance: float, use_text_mask: bool) -> torch.Tensor:
    """The model's velocity for a batch: [batch, image tokens, 64]."""
    tell_images(model, batch.dropout_keys)
    told = torch.full_like(batch.sigma, guidance) if model.config.guidance_embeds else None
    attention = None
    if use_text_mask:
        image = torch.ones(batch.noisy.shape[:2], dtype=torch.bool, device=batch.noisy.device)
        attention = {"attention_mask": torch.cat([batch.text_mask, image], dim=1)[:, None, None, :]}
    with exact_times(model, batch.sigma, told):
        return model(
            hidden_states=batch.noisy,
            encoder_hidden_states=batch.text,
            pooled_projections=batch.pooled,
            timestep=batch.sigma,
            img_ids=batch.image_ids,
            txt_ids=batch.image_ids.new_zeros((batch.text.shape[1], 3)),
            guidance=told,
            joint_attention_kwargs=attention,
            return_dict=False,
        )[0]


@contextmanager
def exact_times(model: FluxTransformer2DModel, sigma: torch.Tensor, guidance: torch.Tensor | None) -> Iterator[None]:
    """Tells the model its times in float32. diffusers casts them to bf16 first, which makes a 750 a 752."""

    def replace_times(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        times = [1000 * value.float() for value in (sigma, guidance) if value is not None]
        return (*times, arguments[-1])

    handle = model.time_text_embed.register_forward_pre_hook(replace_times)
    try:
        yield
    finally:
        handle.remove()
