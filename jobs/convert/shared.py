"""Rules that hold for every tool: what a step is, how it is scheduled, what is drawn, when it is saved."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from jobs.convert.draft import MAPPED, NOT_SUPPORTED, OFF, Draft, Given
from jobs.convert.values import Chosen, Drawn, as_number, base_of, in_steps_of_16, lost_options, optimizer_of, path_here
from jobs.reference import spelled
from jobs.schema import is_single_file
from jobs.values import BLOCKWISE_ARGS, BLOCKWISE_OPTIMIZERS, MOST_SEED

TOKENS = "Secrets never stand in a job: set HF_TOKEN in the pod's environment"
PLANNED = "the plan decides it from the GPUs at hand"
CACHED = "pictures and captions are always encoded once and cached"
LAUNCHED = "fluxpod launches one process for each GPU by itself"
WANDB = "Set WANDB_API_KEY in the pod's environment: runs are shown on Weights & Biases then"
LOGGED = "log.txt, metrics.jsonl and tensorboard/ are always written"
IN_RUNS = "everything goes to runs/<name>/ on the volume"
NOT_COUNTED = "It is counted in steps here, and the pictures are not here to tell how many an epoch has."
_NO_NEGATIVE = "FLUX draws without a negative prompt"
# Where the modulation is trained too, but not the embedders: what both tools do with FLUX unless told otherwise.
ALL_BLOCKS = ("transformer_blocks.*", "single_transformer_blocks.*")
BLOCKS_REMARK = "what the source trains; the default here leaves the modulation out"


# What a base that is a single file lacks, with the names that these files usually have.
_PARTS = {
    "vae": "models/ae.safetensors",
    "text_encoders.clip": "models/clip_l.safetensors",
    "text_encoders.t5": "models/t5xxl_fp16.safetensors",
}


def base(draft: Draft, model: str, parts: Mapping[str, str], others: Sequence[str] = ()) -> None:
    """The base that the key ``model`` names, and its parts where it is a single file: ``parts`` are their keys by
    ours, ``others`` keys of parts that have none here."""
    name, remark = base_of(draft.text(model))
    draft.write("base", name, model, remark=remark)
    if is_single_file(name):
        for ours, usual in _PARTS.items():
            key = parts.get(ours, "")
            path = path_here(draft.text(key), "models") if draft.on(key) else (usual, "write its path")
            draft.write(ours, path[0], key, remark=path[1])
        draft.not_supported(others, "Write the parts of the base at vae and text_encoders")
    draft.not_needed([*parts.values(), *others], "the base brings its own")


def images_per_step(draft: Draft, batch: int, accumulated: int, gpus: int, names: Sequence[str]) -> None:
    """A step's images over all GPUs: batch x accumulation x GPUs."""
    batch, accumulated, gpus = max(1, batch), max(1, accumulated), max(1, draft.gpus or gpus)
    images = batch * accumulated * gpus
    parts = [str(batch), *([f"{accumulated} accumulated"] if accumulated > 1 else [])]
    remark = " x ".join([*parts, f"{gpus} GPUs"]) if gpus > 1 else f"{' x '.join(parts)} on one GPU"
    draft.write("images_per_step", images, *names, remark=remark)
    if draft.gpus is None and gpus == 1:
        draft.notes.append(
            f"images_per_step counts the images of all GPUs together. {images} is right if the source ran on one GPU; "
            "if it ran on N, convert again with --gpus N."
        )


def optimizer(draft: Draft, name: str, names: Sequence[str], args: Mapping[str, str]) -> None:
    """Optimizer, its options (name of the option -> name of its key) and the weight decay that goes with it."""
    method = draft.job["method"]
    chosen = optimizer_of(name)
    if chosen is None:
        chosen = Chosen("AdamW8bit" if method == "full" else "AdamW", remark=f"in place of {name}")
        draft.not_supported(
            names, f"That optimizer is not here: {chosen.name} takes its place. Or install it and write its import path"
        )
        draft.not_supported(args.values(), f"An option of {name}")
        args = {}
    draft.write("optimizer", chosen.name, *names, remark=chosen.remark)
    decay = as_number(draft.value(args["weight_decay"])) if "weight_decay" in args else chosen.weight_decay
    if decay is not None:
        said = "" if "weight_decay" in args else "the source's own default"
        draft.write("weight_decay", decay, args.get("weight_decay", ""), remark=said if decay != 0.01 else "")
    blockwise = chosen.name in BLOCKWISE_OPTIMIZERS
    for option, value in chosen.args.items():
        draft.write(f"optimizer_args.{option}", value)
    for option, key in args.items():
        if option == "weight_decay":
            continue
        if blockwise and option not in BLOCKWISE_ARGS:
            draft.not_supported([key], f"{chosen.name} takes {' and '.join(BLOCKWISE_ARGS)} only")
        else:
            draft.write(f"optimizer_args.{option}", draft.value(key), key)


def clip(draft: Draft, key: str, *, default: float = 1.0) -> None:
    """The limit on the gradient's length. Where the source only has it by default, a full model goes without: the
    limit costs the memory of all gradients."""
    norm, full = draft.number(key, default), draft.job["method"] == "full"
    if full and key not in draft.given:
        return
    said = "null saves the memory of all gradients" if full and norm > 0 else ""
    draft.write("max_grad_norm", norm if norm > 0 else None, key, remark=said)


_SCHEDULES: Mapping[str, Mapping[str, float]] = {  # with the options that each takes, as they are by default there
    "constant": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"cycles": 1},
    "polynomial": {"power": 1},
    "cosine_with_min_lr": {"end": 0},
}


def schedule(draft: Draft, name: str, names: Sequence[str], keys: Mapping[str, str]) -> None:
    """The curve of the learning rate, with its options (``keys``: option -> key of the source) written out, since the
    defaults of the tools differ."""
    plain = name.strip().lower().removesuffix("_with_warmup")
    if plain not in _SCHEDULES:
        others = ", ".join(("linear", "cosine", "cosine_with_restarts", "polynomial"))
        remedy = f"That schedule is not here: constant takes its place. Choose one of {others}, or an import path"
        draft.not_supported(names, remedy)
        plain = "constant"
    draft.write("schedule", plain.removesuffix("_with_min_lr"), *names)
    for option, default in _SCHEDULES[plain].items():
        key = keys.get(option, "")
        value = draft.number(key, default)
        draft.write(f"schedule_args.{option}", max(1, int(value)) if option == "cycles" else value, key)


def steps_in_epoch(draft: Draft) -> int | None:
    """Steps of an epoch, where the pictures can be counted."""
    if draft.images is None:
        return None
    return max(1, math.ceil(draft.images / draft.job["images_per_step"]))


def every(
    draft: Draft, key: str, steps: int, epochs: int, by_step: str, by_epoch: str, *, in_epochs: bool = False
) -> int | None:
    """How often something happens: the steps of it, where they can be told. ``steps`` and ``epochs`` are 0 where the
    source does not say; ``in_epochs`` is whether our key takes epochs too."""
    if steps > 0:
        draft.write(key, steps, by_step)
        draft.not_needed([by_epoch], f"{by_step} decides")
        return steps
    draft.not_needed([by_step], "is off")
    if epochs <= 0:
        draft.not_needed([by_epoch], "is off")
        return None
    if in_epochs:
        draft.write(key, "1 epoch" if epochs == 1 else f"{epochs} epochs", by_epoch)
        return None
    epoch = steps_in_epoch(draft)
    if epoch is None:
        draft.not_supported([by_epoch], f"{NOT_COUNTED} Write {key}: {epochs} x images x repeats / images_per_step")
        return None
    draft.write(key, epochs * epoch, by_epoch, remark=f"{epochs} epochs of {epoch} steps" if epochs > 1 else "an epoch")
    return epochs * epoch


def length(draft: Draft) -> int | None:
    """Steps of the whole run, where they can be told."""
    if "steps" in draft.job:
        return int(draft.job["steps"])
    epoch = steps_in_epoch(draft)
    return None if epoch is None else epoch * int(draft.job["epochs"])


def draw(draft: Draft, samples: Sequence[Drawn], prompts: str, keys: Mapping[str, str]) -> bool:
    """What is drawn during training, if anything. ``prompts`` is the key of the prompts, ``keys`` those of options by
    our names. The samples share the values of the first prompt, else those of the keys; what other prompts have
    of their own stands behind them."""
    samples = [sample for sample in samples if sample.prompt]
    if not samples:
        draft.not_needed((prompts, *keys.values()), "nothing is drawn without prompts")
        return False
    own = samples[0].options
    draft.write("sample.prompts", [_with_own(sample, own) for sample in samples], prompts)
    for ours, name in keys.items():
        if ours in own:
            draft.not_needed([name], "the first prompt says it itself")
        elif (value := as_number(draft.value(name))) is not None:
            draft.write(f"sample.{ours}", _as_drawn(ours, value), name)
    for ours, value in own.items():
        draft.write(f"sample.{ours}", _as_drawn(ours, value))
        told = f"sample.{ours}: {spelled(draft.job[f'sample.{ours}'])}"
        draft.tell(Given(f"{prompts}: {ours}", value), MAPPED, told)
    for name, others in lost_options(samples).items():
        remedy = _NO_NEGATIVE if name in ("--n", "--neg") else "Samples have no such setting here"
        draft.tell(Given(f"{prompts}: {name}, of single prompts", ", ".join(others)), NOT_SUPPORTED, remedy)
    return True


def _with_own(sample: Drawn, shared: Mapping[str, float]) -> str:
    """The prompt as a job has it, with what differs from the ``shared`` values behind it."""
    own = {name: _as_drawn(name, value) for name, value in sample.options.items() if value != shared.get(name)}
    return " ".join([sample.prompt, *(f"--{name} {spelled(value)}" for name, value in own.items())])


def _as_drawn(ours: str, value: float) -> float:
    if ours in ("width", "height"):
        return in_steps_of_16(value, 64, 4096)
    if ours in ("steps", "seed"):
        return int(min(max(value, 0 if ours == "seed" else 1), 1000 if ours == "steps" else MOST_SEED))
    return min(max(value, 0.0), 100.0)


def plain_bf16(draft: Draft, why: str) -> None:
    """Flags a learning rate that was found where updates below half a rounding step of bf16 are lost."""
    rate = float(draft.job["learning_rate"])
    # Of a weight in [2^e, 2^(e+1)), half a rounding step is 2^(e-8): 1e-6 is lost from 0.0005, 2e-5 from 0.0078.
    lost = 2.0 ** math.ceil(math.log2(256 * rate))
    draft.remarks["learning_rate"] = f"found with plain bf16; runs hotter here: try {spelled(rate / 2)} first"
    draft.notes.append(
        f"learning_rate {spelled(rate)} was found with plain bf16 weights ({why}), where an update of that size is "
        f"lost wherever |w| >= {lost:.2g}. Here rounding is stochastic and every update arrives, so the same rate runs "
        "hotter: begin at about half of it."
    )


# ---------------------------------------------------------------- an adapter's


def dropout(draft: Draft, names: Sequence[str]) -> None:
    """Of the values between an adapter's two matrices, in all three tools."""
    for name in names:
        if share := draft.number(name, 0.0):
            draft.write("lora.dropout", share, name)
        draft.not_needed([name], OFF)


def start(draft: Draft, names: Sequence[str]) -> None:
    """An adapter to start from."""
    for name in names:
        if path := draft.text(name):
            here, remark = path_here(path, "models")
            draft.write("lora.start", here, name, remark=remark)


def assistant(draft: Draft, names: Sequence[str]) -> None:
    """A training adapter: an id of the hub, or a file."""
    for name in names:
        if text := draft.text(name):
            is_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not is_single_file(text)
            here, remark = (text, "") if is_hub else path_here(text, "models")
            draft.write("assistant_lora", here, name, remark=remark)
