"""Why a plan is as it is, in words: each choice with its reason and the figure behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from bootstrap.estimate import TILE, Arrangement, Work, decimal, in_gib, linear_layers, streamed_bytes
from bootstrap.lora_targets import adapters_of
from bootstrap.pod import Gpu, Pod
from bootstrap.precision import ERRORS, FAITHFULNESS, MOST_FAITHFUL, base_bytes
from bootstrap.ways import needs_whole_model, peak_of, usable_memory
from jobs.schema import Ema, Job


@dataclass(frozen=True)
class Choice:
    name: str
    value: str
    reason: str


def explain(
    job: Job, pod: Pod, work: Work, gpus: tuple[Gpu, ...], way: Arrangement, split: tuple[int, ...]
) -> list[Choice]:
    wish = job.plan
    room = usable_memory(gpus) if gpus else pod.memory

    def instead(**changes: bool | int | str) -> str:
        """What the other choice would cost."""
        other = replace(way, **changes)  # type: ignore[arg-type]
        peak = peak_of(work, other)
        return f"needs {in_gib(peak)} of {in_gib(room)}" if peak > room else f"fits too ({in_gib(peak)})"

    def told(key: str, reason: str) -> str:
        return f"plan.{key} says so; {reason}" if getattr(wish, key) is not None else reason

    if way.passes > 1:
        passes = f"all at once {instead(images_per_pass=max(split), passes=1)}"
        if job.method == "full":
            passes += "; gradients are kept from pass to pass"
    else:
        passes = "all at once; nothing is accumulated"
    choices = [
        Choice(
            "images", _split_text(split), _split_reason(job.images_per_step, split, "GPUs" if gpus else "processes")
        ),
        Choice("passes", f"{way.passes} of up to {way.images_per_pass}", told("images_per_pass", passes)),
        _explain_sharding(job, way),
    ]
    blocks = work.shape.blocks
    if way.checkpointed:
        more = f"{way.checkpointed / blocks / 3:.0%} more arithmetic"
        reason = f"without it {instead(checkpointed=0)}; what they keep no more costs {more}"
    else:
        reason = "memory suffices without" if gpus else "not needed at this size"
    choices.append(
        Choice(
            "checkpointing",
            f"{way.checkpointed} of {blocks} blocks" if way.checkpointed else "off",
            told("checkpointing", reason),
        )
    )
    reason = "a fifth faster; the first step takes a minute or more" if gpus else "only pays on a GPU"
    choices.append(Choice("compile", _on(way.compiled), told("compile", reason)))
    if work.lora:
        choices += [_explain_base(work, way, told, instead), _explain_adapter(job, work)]
    if wish.products not in (None, "bf16"):
        reason = "plan.products says so; weights stay bf16. Speed and memory are estimated as with bf16"
        choices.append(Choice("products", f"{wish.products}", reason))
    choices += [_explain_update(job, way, told), _explain_states(job, work, way, told, instead)]
    if job.ema:
        choices.append(_explain_average(job.ema, work, way, instead))
    if way.streamed:
        size = decimal(streamed_bytes(work, way.streamed))
        reason = f"{size} of them, brought block by block; on the device {instead(streamed=0)}"
        choices.append(Choice("weights", f"{way.streamed} of {blocks} blocks on host", reason))
    if way.tiled:
        reason = f"decoded whole, a sample {instead(tiled=False)}; colours may differ a little from tile to tile"
        choices.append(Choice("samples", f"in tiles of {TILE} px", reason))
    return choices


def _explain_sharding(job: Job, way: Arrangement) -> Choice:
    if not way.sharded:
        alone = "one process" if way.processes == 1 else "every process holds the base whole; only the adapter moves"
        return Choice("sharding", "none", alone)
    reason = f"each process keeps 1/{way.processes} of weights, gradients and states"
    if way.reshard:
        return Choice("sharding", "fsdp, regathered", f"{reason}; weights are gathered again for the backward pass")
    return Choice("sharding", "fsdp, gathered once", f"{reason}; memory allows to keep weights until the backward pass")


def _explain_base(work: Work, way: Arrangement, told: Callable[[str, str], str], instead: Callable[..., str]) -> Choice:
    size = in_gib(base_bytes(work.shape, way.base))
    if way.base == "bf16":
        return Choice("base", way.base, told("base_precision", f"{size}, as it is"))
    least = {"images_per_pass": 1, "checkpointed": work.shape.blocks, "tiled": work.sample_pixels > TILE**2}
    better = [name for name in MOST_FAITHFUL if FAITHFULNESS[name] < FAITHFULNESS[way.base]]
    others = "; ".join(f"{name} {instead(base=name, **least)}" for name in better)
    return Choice("base", way.base, told("base_precision", f"{size}, off by {ERRORS[way.base]:.1%}; {others}"))


def _explain_adapter(job: Job, work: Work) -> Choice:
    assert job.lora is not None
    layers = Counter(layer.rank for layer in adapters_of(linear_layers(work.shape), job.lora).values())
    ranks = ", ".join(f"rank {rank} in {count} layers" for rank, count in sorted(layers.items()))
    kind = "DoRA" if work.dora else "LoRA"
    beside = f"; beside it assistant_lora, {decimal(work.assistant)}, frozen" if work.assistant else ""
    return Choice("adapter", f"{work.trained / 1e6:.1f} M parameters", f"{kind}, in fp32: {ranks}{beside}")


def _explain_update(job: Job, way: Arrangement, told: Callable[[str, str], str]) -> Choice:
    if way.in_backward:
        reason = "each weight's gradient is used and freed at once; nothing is clipped"
        if way.passes > 1:
            reason = "in the last pass; the gradients of the passes before are kept until then"
        return Choice("update", "in backward", told("optimizer_in_backward", reason))
    if job.method == "lora":
        reason = "an adapter's gradients are small"
    elif needs_whole_model(job.optimizer):
        reason = f"{job.optimizer} looks at all gradients first"
    elif job.max_grad_norm is not None:
        reason = f"max_grad_norm {job.max_grad_norm:g} needs all gradients, which are kept"
    else:
        reason = "all gradients are kept"
    return Choice("update", "after backward", told("optimizer_in_backward", reason))


def _explain_states(
    job: Job, work: Work, way: Arrangement, told: Callable[[str, str], str], instead: Callable[..., str]
) -> Choice:
    size = decimal(work.optimizer)
    if not way.states_on_host:
        return Choice("optimizer", f"{job.optimizer}, on device", told("optimizer_states", f"{size} of states"))
    blocks = work.shape.blocks
    if job.optimizer.startswith("Paged"):
        reason = f"{size} of states; paged optimizers keep them in the host's memory"
    else:
        reason = f"{size} of states; all on the device it {instead(states_on_host=0, streamed=0)}"
    places = "on host" if way.states_on_host == blocks else f"{way.states_on_host} of {blocks} blocks on host"
    return Choice("optimizer", f"{job.optimizer}, {places}", told("optimizer_states", reason))


def _explain_average(ema: Ema, work: Work, way: Arrangement, instead: Callable[..., str]) -> Choice:
    pace = "each step" if ema.every == 1 else f"every {ema.every} steps"
    reason = f"{decimal(work.ema)}; it follows the weights {pace}; states and output hold it"
    if not way.ema_on_host:
        return Choice("average", f"{ema.dtype}, on device", reason)
    return Choice("average", f"{ema.dtype}, on host", f"{reason}; on the device {instead(ema_on_host=False)}")


def _on(value: bool) -> str:
    return "on" if value else "off"


def _split_text(split: tuple[int, ...]) -> str:
    if len(split) == 1:
        return f"{split[0]} per step"
    if split[0] == split[-1]:
        return f"{len(split)} x {split[0]}"
    return "+".join(map(str, split)) if len(split) <= 8 else f"{split.count(split[0])} x {split[0]} + rest {split[-1]}"


def _split_reason(images: int, split: tuple[int, ...], places: str) -> str:
    """Says what idles, and which numbers of images would fill the processes."""
    count = len(split)
    if count == 1:
        return "all on one"
    if images % count == 0:
        return f"{images} images per step, evenly"
    less, more = images - images % count, images - images % count + count
    efficiency = images / (count * max(split))
    return f"{images} images on {count} {places}: {efficiency:.0%} efficient; {less} or {more} images would fill them"
