"""Whether this card computes FLUX's gradients right, and with which attention: seen before a step is paid for.

One double and one single block of the job's own model, in bf16, compiled and checkpointed as planned, run forward and
backward on images of the job's sizes; output and gradients are compared with the same weights in float32 and attention
by its definition. An attention that fails is dropped for the next, and it is told: in the log, in ``attention.json``,
and through that in the run's status.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from bootstrap.dataset import Item
from bootstrap.flux_shape import FluxShape
from bootstrap.outcome import PodError
from bootstrap.plan import Plan
from bootstrap.processes import boot_id
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume, read_json, write_json
from jobs.schema import Job
from trainer.attention import Attention, candidates
from trainer.data import Batch
from trainer.flow import image_ids, loss_sum
from trainer.model import predict, prepare
from trainer.world import World

log = logging.getLogger(__name__)

# ||x - reference|| / ||reference||, of the output and of every matrix's gradient. bf16 arithmetic alone gives 5e-3 and
# 1e-2 (CPU, flux-tiny); a wrong kernel gives NaN, or errors near 1 in the matrices before it. The gradient taken whole
# would hide them: with half of what comes back through attention it is off by no more than 7e-3.
OUTPUT_TOLERANCE = 3e-2
GRADIENT_TOLERANCE = 6e-2
MOST_SIZES = 4  # checked: the most frequent, the shortest, the longest and one more


class CardError(RuntimeError):
    """A kernel broke the process's hold on the card: nothing more can be computed in it. The next start avoids it."""


@dataclass(frozen=True)
class Size:
    """Images of a batch of the self-check, in pixels."""

    width: int
    height: int
    images: int
    text_tokens: int

    @property
    def tokens(self) -> int:
        return self.width * self.height // 256 + self.text_tokens


@dataclass(frozen=True)
class Verdict:
    """What became of one attention on one card."""

    attention: str
    right: bool
    error: float  # of the matrix whose gradient is furthest off, at any size
    why: str  # where it is not right, or was not checked
    seconds: float


# ---------------------------------------------------------------- the choice


def choose_attention(run: RunFile, world: World, items: Sequence[Item]) -> Attention:
    """The first attention that is right on every process's card; all processes get the same. Tells what is wrong.

    Raises PodError where none is: such a card computes nothing right.
    """
    sizes = sizes_to_check(items, run.plan.images_per_pass, run.weights.text_tokens)
    masked = run.job.t5_mask
    usable = candidates(world.device, masked)
    key = _key(run, world, sizes)
    known = world.from_lead(_remembered(run, key) if world.leads else None)
    dropped = {name for name, verdict in known.items() if not verdict["right"]}
    record: dict[str, Any] = dict(known)
    for attention in usable:
        if attention.name in dropped:
            log.warning("attention: %s is not used: %s", attention.name, known[attention.name]["why"])
            continue
        if attention.name in known:
            log.info("attention: %s, found right on this pod before", attention.name)
            if world.leads:
                _remember(run, key, record)
            return attention
        verdict = _of_all(attention, run, world, sizes, record, key)
        record[attention.name] = asdict(verdict)
        if world.leads:
            _remember(run, key, record)
        if verdict.right:
            log.info("attention: %s, %s (%.1f s)", attention.name, _told(verdict, sizes), verdict.seconds)
            return attention
        log.warning("attention: %s gives WRONG results on this pod and is not used: %s", attention.name, verdict.why)
    wrong = "; ".join(f"{name}: {verdict['why']}" for name, verdict in record.items())
    raise PodError(f"No attention gives right gradients on this pod: {wrong}. Deploy it anew, on another host.")


def _of_all(
    attention: Attention, run: RunFile, world: World, sizes: Sequence[Size], record: dict[str, Any], key: str
) -> Verdict:
    """The worst verdict of all cards."""
    try:
        verdict = check(attention, run.job, run.plan, run.weights.shape, sizes, world)
    except CardError as error:
        # The others wait for this process, which can only end; the launcher ends them with it.
        _remember(run, key, record | {attention.name: asdict(Verdict(attention.name, False, math.inf, str(error), 0))})
        raise
    verdicts = world.gather(verdict)
    return min(verdicts, key=lambda each: (each.right, -each.error))


def sizes_to_check(items: Sequence[Item], images_per_pass: int, text_tokens: int) -> tuple[Size, ...]:
    """The most frequent size first: the first step compiles for it. Different shapes of equally many tokens are one."""
    by_tokens: dict[int, tuple[int, int]] = {}
    often: Counter[int] = Counter()
    for item in items:
        width, height = item.bucket
        by_tokens.setdefault(width * height, (width, height))
        often[width * height] += item.repeats
    lengths = sorted(by_tokens)
    most = max(lengths, key=lambda pixels: (often[pixels], pixels))
    # A kernel's last block is where it goes wrong: of the rest, the length that is furthest from whole blocks of 128.
    ragged = max(lengths, key=lambda pixels: ((pixels // 256 + text_tokens) % 128, pixels))
    chosen = dict.fromkeys((most, lengths[0], lengths[-1], ragged))
    return tuple(Size(*by_tokens[pixels], min(2, images_per_pass), text_tokens) for pixels in chosen)[:MOST_SIZES]


# ---------------------------------------------------------------- the check


def check(attention: Attention, job: Job, plan: Plan, shape: FluxShape, sizes: Sequence[Size], world: World) -> Verdict:
    """Compares one attention with the reference at every size, on this process's card."""
    begun = time.monotonic()
    worst, why = 0.0, ""
    try:
        reference = _reference(replace(shape, double_blocks=1, single_blocks=1), world.device)
        model = copy.deepcopy(reference).bfloat16()
        attention.switch_on(model)
        prepare(model, replace(plan, sharding="none"), world)
        for size in sizes:
            error, found = _compare(reference, model, job, _batch(shape, size, world.device), size)
            worst, why = max(worst, error), why or found
            if found and not found.startswith(_UNCHECKED):
                break
    except torch.OutOfMemoryError:
        why = f"{_UNCHECKED}: the comparison with float32 does not fit the free memory"
    except Exception as error:  # a kernel that refuses, breaks the card, or is another one in this version of torch
        worst, why = math.inf, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        _end_if_broken(attention, world.device, why)
    finally:
        reference = model = None
        _clean_up(plan, world.device)
    right = not why or why.startswith(_UNCHECKED)
    return Verdict(attention.name, right, worst, why, time.monotonic() - begun)


_UNCHECKED = "not checked"


def _compare(
    reference: FluxTransformer2DModel, model: FluxTransformer2DModel, job: Job, batch: Batch, size: Size
) -> tuple[float, str]:
    """How far the worst matrix's gradient is off at one size, and what is wrong in words, "" where nothing is."""
    at = f"at {size.tokens} tokens ({size.width} x {size.height} px)"
    try:
        with AttentionByDefinition():
            right, right_gradients = _run(reference, _in_float32(batch), job)
        output, gradients = _run(model, batch, job)
    except torch.OutOfMemoryError:
        return 0.0, f"{_UNCHECKED} {at}: the comparison with float32 does not fit the free memory"
    errors = {name: distance(gradients[name], expected) for name, expected in right_gradients.items()}
    name = max(errors, key=lambda name: errors[name])
    error = errors[name]
    if not (forward := distance(output, right)) < OUTPUT_TOLERANCE:
        return error, f"the output {at} is off by {forward:.1e} of its length; {OUTPUT_TOLERANCE:.0e} is allowed"
    if not error < GRADIENT_TOLERANCE:
        return error, f"the gradient of {name} {at} is off by {error:.1e}; {GRADIENT_TOLERANCE:.0e} is allowed"
    return error, ""


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """||value - expected|| / ||expected||; infinite where ``value`` holds what is no number."""
    expected = expected.float()
    found = float((value.float() - expected).norm() / expected.norm())
    return found if math.isfinite(found) else math.inf


def _reference(shape: FluxShape, device: torch.device) -> FluxTransformer2DModel:
    """In float32, with random weights that bf16 holds exactly, the same each time."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = FluxTransformer2DModel(**shape.config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.train()


def _batch(shape: FluxShape, size: Size, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images, tokens = size.images, size.width * size.height // 256

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).bfloat16()

    mask = torch.ones(images, size.text_tokens, dtype=torch.bool)
    mask[:, size.text_tokens // 2 :] = False
    return Batch(
        noisy=random(images, tokens, shape.channels),
        target=random(images, tokens, shape.channels).float(),
        sigma=torch.full((images,), 0.5),
        text=random(images, size.text_tokens, shape.text_size),
        pooled=random(images, shape.pooled_size),
        text_mask=mask,
        mask=torch.ones(images, tokens, 4),
        image_ids=image_ids(size.height // 8, size.width // 8),
        weights=torch.ones(images),
    ).to(device)


def _in_float32(batch: Batch) -> Batch:
    return replace(batch, noisy=batch.noisy.float(), text=batch.text.float(), pooled=batch.pooled.float())


def _run(model: FluxTransformer2DModel, batch: Batch, job: Job) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The model's output, and the gradients of its matrices by name."""
    model.zero_grad(set_to_none=True)
    output = predict(model, batch, job.guidance, job.t5_mask)
    loss_sum(output, batch.target, batch.mask, batch.weights).backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.dim() > 1}


def _end_if_broken(attention: Attention, device: torch.device, why: str) -> None:
    if device.type != "cuda":
        return
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        told = f"attention {attention.name} breaks the card ({why}); the next start does without it"
        raise CardError(told) from error


def _clean_up(plan: Plan, device: torch.device) -> None:
    """Nothing of the check stays: neither its memory nor its compiled blocks, whose sizes are not the training's."""
    if plan.compile:
        torch.compiler.reset()
    if device.type == "cuda":
        gc.collect()
        with suppress(RuntimeError):  # of a card that a kernel broke: what broke it is being told
            torch.cuda.empty_cache()


class AttentionByDefinition(TorchFunctionMode):
    """Within it, attention is softmax(Q K / sqrt(d)) V in float32, head by head, and computed again for the backward
    pass: at 4608 tokens the scores of 24 heads would take 2 GB a copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return attention_by_definition(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """[batch, heads, tokens, size] three times; the mask is true where a key may be seen."""
    assert not dropout_p
    assert not is_causal
    factor = scale if scale is not None else query.shape[-1] ** -0.5

    def one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q.float() @ k.float().transpose(-1, -2) * factor
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask[:, 0], -math.inf)
        return scores.softmax(dim=-1) @ v.float()

    heads = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
    return torch.stack([checkpoint(one_head, *head, use_reentrant=False) for head in heads], dim=1)


# ---------------------------------------------------------------- what is known of this pod


def _key(run: RunFile, world: World, sizes: Sequence[Size]) -> str:
    """Of everything that the verdicts hang on: the card and its boot, the libraries, how the model is run."""
    cards = world.gather(_card(world.device))
    how = (run.plan.compile, run.plan.checkpointing, run.job.t5_mask, run.weights.shape)
    return repr((boot_id(), cards, torch.__version__, diffusers.__version__, how, sizes))


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} {getattr(found, 'uuid', '')}"


def _remembered(run: RunFile, key: str) -> dict[str, Any]:
    """What any run of the volume found out under the same circumstances."""
    records = (read_json(path) for path in Volume(run.volume).runs.glob(f"*/{run.folder.attention.name}"))
    same = (record["verdicts"] for record in records if isinstance(record, dict) and record.get("key") == key)
    return next(same, {})


def _remember(run: RunFile, key: str, verdicts: dict[str, Any]) -> None:
    write_json(run.folder.attention, {"key": key, "verdicts": verdicts})


def _told(verdict: Verdict, sizes: Sequence[Size]) -> str:
    lengths = ", ".join(str(size.tokens) for size in sizes)
    if verdict.why:
        return verdict.why
    return f"gradients off float32's by {verdict.error:.1e} (allowed {GRADIENT_TOLERANCE:.0e}) at {lengths} tokens"
