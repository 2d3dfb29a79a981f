"""What cannot be seen in one value alone: keys that contradict each other or have no effect, and settings known to
ruin a run.

``contradictions`` looks at what is written, since a default never contradicts; ``doubts`` looks at the finished job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jobs.learning_rates import family_of, rates_of
from jobs.schema import Job, is_single_file
from jobs.values import BLOCKWISE_ARGS, BLOCKWISE_OPTIMIZERS, SCHEDULE_ARGS, shown

Path = tuple[str | int, ...]


class Finding(NamedTuple):
    path: Path
    message: str
    remedy: str


def contradictions(written: Mapping[str, Any]) -> list[Finding]:
    """Errors between keys. Values may still be of a wrong kind here: those are reported elsewhere and ignored."""
    checks = (
        _length,
        _method,
        _noise,
        _base,
        _optimizer,
        _schedule,
        _sample,
        _ema,
        _save,
        _output,
        _validation,
        _gpus,
        _buckets,
        _datasets,
    )
    return [finding for check in checks for finding in check(written)]


def _group(written: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = written.get(key)
    return value if isinstance(value, Mapping) else {}


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _length(written: Mapping[str, Any]) -> Iterator[Finding]:
    if written.get("steps") is not None and written.get("epochs") is not None:
        yield Finding(("epochs",), "steps and epochs both tell how long the run is", "Delete one of the two")


def _method(written: Mapping[str, Any]) -> Iterator[Finding]:
    if written.get("method") == "full" and written.get("lora") is not None:
        yield Finding(("lora",), "has no effect with method full", "Delete it, or write method: lora")
    if written.get("method") == "full" and written.get("assistant_lora") is not None:
        yield Finding(("assistant_lora",), "has no effect with method full", "Delete it, or write method: lora")
    optimizer = written.get("optimizer")
    entries = _group(written, "lora").get("layers")
    for index, entry in enumerate(entries if isinstance(entries, (list, tuple)) else ()):
        path = ("lora", "layers", index)
        if isinstance(entry, Mapping) and not set(entry) - {"match"}:
            yield Finding(path, "changes nothing", "Add rank, alpha or learning_rate, or delete the entry")
        elif isinstance(entry, Mapping) and "learning_rate" in entry and _finds_its_rate(optimizer):
            message = f"has no effect: {optimizer} finds one rate for all layers"
            yield Finding((*path, "learning_rate"), message, "Delete it, or take another optimizer")


def _finds_its_rate(optimizer: Any) -> bool:
    return isinstance(optimizer, str) and optimizer.rpartition(".")[2].lower().startswith(("prodigy", "dadapt"))


def _noise(written: Mapping[str, Any]) -> Iterator[Finding]:
    sampling = written.get("timestep_sampling", "flux_shift")
    if "discrete_flow_shift" in written and sampling in ("flux_shift", "sigmoid", "uniform"):
        yield Finding(
            ("discrete_flow_shift",),
            f"has no effect with timestep_sampling {sampling}",
            "Delete it, or write timestep_sampling: shift",
        )
    if "sigmoid_scale" in written and sampling == "uniform":
        remedy = "Delete it, or write another timestep_sampling"
        yield Finding(("sigmoid_scale",), "has no effect with timestep_sampling uniform", remedy)


def _base(written: Mapping[str, Any]) -> Iterator[Finding]:
    base = written.get("base")
    if not isinstance(base, str) or not base.strip():
        return
    parts = ("vae", "text_encoders")
    given = [part for part in parts if written.get(part) is not None]
    if is_single_file(base):
        missing = [part for part in parts if part not in given]
        if missing:
            yield Finding(
                ("base",),
                f"is a single file, which holds no {' and no '.join(missing)}",
                f"Add {' and '.join(missing)}",
            )
        return
    for part in given:
        remedy = "Delete it: this base brings its own. It belongs to a base that is a single .safetensors file"
        yield Finding((part,), "has no effect with this base", remedy)


def _optimizer(written: Mapping[str, Any]) -> Iterator[Finding]:
    if _group(written, "plan").get("optimizer_in_backward") is True and written.get("max_grad_norm") is not None:
        yield Finding(
            ("max_grad_norm",),
            "cannot be used with plan.optimizer_in_backward: weights change before the whole gradient is known",
            "Delete one of the two",
        )
    for name in _group(written, "optimizer_args"):
        if name in ("lr", "learning_rate", "weight_decay"):
            ours = "weight_decay" if name == "weight_decay" else "learning_rate"
            yield Finding(("optimizer_args", name), f"is set by {ours}", f"Delete it here, and write {ours}: outside")
        elif written.get("optimizer") in BLOCKWISE_OPTIMIZERS and name not in BLOCKWISE_ARGS:
            message = f"is not known to {written['optimizer']}"
            yield Finding(("optimizer_args", name), message, f"Delete it; known are {' and '.join(BLOCKWISE_ARGS)}")


def _schedule(written: Mapping[str, Any]) -> Iterator[Finding]:
    schedule = written.get("schedule", "constant")
    known = SCHEDULE_ARGS.get(schedule) if isinstance(schedule, str) else None
    for name, value in _group(written, "schedule_args").items() if known is not None else ():
        if name not in (known or ()):
            remedy = f"Delete it; known are {' and '.join(known)}" if known else "Delete it"
            yield Finding(("schedule_args", name), f"has no effect with schedule {schedule}", remedy)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            yield Finding(("schedule_args", name), f"{shown(value)} is not a number", "Write a number, such as 2")


def _sample(written: Mapping[str, Any]) -> Iterator[Finding]:
    sample = _group(written, "sample")
    if sample.get("prompts") and sample.get("prompts_file") is not None:
        message = "prompts and prompts_file both tell what to draw"
        yield Finding(("sample", "prompts_file"), message, "Delete one of the two")
    elif set(sample) - {"prompts"} and not sample.get("prompts") and sample.get("prompts_file") is None:
        remedy = 'Add prompts: ["..."], or delete sample'
        yield Finding(("sample",), "has no effect: without prompts nothing is drawn", remedy)


def _ema(written: Mapping[str, Any]) -> Iterator[Finding]:
    if written.get("method") == "lora" and _group(written, "ema").get("dtype") == "bf16":
        message = "an adapter is trained in fp32, and so is its average"
        yield Finding(("ema", "dtype"), message, "Delete the line: it takes little memory")
    if _group(written, "ema") and _group(written, "ema").get("samples") is False and not _drawn(written):
        yield Finding(("ema", "samples"), "has no effect: without prompts nothing is drawn", "Delete the line")


def _drawn(written: Mapping[str, Any]) -> bool:
    sample = _group(written, "sample")
    return bool(sample.get("prompts")) or sample.get("prompts_file") is not None


def _save(written: Mapping[str, Any]) -> Iterator[Finding]:
    save = _group(written, "save")
    states, weights = _int(save.get("states")), _int(save.get("weights"))
    if states is not None and weights is not None and states > weights >= 1:
        message = f"{weights} is less than states, {states}, and every state needs its weights"
        yield Finding(("save", "weights"), message, f"Write weights: {states} or more")
    kept, every = _int(save.get("keep_every")), save.get("every")
    steps = _int(every)
    if kept is None:
        return
    if save.get("weights", "all" if written.get("method") == "lora" else 0) == "all":
        yield Finding(("save", "keep_every"), "has no effect: the weights of all states stay", "Add weights: 2")
    elif isinstance(every, str) and not every.strip().isdigit():
        remedy = "Write every: as a number of steps, or delete keep_every"
        yield Finding(("save", "keep_every"), f"counts steps, and states are saved every {shown(every)}", remedy)
    elif steps and kept % steps:
        message = f"{kept} is no multiple of every, {steps}, so that no state is saved there"
        yield Finding(("save", "keep_every"), message, f"Write {max(1, round(kept / steps)) * steps}, for example")


def _validation(written: Mapping[str, Any]) -> Iterator[Finding]:
    validation = _group(written, "validation")
    path = validation.get("path")
    if path is not None and validation.get("fraction") is not None:
        message = "has no effect with path: the pictures in that folder are tried"
        yield Finding(("validation", "fraction"), message, "Delete one of the two")
    if isinstance(path, str) and "://" in path:
        message = "is not on the volume, and pictures of validation are not fetched"
        yield Finding(("validation", "path"), message, "Put a folder or zip on the volume, or write fraction: 0.1")


def _output(written: Mapping[str, Any]) -> Iterator[Finding]:
    output = _group(written, "output")
    for name in () if output.get("hub") is not None else sorted(set(output) & {"private", "states"}):
        yield Finding(("output", name), "has no effect: nothing is uploaded", "Add hub: owner/name, or delete it")


def _gpus(written: Mapping[str, Any]) -> Iterator[Finding]:
    gpus, processes = _int(written.get("gpus")), _int(_group(written, "plan").get("processes"))
    if gpus is not None and processes is not None and processes > gpus >= 1:
        message = f"{processes} processes need {processes} GPUs, and gpus is {gpus}"
        yield Finding(("plan", "processes"), message, "Delete one of the two")


def _buckets(written: Mapping[str, Any]) -> Iterator[Finding]:
    step = _int(written.get("bucket_step", 64))
    written_sizes = written.get("resolution")
    sizes = [_int(size) for size in (written_sizes if isinstance(written_sizes, list) else [written_sizes])]
    smallest = min((size for size in sizes if size is not None), default=None)
    if step is not None and smallest is not None and 64 <= smallest < step:
        yield Finding(("bucket_step",), f"{step} is more than the resolution {smallest}", f"Write {smallest} or less")


def _datasets(written: Mapping[str, Any]) -> Iterator[Finding]:
    entries = written.get("datasets")
    for index, entry in enumerate(entries if isinstance(entries, (list, tuple)) else ()):
        if not isinstance(entry, Mapping):
            continue
        if entry.get("keep_tags") and not entry.get("shuffle_tags"):
            remedy = "Delete it, or write shuffle_tags: true"
            yield Finding(("datasets", index, "keep_tags"), "has no effect without shuffle_tags", remedy)
        for key in ("mask_floor", "mask_normalize"):
            if entry.get(key) and entry.get("mask") is None:
                remedy = "Delete it, or write mask: alpha, or a folder of masks"
                yield Finding(("datasets", index, key), "has no effect without mask", remedy)
        if "crop" in entry and entry.get("random_crops"):
            yield Finding(("datasets", index, "crop"), "has no effect with random_crops", "Delete one of the two")


# ---------------------------------------------------------------- settings known to ruin a run

SCHNELL_ASSISTANT = "ostris/FLUX.1-schnell-training-adapter"


def doubts(job: Job) -> list[Finding]:
    """Warnings, each with its cure."""
    checks = (_rate, _guidance, _schnell, _strength, _shares, _levels, _pace, _weights)
    return [finding for check in checks for finding in check(job)]


def _rate(job: Job) -> Iterator[Finding]:
    rates, family = rates_of(job.optimizer, job.method), family_of(job.optimizer)
    if rates is None or job.base.startswith("flux-tiny"):  # a toy has its own scale
        return
    written: dict[Path, float] = {("learning_rate",): job.learning_rate}
    for index, entry in enumerate(job.lora.layers if job.lora else ()):
        if entry.learning_rate is not None:
            written["lora", "layers", index, "learning_rate"] = entry.learning_rate
    what = {"Adam": f"method {job.method}", "Prodigy": "Prodigy"}.get(f"{family}", f"method {job.method} with {family}")
    for path, rate in written.items():
        if not rates.least <= rate <= rates.most:
            effect = "too small to learn in time" if rate < rates.least else "so large that the model falls apart"
            usual = f"{rates.usual:g}".replace("e-0", "e-")
            yield Finding(path, f"{rate:g} is for {what} {effect}", f"Write {usual} and go from there")


def _names_schnell(text: str | None) -> bool:
    return text is not None and "schnell" in text.lower() and not text.startswith("flux-tiny")


def _guidance(job: Job) -> Iterator[Finding]:
    schnell = "schnell" in job.base.lower()
    if job.guidance != 1 and schnell:
        yield Finding(("guidance",), "has no effect: FLUX.1-schnell is told none", "Delete the line")
    elif job.guidance != 1:
        remedy = "Write 1, or delete the line; the guidance of drawing is sample.guidance"
        yield Finding(("guidance",), f"{job.guidance:g} in training washes the model out", remedy)
    low = min((drawing.guidance for drawing in job.sample.drawings), default=3.5)
    if low <= 1 and not schnell:
        message = f"{low:g} draws washed-out pictures with FLUX.1-dev"
        yield Finding(("sample", "guidance"), message, "Write 3.5, as people will use it")
    if job.t5_mask:
        message = "training with the mask changes what known words mean, and drawing without it shows bands"
        yield Finding(("t5_mask",), message, "Write false, or delete the line, unless your other tools mask too")


def _schnell(job: Job) -> Iterator[Finding]:
    """FLUX.1-schnell draws in four steps what others draw in twenty: it was distilled, which training undoes."""
    if not _names_schnell(job.base):
        if _names_schnell(job.assistant_lora) and "flux.1-dev" in job.base.lower():
            message = "undoes the distillation of FLUX.1-schnell, which this base has not"
            yield Finding(("assistant_lora",), message, "Delete the line")
        return
    if job.assistant_lora is None:
        message = "schnell is distilled: trained as it is, it unlearns within some hundred steps to draw in four"
        way = "Train on FLUX.1-dev" if job.method == "full" else f"Add assistant_lora: {SCHNELL_ASSISTANT}"
        yield Finding(("base",), message, way)
    most = max((drawing.steps for drawing in job.sample.drawings), default=0)
    if most > 8:
        message = f"{most} steps show what schnell can do, not what people will see: they draw in 4"
        yield Finding(("sample", "steps"), message, "Write 4")


def _strength(job: Job) -> Iterator[Finding]:
    lora = job.lora
    if lora is None:
        return
    strength = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
    if told := strength_doubt(strength, lora.rank, lora.rslora):
        yield Finding(("lora", "alpha"), *told)
    if lora.dropout > 0.3:
        message = f"{lora.dropout:g} leaves out so much that little is learned in the steps people pay for"
        yield Finding(("lora", "dropout"), message, "Write 0.05 or 0.1, or delete the line")


def strength_doubt(strength: float, rank: int, rslora: bool) -> tuple[str, str] | None:
    """What is wrong with a factor by which an adapter is multiplied, and the cure; None for a usual one."""
    usual = f"Write {math.sqrt(rank):.0f}" if rslora else f"Write {rank}, the rank"
    if strength == 0:
        return "0 multiplies the adapter by 0: nothing is learned", usual
    if not 1 / 32 <= strength <= 8:
        told = f"alpha / {'sqrt(rank)' if rslora else 'rank'} is {strength:g}, by which the adapter is multiplied"
        return told, usual if rslora else f"{usual}, or delete the line"
    return None


def _shares(job: Job) -> Iterator[Finding]:
    if job.weight_decay > 0.2:
        yield Finding(("weight_decay",), f"{job.weight_decay:g} forgets what the model knows", "Write 0.01")
    if job.caption_dropout > 0.5:
        message = f"{job.caption_dropout:g} of the images are trained without their caption"
        yield Finding(("caption_dropout",), message, "Write 0.05 or 0.1")


def _levels(job: Job) -> Iterator[Finding]:
    if job.timestep_sampling == "shift" and not 1 <= job.discrete_flow_shift <= 6:
        what = "almost pure noise, and texture" if job.discrete_flow_shift > 6 else "almost no noise, and composition"
        remedy = "Write 3, or timestep_sampling: flux_shift without this line"
        yield Finding(("discrete_flow_shift",), f"{job.discrete_flow_shift:g} trains on {what} is not learned", remedy)
    if job.timestep_sampling != "uniform" and not 0.3 <= job.sigmoid_scale <= 3:
        message = f"{job.sigmoid_scale:g} leaves out most levels of noise"
        yield Finding(("sigmoid_scale",), message, "Write 1, or delete the line")


def _pace(job: Job) -> Iterator[Finding]:
    if job.images_per_step > 64:
        message = f"{job.images_per_step} images make each step long and the run's updates few"
        yield Finding(("images_per_step",), message, "Write 4 to 16; it counts the images of all GPUs together")
    if job.steps is not None and job.warmup >= job.steps:
        message = f"the learning rate rises for {job.warmup} steps, and the run has {job.steps}: it never arrives"
        yield Finding(("warmup",), message, f"Write warmup: {job.steps // 10}")


def _weights(job: Job) -> Iterator[Finding]:
    for index, entry in enumerate(job.datasets):
        if entry.weight == 0:
            yield Finding(("datasets", index, "weight"), "0 trains on these pictures in vain", "Delete the dataset")
