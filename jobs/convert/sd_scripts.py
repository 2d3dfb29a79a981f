"""sd-scripts: the arguments of ``flux_train.py`` and ``flux_train_network.py``, and its dataset files.

The kohya_ss GUI is a front for the same arguments and shares these tables (``kohya_gui.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.convert import shared
from jobs.convert.draft import Draft, Given, Table, missing, no_need, options
from jobs.convert.source import top_level
from jobs.convert.values import in_steps_of_16, name_of
from jobs.problem import JobError, Problem

GROUPS = ("optimizer_args", "network_args", "lr_scheduler_args")
_FLUX_KEYS = ("ae", "t5xxl", "guidance_scale", "timestep_sampling", "model_prediction_type", "t5xxl_max_token_length")


def given_in(document: Mapping[str, Any]) -> tuple[dict[str, Given], list[Given]]:
    """The arguments by name, and those that a later one of the same name replaces."""
    given: dict[str, Given] = {}
    replaced: list[Given] = []
    inside = {id(value): key for key, value in document.items() if isinstance(value, Mapping)}
    for section in (document, *(value for value in document.values() if isinstance(value, Mapping))):
        prefix = f"{inside[id(section)]}." if id(section) in inside else ""
        for key, value in section.items():
            if section is document and isinstance(value, Mapping):
                continue
            put(given, key.replace("-", "_"), Given(f"{prefix}{key}", value), replaced)
    assert len(given) + len(replaced) == len(top_level(document))
    return expanded(given, replaced), replaced


def put(given: dict[str, Given], name: str, new: Given, replaced: list[Given]) -> None:
    if name in given:
        replaced.append(given[name])
    given[name] = new


def expanded(given: Mapping[str, Given], replaced: list[Given]) -> dict[str, Given]:
    """With the groups of options taken apart: optimizer_args of "eps=1e-8" as optimizer_args.eps."""
    result: dict[str, Given] = {}
    for name, each in given.items():
        parts = options(each.value) if name in GROUPS else {}
        if not parts:
            put(result, name, each, replaced)
        for option, value in parts.items():
            put(result, f"{name}.{option}", Given(f"{each.key}.{option}", literal(value)), replaced)
    return result


_LITERALS = {"True": True, "true": True, "False": False, "false": False, "None": None}


def literal(text: str) -> Any:
    """ "0.9,0.99" as a list of numbers, "True" as true, "1e-8" as a number; anything else as text."""
    if text.strip("()[] ").count(","):
        return [literal(part) for part in text.strip("()[] ").split(",") if part.strip()]
    if text in _LITERALS:
        return _LITERALS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_model(draft: Draft, file: str) -> None:
    """Raises JobError where the file trains another model than FLUX.1."""
    for name, model in _OTHER_MODELS.items():
        if draft.on(name):
            raise _other_model(file, name, model)
    if draft.text("model_type").lower() not in ("", "flux"):
        raise _other_model(file, "model_type", draft.text("model_type"))
    module = draft.text("network_module")
    flux = draft.on("flux1_checkbox") or module.endswith("_flux") or any(draft.on(name) for name in _FLUX_KEYS)
    off = "flux1_checkbox" in draft.given and not draft.on("flux1_checkbox")
    if off or not flux:
        what = "flux1_checkbox is off" if off else f"there is none of {', '.join(_FLUX_KEYS[:4])}"
        remedy = "fluxpod trains FLUX.1 only; convert a file that was saved for it"
        raise JobError([Problem(f"this trains Stable Diffusion: {what}", remedy, file=file)])


_OTHER_MODELS = {
    "sdxl": "SDXL",
    "sdxl_checkbox": "SDXL",
    "sd3_checkbox": "Stable Diffusion 3",
    "v2": "Stable Diffusion 2",
}


def _other_model(file: str, key: str, model: str) -> JobError:
    remedy = "fluxpod trains FLUX.1 only; convert a file that was saved for it"
    return JobError([Problem(f"this trains {model}, not FLUX.1", remedy, key, file)])


# ---------------------------------------------------------------- what to train


def _name(draft: Draft, names: Sequence[str]) -> None:
    draft.write("name", name_of(draft.text("output_name")), "output_name")


def _base(draft: Draft, names: Sequence[str]) -> None:
    parts = {"vae": "ae", "text_encoders.clip": "clip_l", "text_encoders.t5": "t5xxl"}
    shared.base(draft, "pretrained_model_name_or_path", parts, ["vae"])


def is_lora(draft: Draft) -> bool:
    return any(draft.value(name) is not None for name in ("network_module", "LoRA_type", "network_dim", "unet_lr"))


_PLAIN_LORA = {"network_module": ("networks.lora_flux", "networks.lora"), "LoRA_type": ("Flux1", "Standard")}


def _text_encoder(draft: Draft) -> None:
    """sd-scripts trains CLIP too, unless it is told not to, or caches what CLIP says."""
    if not draft.on("network_train_unet_only") and not draft.on("cache_text_encoder_outputs"):
        draft.notes.append("The source trains an adapter of CLIP too. Here text encoders are not trained.")


def _method(draft: Draft, names: Sequence[str]) -> None:
    if not is_lora(draft):
        draft.write("method", "full")
        draft.not_needed([*names, *draft.below("network_args")], "the source trains all weights")
        return
    strange = [name for name, usual in _PLAIN_LORA.items() if draft.text(name) not in ("", *usual)]
    draft.not_supported(strange, "A plain LoRA takes its place: other kinds of adapters are not here")
    draft.write("method", "lora", "network_module", "LoRA_type")
    if "LoRA_type" not in draft.given:
        _text_encoder(draft)
    rank = draft.count("network_dim", 4)
    draft.write("lora.rank", rank, "network_dim", remark="" if "network_dim" in draft.given else "the source's default")
    alpha = draft.number("network_alpha", 1)
    said = "" if "network_alpha" in draft.given else "the source's default"
    draft.write("lora.alpha", alpha, "network_alpha", remark=said)
    _targets(draft, rank, alpha)


# Parts of a block by sd-scripts' option for their rank, with the diffusers names of their layers.
_PARTS = {
    "img_attn_dim": ("transformer_blocks.*.attn.to_[qkv]", "transformer_blocks.*.attn.to_out.*"),
    "txt_attn_dim": ("transformer_blocks.*.attn.add_*", "transformer_blocks.*.attn.to_add_out"),
    "img_mlp_dim": ("transformer_blocks.*.ff.net.*",),
    "txt_mlp_dim": ("transformer_blocks.*.ff_context.net.*",),
    "img_mod_dim": ("transformer_blocks.*.norm1.linear",),
    "txt_mod_dim": ("transformer_blocks.*.norm1_context.linear",),
    "single_dim": ("single_transformer_blocks.*.attn.*", "single_transformer_blocks.*.proj_*"),
    "single_mod_dim": ("single_transformer_blocks.*.norm.linear",),
}


def _targets(draft: Draft, rank: int, alpha: float) -> None:
    """Which layers: blocks by number and kind, parts of blocks by a rank of 0; and parts of another rank."""
    args = {name.partition(".")[2]: name for name in draft.below("network_args")}
    blocks = draft.text(args.get("train_blocks", "")) or "all"
    double = _numbers(draft.value(args.get("train_double_block_indices", ""), "all"), 19)
    single = _numbers(draft.value(args.get("train_single_block_indices", ""), "all"), 38)
    double, single = [] if blocks == "single" else double, [] if blocks == "double" else single
    ranks = {part: int(draft.number(args.get(part, ""), rank)) for part in _PARTS}
    used = [
        args[name]
        for name in ("train_blocks", "train_double_block_indices", "train_single_block_indices")
        if name in args
    ]
    for part in [part for part in _PARTS if part in args]:
        used.append(args[part])
    others = {part: ranks[part] for part in _PARTS if part in args and ranks[part] not in (0, rank)}
    patterns = _patterns(double, single, [part for part, size in ranks.items() if size > 0])
    if not patterns:
        draft.notes.append("The source trains no block at all; the targets here are the default ones.")
        draft.not_supported(used, "Nothing would be trained. Choose lora.targets")
        return
    whole = patterns == list(shared.ALL_BLOCKS)
    draft.write("lora.targets", patterns, *used, remark=shared.BLOCKS_REMARK if whole else "")
    if others:
        layers = [{"match": list(_PARTS[part]), "rank": size, "alpha": alpha} for part, size in others.items()]
        draft.write("lora.layers", layers, *(args[part] for part in others))
    missing("The embedders are trained only with targets all-linear")(draft, ["network_args.in_dims"])


def _patterns(double: list[int] | None, single: list[int] | None, parts: Sequence[str]) -> list[str]:
    """Patterns of layer names. None for blocks means all of a kind."""
    if len(parts) == len(_PARTS):
        found = [("transformer_blocks.*", double), ("single_transformer_blocks.*", single)]
    else:
        layers = [pattern for part in parts for pattern in _PARTS[part]]
        found = [(pattern, single if pattern.startswith("single") else double) for pattern in layers]
    patterns: list[str] = []
    for pattern, numbers in found:
        kind, _, rest = pattern.partition(".*")
        if numbers is None:
            patterns.append(pattern)
        else:
            patterns += [f"{kind}.{number}{rest or '.*'}" for number in numbers]
    return patterns


def _numbers(text: Any, count: int) -> list[int] | None:
    """ "0,1,4-6" as numbers; None for all."""
    written = ",".join(str(each) for each in text) if isinstance(text, list) else str(text).strip().lower()
    if written in ("", "all"):
        return None
    numbers: set[int] = set()
    for part in written.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match:
            numbers |= set(range(int(match[1]), min(int(match[2] or match[1]), count - 1) + 1))
    return sorted(number for number in numbers if number < count)


# ---------------------------------------------------------------- how long, how fast


def _length(draft: Draft, names: Sequence[str]) -> None:
    epochs, steps, gui_epochs = draft.count("max_train_epochs"), draft.count("max_train_steps"), draft.count("epoch")
    if epochs > 0:
        draft.write("epochs", epochs, "max_train_epochs")
        draft.not_needed(["max_train_steps", "epoch"], "max_train_epochs decides there")
    elif steps > 0:
        draft.write("steps", steps, "max_train_steps")
        draft.not_needed(["epoch"], "max_train_steps decides there")
    elif gui_epochs > 0:
        draft.write("epochs", gui_epochs, "epoch", remark="of all pictures; the source had N times as many on N GPUs")
    else:
        draft.write("steps", 1600, remark="the source's default")
    draft.not_needed(["max_train_epochs", "max_train_steps", "epoch"], "is 0: another key decides")


def _images(draft: Draft, names: Sequence[str]) -> None:
    gpus = _gpus(draft)
    batch, accumulated = draft.count("train_batch_size", 1), draft.count("gradient_accumulation_steps", 1)
    used = ["train_batch_size", "gradient_accumulation_steps"]
    if draft.gpus is None and gpus > 1:
        used += [name for name in ("num_processes", "num_machines") if draft.count(name) > 1]
        used += ["gpu_ids"] if len(draft.text("gpu_ids").split(",")) == gpus else []
    shared.images_per_step(draft, batch, accumulated, gpus, used)
    draft.not_needed(names, "--gpus says it" if draft.gpus is not None else shared.LAUNCHED)


def _gpus(draft: Draft) -> int:
    """GPUs that the source was run on: as the user says, else as the launch options of the GUI say."""
    ids = [part for part in re.split(r"[,\s]+", draft.text("gpu_ids")) if part.isdigit()]
    processes = max(draft.count("num_processes", 1), 1) * max(draft.count("num_machines", 1), 1)
    return draft.gpus or max(processes, len(ids))


def _rate(draft: Draft, names: Sequence[str]) -> None:
    lora = draft.job["method"] == "lora"
    key = "unet_lr" if lora and draft.number("unet_lr", 0) > 0 else "learning_rate"
    rate = draft.number(key, 2e-6)
    if rate <= 0:
        draft.not_supported([key], "A rate of 0 trains nothing: write the one you mean")
        rate = 2e-6
    draft.write("learning_rate", rate, key, remark="" if key in draft.given else "the source's default")
    draft.not_needed(["learning_rate"], "unet_lr decides there")
    draft.not_needed(["unet_lr"], "is 0, or of no use with all weights")
    # These alone round stochastically, or keep what is lost, in the source.
    fused_adafactor = draft.text("optimizer_type").lower() == "adafactor" and draft.on("fused_backward_pass")
    exact = fused_adafactor or draft.on("kahan_summation")
    if draft.on("full_bf16") and not exact:
        shared.plain_bf16(draft, "full_bf16")
        draft.mapped(["full_bf16"], "a warning at learning_rate")
    elif not lora and not exact and draft.text("mixed_precision") == "bf16":
        shared.plain_bf16(draft, "mixed_precision bf16 loads the weights as bf16")
        draft.mapped(["mixed_precision"], "a warning at learning_rate")


def _schedule(draft: Draft, names: Sequence[str]) -> None:
    name = draft.text("lr_scheduler", "constant")
    if draft.value("lr_scheduler_type") is not None:
        remedy = (
            "A scheduler class cannot be used here. Write a function of the progress, and its import path at schedule"
        )
        draft.not_supported(["lr_scheduler_type"], remedy)
    draft.not_supported(draft.below("lr_scheduler_args"), "The schedules here take other options; see schedule_args")
    keys = {"cycles": "lr_scheduler_num_cycles", "power": "lr_scheduler_power", "end": "lr_scheduler_min_lr_ratio"}
    shared.schedule(draft, name, ["lr_scheduler"], keys)
    draft.not_needed(names, f"has no effect with {name}")
    _warmup(draft, name)


WARMUP_KEYS = "lr_warmup_steps lr_warmup"


def _warmup(draft: Draft, name: str) -> None:
    """Steps of warm-up: a number of steps, a share of them below 1, or the GUI's percentage."""
    if name.lower() == "constant":
        draft.write("warmup", 0, remark="the source's constant has none")
        draft.not_needed(WARMUP_KEYS.split(), "the source's constant has no warm-up")
        return
    text, key = draft.text("lr_warmup_steps"), "lr_warmup_steps"
    steps = float(text[:-1]) / 100 if re.fullmatch(r"\d+(\.\d+)?%", text) else draft.number(key, 0)
    if steps <= 0 and draft.number("lr_warmup", 0) > 0:
        key, steps = "lr_warmup", draft.number("lr_warmup", 0) / 100
    remark = ""
    if 0 < steps < 1:
        whole = shared.length(draft)
        if whole is None:
            draft.not_supported([key], f"{shared.NOT_COUNTED} The default stands; write warmup")
            return
        steps, remark = round(steps * whole), f"{steps:.3g} of {whole} steps"
    elif steps > 0 and _gpus(draft) > 1:
        remark = f"there {int(steps) // _gpus(draft)} steps on {_gpus(draft)} GPUs, which each counted"
    draft.write("warmup", int(steps), key, remark=remark)
    draft.not_needed(WARMUP_KEYS.split(), "is off, or the other one decides")


def _optimizer(draft: Draft, names: Sequence[str]) -> None:
    name = draft.text("optimizer_type")
    if not name:
        name = "AdamW8bit" if draft.on("use_8bit_adam") else "Lion" if draft.on("use_lion_optimizer") else "AdamW"
    args = {each.partition(".")[2]: each for each in draft.below("optimizer_args")}
    if "relative_step" in args and name.lower() == "adafactor" and draft.value(args["relative_step"]) is True:
        draft.not_supported([args["relative_step"]], "The learning rate is the job's here, so relative_step is false")
        del args["relative_step"]
    used = [each for each in names if each == "optimizer_type" or draft.on(each)]
    shared.optimizer(draft, name, used, args)
    draft.not_needed(names, "optimizer_type decides")
    if draft.job["method"] == "full" and (draft.on("fused_backward_pass") or draft.on("blockwise_fused_optimizers")):
        draft.not_needed(["max_grad_norm"], "the fused optimizer of the source never clips the whole gradient either")
    else:
        shared.clip(draft, "max_grad_norm")


# ---------------------------------------------------------------- noise


def _noise(draft: Draft, names: Sequence[str]) -> None:
    sampling = draft.text("timestep_sampling", "sigma")
    scheme = draft.text("weighting_scheme", "none")
    shift = draft.number("discrete_flow_shift", 3.0)
    scale = draft.number("sigmoid_scale", 1.0)
    scale_key, used = "sigmoid_scale", ["timestep_sampling"]
    if sampling == "sigma":
        sampling, scale, scale_key, more = _sigma(draft, scheme, shift)
        used += more
    draft.write("timestep_sampling", sampling, *used, remark=draft.remarks.pop("sigma", ""))
    if sampling == "shift":
        draft.write("discrete_flow_shift", shift, "discrete_flow_shift")
    if sampling != "uniform" and scale != 1:
        draft.write("sigmoid_scale", scale, scale_key)
    draft.not_needed(["discrete_flow_shift"], f"has no effect with {sampling}")
    draft.not_needed(names, "is the default, or has no effect with this sampling")


def _sigma(draft: Draft, scheme: str, shift: float) -> tuple[str, float, str, list[str]]:
    """The nearest to timestep_sampling sigma: evenly drawn levels (or the sigmoid of normal ones), then shifted."""
    if scheme == "logit_normal":
        if draft.number("logit_mean", 0) != 0:
            draft.not_supported(["logit_mean"], "The middle of the noise levels cannot be moved; try another shift")
        return "shift", draft.number("logit_std", 1), "logit_std", ["weighting_scheme"]
    if scheme not in ("none", "uniform"):
        draft.not_supported(["weighting_scheme", "mode_scale"], "All noise levels weigh the same here")
    if shift == 1:
        return "uniform", 1, "sigmoid_scale", []
    draft.remarks["sigma"] = "nearest to sigma: the same shift, fewer of the extremes"
    return "shift", 1, "sigmoid_scale", []


def _prediction(draft: Draft, names: Sequence[str]) -> None:
    kind = draft.text("model_prediction_type", "sigma_scaled")
    if kind == "raw":
        draft.not_needed(names, "it is always raw")
        return
    remedy = "It is always raw here, what FLUX was trained with; the other two are known to ruin a run"
    draft.not_supported(names, remedy)
    if "model_prediction_type" not in draft.given:
        draft.notes.append(f"The source's default model_prediction_type is {kind}. {remedy}.")


def _guidance(draft: Draft, names: Sequence[str]) -> None:
    guidance = draft.number("guidance_scale", 3.5)
    said = "" if "guidance_scale" in draft.given else "the source's default"
    draft.write("guidance", guidance, "guidance_scale", remark="1 is right for training" if guidance != 1 else said)


def _tokens(draft: Draft, names: Sequence[str]) -> None:
    fixed = 256 if "schnell" in draft.job["base"].lower() else 512
    missing(f"Captions are read up to {fixed} tokens", fixed)(draft, names)


def _mask(draft: Draft, names: Sequence[str]) -> None:
    for name in names:
        if draft.on(name):
            draft.write("t5_mask", True, name)
    draft.not_needed(names, "is off, as here")


# ---------------------------------------------------------------- saving and drawing


def _save(draft: Draft, names: Sequence[str]) -> None:
    steps, epochs = draft.count("save_every_n_steps"), draft.count("save_every_n_epochs")
    cadence = ("save_every_n_steps", "save_every_n_epochs")
    every = shared.every(draft, "save.every", steps, epochs, *cadence, in_epochs=True)
    for ours, end in (("states", "_state"), ("weights", "")):
        span, count = draft.count(f"save_last_n_steps{end}"), draft.count(f"save_last_n_epochs{end}")
        if count > 0 and steps <= 0:
            draft.write(f"save.{ours}", count, f"save_last_n_epochs{end}")
        elif span > 0 and every is not None and steps > 0:
            kept = span // every + 1  # it is a span of steps there
            draft.write(f"save.{ours}", kept, f"save_last_n_steps{end}", remark=f"those of the last {span} steps")
        draft.not_needed(
            [f"save_last_n_steps{end}", f"save_last_n_epochs{end}"], "is off, or goes with the other cadence"
        )
    if draft.job.get("save.weights", math.inf) < draft.job.get("save.states", 0):
        keys = ("save_last_n_steps", "save_last_n_epochs")
        draft.write("save.weights", draft.job["save.states"], *keys, remark="every state needs its weights")
    if draft.job["method"] == "full" and (steps > 0 or epochs > 0) and "save.weights" not in draft.job:
        draft.notes.append("The source keeps every checkpoint. Here the newest two stay; save.weights: all keeps all.")
    missing("Write save.every")(draft, ["save_n_epoch_ratio"])


def _sample(draft: Draft, names: Sequence[str]) -> None:
    steps, epochs = draft.count("sample_every_n_steps"), draft.count("sample_every_n_epochs")
    steps = 0 if epochs > 0 else steps  # there, epochs win
    cadence = ("sample_every_n_steps", "sample_every_n_epochs")
    if draft.value("sample_prompts") is not None and not draft.samples:
        draft.not_supported(["sample_prompts"], "That file is not here. Copy its lines into sample.prompts")
        missing("Write sample.every beside the prompts")(draft, cadence)
        return
    if not shared.draw(draft, draft.samples, "sample_prompts", {}):
        draft.not_needed(cadence, "nothing is drawn without prompts")
        return
    shared.every(draft, "sample.every", steps, epochs, *cadence)
    if steps <= 0 and epochs <= 0:
        draft.notes.append("The source does not say when to draw, and so never does. Here it is every 250 steps.")


def _validation(draft: Draft, names: Sequence[str]) -> None:
    share, steps = draft.number("validation_split", 0), draft.count("validate_every_n_steps")
    if share <= 0:
        draft.not_needed(names, "nothing is held out")
        return
    draft.write("validation.fraction", min(share, 0.5), "validation_split", remark="" if share <= 0.5 else "at most")
    if steps > 0:
        draft.write("validation.every", steps, "validate_every_n_steps")
    missing("Write validation.every in steps")(draft, ["validate_every_n_epochs"])


def _upscale(draft: Draft, names: Sequence[str]) -> None:
    for name in names:
        if draft.value(name) is not None:
            draft.write(
                "upscale", not draft.on(name), name, remark="" if draft.on(name) else "enlarged pictures teach blur"
            )


def _bucket_step(draft: Draft, names: Sequence[str]) -> None:
    for name in names:
        step = draft.number(name, 64)
        if name in draft.given:
            draft.write("bucket_step", in_steps_of_16(step, 16, 512), name)


def _seed(draft: Draft, names: Sequence[str]) -> None:
    seed = draft.count("seed")
    if seed > 0:
        draft.write("seed", seed, "seed")
    draft.not_needed(["seed"], "is by chance there; here the default")


SAVES = (
    "save_every_n_steps save_every_n_epochs save_last_n_steps save_last_n_steps_state save_last_n_epochs "
    "save_last_n_epochs_state save_n_epoch_ratio"
)
TABLE: Table = (
    ("output_name", _name),
    ("pretrained_model_name_or_path ae vae clip_l t5xxl", _base),
    ("network_module LoRA_type network_dim network_alpha unet_lr text_encoder_lr", _method),
    ("train_batch_size gradient_accumulation_steps num_processes num_machines gpu_ids multi_gpu", _images),
    ("max_train_epochs max_train_steps epoch", _length),
    ("learning_rate unet_lr full_bf16 mixed_precision", _rate),
    (
        "lr_scheduler lr_scheduler_type lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_min_lr_ratio "
        "lr_scheduler_timescale lr_decay_steps",
        _schedule,
    ),
    ("optimizer_type use_8bit_adam use_lion_optimizer", _optimizer),
    ("timestep_sampling discrete_flow_shift sigmoid_scale weighting_scheme logit_mean logit_std mode_scale", _noise),
    ("model_prediction_type", _prediction),
    ("guidance_scale", _guidance),
    ("apply_t5_attn_mask", _mask),
    ("network_dropout", shared.dropout),
    ("network_weights", shared.start),
    ("t5xxl_max_token_length", _tokens),
    ("bucket_no_upscale", _upscale),
    ("bucket_reso_steps", _bucket_step),
    ("seed", _seed),
    (SAVES, _save),
    ("sample_every_n_steps sample_every_n_epochs sample_prompts", _sample),
    # --- not needed ---
    (
        "v2 v_parameterization sdxl sdxl_checkbox sd3_checkbox flux1_checkbox model_list model_type",
        no_need("the base says it"),
    ),
    (
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk "
        "vae_batch_size text_encoder_batch_size skip_cache_check skip_latents_validity_check cache_info",
        no_need(shared.CACHED),
    ),
    (
        "gradient_checkpointing cpu_offload_checkpointing blocks_to_swap double_blocks_to_swap single_blocks_to_swap "
        "fp8_base fp8_base_unet split_mode blockwise_fused_optimizers fused_backward_pass fused_optimizer_groups "
        "lowram lowvram highvram torch_compile dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic "
        "mem_eff_save disable_mmap_load_safetensors kahan_summation "
        "deepspeed zero_stage offload_optimizer_device offload_optimizer_nvme_path offload_param_device "
        "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients",
        no_need(shared.PLANNED),
    ),
    ("xformers sdpa mem_eff_attn", no_need("attention is always torch's fast one")),
    (
        "mixed_precision full_fp16 full_bf16 no_half_vae",
        no_need("training is in bf16 with stochastic rounding, adapters and optimizers in what they need"),
    ),
    (
        "num_cpu_threads_per_process main_process_port extra_accelerate_launch_args ddp_timeout "
        "ddp_gradient_as_bucket_view ddp_static_graph max_data_loader_n_workers persistent_data_loader_workers",
        no_need(shared.LAUNCHED),
    ),
    (
        "logging_dir log_with log_prefix log_tracker_name log_tracker_config log_config wandb_run_name "
        "console_log_level console_log_file console_log_simple",
        no_need(shared.LOGGED),
    ),
    ("output_dir config_file output_config tokenizer_cache_dir dataset_config", no_need(shared.IN_RUNS)),
    (
        "save_model_as use_safetensors no_metadata",
        no_need("it is always .safetensors, in the layout ComfyUI and Forge load"),
    ),
    (
        "save_state save_state_on_train_end",
        no_need("states are always saved: a restarted pod goes on from the last one"),
    ),
    ("sample_at_first", no_need("samples are always drawn before the first step")),
    ("sample_sampler", no_need("samples are drawn with FLUX's own sampler")),
    ("enable_bucket", no_need("pictures are always sorted into sizes of their own proportions")),
    ("min_bucket_reso max_bucket_reso", no_need("the sides follow from resolution: half to twice of it")),
    ("network_train_unet_only", no_need("text encoders are never trained")),
    (
        "clip_skip max_token_length no_token_padding weighted_captions noise_offset noise_offset_type "
        "noise_offset_random_strength adaptive_noise_scale multires_noise_iterations multires_noise_discount "
        "min_snr_gamma scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss zero_terminal_snr "
        "block_lr learning_rate_te learning_rate_te1 learning_rate_te2 train_text_encoder stop_text_encoder_training",
        no_need("has no effect on FLUX in the source either"),
    ),
    ("network_args.split_qkv", no_need("q, k and v have adapters of their own, and are joined in the file")),
    # --- not supported ---
    (
        "text_encoder_lr t5xxl_lr network_train_text_encoder_only network_args.train_t5xxl",
        missing("Text encoders are not trained: they are encoded once. Teach a word by trigger and captions"),
    ),
    (
        "network_args.rank_dropout network_args.module_dropout scale_weight_norms",
        missing(
            "An adapter's single values are dropped, by lora.dropout; a lower rank keeps from learning by heart too"
        ),
    ),
    ("dim_from_weights", missing("Write the rank of the file as lora.rank")),
    (
        "base_weights base_weights_multiplier",
        missing("Put it into the base first with `fluxpod merge`, and name that file as base"),
    ),
    (
        "loraplus_lr_ratio loraplus_unet_lr_ratio loraplus_text_encoder_lr_ratio network_args.loraplus_lr_ratio "
        "network_args.loraplus_unet_lr_ratio network_args.loraplus_text_encoder_lr_ratio "
        "network_args.network_reg_lrs",
        missing("Both matrices of a layer have one learning rate; layers may have their own, in lora.layers"),
    ),
    (
        "network_args.network_reg_dims",
        missing("Write these layers and ranks as lora.layers, by the names of diffusers"),
    ),
    ("network_args.ggpo_sigma network_args.ggpo_beta", missing("There is no GGPO; leave it out")),
    ("ip_noise_gamma ip_noise_gamma_random_strength", missing("The noise is FLUX's own; leave it out")),
    ("min_timestep", missing("All noise levels are trained; shift them with timestep_sampling")),
    ("max_timestep", missing("All noise levels are trained; shift them with timestep_sampling", 1000)),
    ("loss_type", missing("The loss is always the mean squared error", "l2")),
    ("huber_schedule huber_c huber_scale", no_need("belongs to another loss_type than l2")),
    ("save_precision", missing("Checkpoints are bf16, adapters float32", "bf16")),
    (
        "resume initial_epoch initial_step skip_until_initial_step",
        missing("States of other tools cannot be read. Name its checkpoint as base"),
    ),
    (
        "huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_repo_visibility "
        "save_state_to_huggingface resume_from_huggingface async_upload",
        missing("Nothing is uploaded. Take output/ from the volume"),
    ),
    ("huggingface_token", missing(shared.TOKENS)),
    ("wandb_api_key", no_need(shared.WANDB)),
    (
        "metadata_title metadata_author metadata_description metadata_license metadata_tags metadata_usage_hint "
        "metadata_thumbnail metadata_merged_from metadata_trigger_phrase metadata_preprocessor "
        "metadata_is_negative_embedding training_comment",
        missing("The file carries no such remarks; keep them beside it"),
    ),
    ("validation_split validate_every_n_steps validate_every_n_epochs", _validation),
    ("validation_seed", no_need("each picture's own bytes decide whether it is held out")),
    ("max_validation_steps", no_need("a round tries at most 16 images (validation.images)")),
    ("caption_dropout_every_n_epochs", missing("Write a share of the images as caption_dropout")),
    ("controlnet_model_name_or_path train_inpainting", missing("Only plain FLUX is trained")),
    (
        "dataset_class debug_dataset in_json",
        missing("Captions are read from name.txt or name.caption beside the pictures"),
    ),
)
