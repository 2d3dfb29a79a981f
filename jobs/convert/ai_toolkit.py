"""ai-toolkit: ``config.process[0]`` of a training file, of its examples or of its web page.

Keys are named by their place below the process: train.lr, datasets[0].folder_path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.convert import entries, shared
from jobs.convert.draft import MAPPED, NOT_NEEDED, OFF, Draft, Given, Table, missing, no_need
from jobs.convert.entries import Outcome, as_number_of, as_path, as_switch, as_text, needless, rows, sets, unsupported
from jobs.convert.values import Drawn, drawn_of, is_empty, is_off, name_of, path_here, resolution_of
from jobs.problem import JobError, Problem

_TRAINERS = ("sd_trainer", "diffusion_trainer", "ui_trainer", "")
_OTHER_MODELS = {
    "is_xl": "SDXL",
    "is_v2": "Stable Diffusion 2",
    "is_v3": "Stable Diffusion 3",
    "is_pixart": "PixArt",
    "is_pixart_sigma": "PixArt",
    "is_auraflow": "AuraFlow",
    "is_lumina2": "Lumina 2",
    "is_ssd": "SSD-1B",
    "is_vega": "Segmind Vega",
}
_REMEDY = "fluxpod trains FLUX.1 only; convert a file that was saved for it"


def given_in(document: Mapping[str, Any], file: str) -> tuple[dict[str, Given], list[Any]]:
    """The keys by their names, and the datasets. Raises JobError where there is no training of FLUX.1 in it."""
    config = document["config"]
    processes = config.get("process")
    if not isinstance(processes, list) or not processes or not isinstance(processes[0], Mapping):
        remedy = "Give a training file, such as one of config/examples"
        raise JobError([Problem("holds no process to convert", remedy, "config.process", file)])
    process = processes[0]
    if str(process.get("type") or "") not in _TRAINERS:
        remedy = "Only sd_trainer and diffusion_trainer are trainings that have a job here"
        raise JobError([Problem(f"the process is a {process.get('type')}", remedy, "config.process[0].type", file)])
    _check_model(process.get("model"), file)
    given = _flat({key: value for key, value in process.items() if key != "datasets"})
    given |= _flat({key: value for key, value in config.items() if key != "process"}, "config.")
    given |= _flat({key: value for key, value in document.items() if key != "config"}, "")
    given |= {f"config.process[{i}]": Given(f"config.process[{i}]", "...") for i in range(1, len(processes))}
    datasets = process.get("datasets", [])
    if not isinstance(datasets, list):
        return given | {"datasets": Given("datasets", datasets)}, []
    strange = [f"datasets[{i}]" for i, each in enumerate(datasets) if not isinstance(each, Mapping)]
    return given | {name: Given(name, "...") for name in strange}, datasets


def _check_model(model: Any, file: str) -> None:
    keys = model if isinstance(model, Mapping) else {}
    arch = str(keys.get("arch") or "").partition(":")[0].lower()
    for key, name in _OTHER_MODELS.items():
        if not is_off(keys.get(key)):
            raise JobError([Problem(f"this trains {name}, not FLUX.1", _REMEDY, f"model.{key}", file)])
    if arch not in ("", "flux", "flex1"):
        raise JobError([Problem(f"this trains {arch}, not FLUX.1", _REMEDY, "model.arch", file)])
    if not arch and is_off(keys.get("is_flux")):
        told = "this trains Stable Diffusion: neither is_flux nor arch says FLUX"
        raise JobError([Problem(told, _REMEDY, "model", file)])


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Given]:
    found: dict[str, Given] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{name}.")
        else:
            found[name] = Given(name, value)
    return found


# ---------------------------------------------------------------- rules


def _name(draft: Draft, names: Sequence[str]) -> None:
    draft.write("name", name_of(draft.text("config.name")), "config.name")
    more = [name for name in draft.given if name.startswith("config.process[")]
    draft.not_supported(more, "A file is one job: put that process first, in a file of its own, and convert it too")


def _base(draft: Draft, names: Sequence[str]) -> None:
    others = ("model.te_name_or_path", "model.extras_name_or_path")
    shared.base(draft, "model.name_or_path", {"vae": "model.vae_path"}, others)


def _method(draft: Draft, names: Sequence[str]) -> None:
    network = [name for name in draft.given if name.startswith("network.")]
    if not network:
        draft.write("method", "full")
        return
    kind = draft.text("network.type", "lora").lower()
    if kind != "lora":
        draft.not_supported(["network.type"], "A plain LoRA takes its place: other kinds of adapters are not here")
    draft.write("method", "lora", "network.type")
    key = next((name for name in ("network.rank", "network.linear") if draft.value(name) is not None), "")
    rank = draft.count(key, 4)
    draft.write("lora.rank", rank, key)
    draft.not_needed(["network.linear"], "network.rank decides there")
    key = "network.linear_alpha" if draft.value("network.linear_alpha") is not None else "network.alpha"
    said = "" if key in draft.given else "the source's default"
    draft.write("lora.alpha", draft.number(key, 1.0), key, remark=said)
    draft.not_needed(["network.alpha"], "network.linear_alpha decides there")
    _targets(draft)


def _targets(draft: Draft) -> None:
    key = "network.network_kwargs.only_if_contains"
    only = draft.value(key)
    if not isinstance(only, list):
        only = [] if only is None else [only]
    if only:
        layers = [str(part).removeprefix("transformer.").strip("*") for part in only]
        draft.write("lora.targets", [f"*{layer}*" for layer in layers], key)
    else:
        draft.write("lora.targets", list(shared.ALL_BLOCKS), remark=shared.BLOCKS_REMARK)
    remedy = "Write the layers that are left as patterns in lora.targets"
    missing(remedy)(draft, ["network.network_kwargs.ignore_if_contains", "model.ignore_if_contains"])


def _images(draft: Draft, names: Sequence[str]) -> None:
    accumulated = max(draft.count("train.gradient_accumulation", 1), _counted(draft))
    if draft.count("train.gradient_accumulation_steps", 1) < 0:
        remedy = "A step of a whole epoch cannot be written; write images_per_step"
        draft.not_supported(["train.gradient_accumulation_steps"], remedy)
    shared.images_per_step(draft, draft.count("train.batch_size", 1), accumulated, 1, names)


def _counted(draft: Draft) -> int:
    """How many of the source's steps are one of ours: gradient_accumulation_steps, the older of its two keys, counts
    every part of a step as one."""
    return max(1, draft.count("train.gradient_accumulation_steps", 1))


def _steps(draft: Draft, key: str, default: int) -> int:
    return math.ceil(draft.count(key, default) / _counted(draft))


def _length(draft: Draft, names: Sequence[str]) -> None:
    parts = _counted(draft)
    said = f"{draft.count('train.steps', 1000)} there, which counts each of the {parts} parts" if parts > 1 else ""
    if "train.steps" not in draft.given:
        said = "the source's default"
    draft.write("steps", max(1, _steps(draft, "train.steps", 1000)), "train.steps", remark=said)


def _rate(draft: Draft, names: Sequence[str]) -> None:
    key = "train.unet_lr" if draft.value("train.unet_lr") is not None else "train.lr"
    draft.write(
        "learning_rate", draft.number(key, 1e-6), key, remark="" if key in draft.given else "the source's default"
    )
    draft.not_needed(["train.lr"], "train.unet_lr decides there")
    stochastic = draft.text("train.optimizer", "adamw").lower() in ("adafactor", "automagic")
    if draft.job["method"] == "full" and draft.text("train.dtype") in ("bf16", "bfloat16") and not stochastic:
        shared.plain_bf16(draft, "train.dtype bf16")
        draft.mapped(["train.dtype"], "a warning at learning_rate")
    draft.not_needed(["train.dtype"], "training is in bf16 with stochastic rounding, adapters in float32")


def _schedule(draft: Draft, names: Sequence[str]) -> None:
    name = draft.text("train.lr_scheduler", "constant")
    params = {each.rpartition(".")[2]: each for each in draft.below("train.lr_scheduler_params")}
    keys = {"cycles": params.get("num_cycles", ""), "power": params.get("power", "")}
    shared.schedule(draft, name, ["train.lr_scheduler"], keys)
    warmup = next((params[each] for each in ("num_warmup_steps", "warmup_steps") if each in params), "")
    draft.write("warmup", _steps(draft, warmup, 0), warmup)
    draft.not_supported(params.values(), "The schedules here take other options; see schedule_args")


def _optimizer(draft: Draft, names: Sequence[str]) -> None:
    args = {each.rpartition(".")[2]: each for each in draft.below("train.optimizer_params")}
    name = draft.text("train.optimizer", "adamw")
    shared.optimizer(draft, name, ["train.optimizer"], args)
    if name.lower() == "adafactor" and "scale_parameter" not in args:
        draft.write("optimizer_args.scale_parameter", False, remark="the source's default")
    shared.clip(draft, "train.max_grad_norm")


_SAMPLINGS = {
    "sigmoid": ("sigmoid", ""),
    "linear": ("uniform", ""),
    "weighted": ("uniform", "nearest to weighted, without its weights"),
    "shift": ("flux_shift", "nearest to shift, which draws the levels evenly before it shifts them"),
    "flux_shift": ("flux_shift", ""),
    "lognorm_blend": ("sigmoid", "nearest to lognorm_blend"),
}


def _noise(draft: Draft, names: Sequence[str]) -> None:
    kind = draft.text("train.timestep_type", "sigmoid")
    linear = [name for name in ("train.linear_timesteps", "train.linear_timesteps2") if draft.on(name)]
    if linear:
        draft.not_supported(linear, "Its weights are not here; timestep_sampling: uniform is nearest")
        kind = "linear"
    if kind not in _SAMPLINGS:
        draft.not_supported(
            ["train.timestep_type"], "sigmoid takes its place. Choose another timestep_sampling if you like"
        )
    sampling, remark = _SAMPLINGS.get(kind, ("sigmoid", ""))
    draft.write("timestep_sampling", sampling, "train.timestep_type", remark=remark)
    draft.not_needed(names, "is off")
    draft.write("guidance", 1.0, remark="what the source trains with")


def _mask(draft: Draft, names: Sequence[str]) -> None:
    for name in names:
        if draft.on(name):
            draft.write("t5_mask", True, name)
    draft.not_needed(names, "is off, as here")


def _save(draft: Draft, names: Sequence[str]) -> None:
    if draft.count("save.save_every") > 0:
        draft.write("save.every", _steps(draft, "save.save_every", 0), "save.save_every")
    kept = draft.count("save.max_step_saves_to_keep")
    if kept > 0:
        draft.write("save.weights", kept, "save.max_step_saves_to_keep")
    draft.not_needed(names, "is 0")


_SAMPLE_KEYS = {
    "width": "sample.width",
    "height": "sample.height",
    "steps": "sample.sample_steps",
    "guidance": "sample.guidance_scale",
    "seed": "sample.seed",
}


def _sample(draft: Draft, names: Sequence[str]) -> None:
    key = "sample.samples" if isinstance(draft.value("sample.samples"), list) else "sample.prompts"
    off = draft.on("train.disable_sampling")
    written = [] if off else draft.value(key, [])
    samples = [_drawn(draft, each) for each in written] if isinstance(written, list) else []
    keys = {ours: name for ours, name in _SAMPLE_KEYS.items() if name in draft.given}
    if shared.draw(draft, samples, key, keys) and draft.count("sample.sample_every") > 0:
        draft.write("sample.every", _steps(draft, "sample.sample_every", 0), "sample.sample_every")
    draft.not_needed(["sample.samples", "sample.prompts", "sample.sample_every"], "nothing is drawn by it")
    draft.not_needed(["train.disable_sampling"], "without prompts nothing is drawn" if off else "is off")


def _average(draft: Draft, names: Sequence[str]) -> None:
    if draft.on("train.ema_config.use_ema"):
        decay = draft.number("train.ema_config.ema_decay", 0.999)
        draft.write("ema.decay", min(max(decay, 0.0), 0.9999), *names)
    draft.not_needed(names, "ema_config.use_ema is off")


_ITEM = {"sample_steps": "s", "guidance_scale": "g", "width": "w", "height": "h", "seed": "d"}


def _drawn(draft: Draft, item: Any) -> Drawn:
    """A prompt of text, with options behind it, or an item of keys; [trigger] is the trigger word in both."""
    trigger = draft.text("trigger_word")
    if not isinstance(item, Mapping):
        return drawn_of(str(item).replace("[trigger]", trigger))
    words = [
        f"--{_ITEM.get(key, key)} {value}" for key, value in item.items() if key != "prompt" and not is_empty(value)
    ]
    return drawn_of(" ".join([str(item.get("prompt") or "").replace("[trigger]", trigger), *words]))


TABLE: Table = (
    ("config.name", _name),
    ("model.name_or_path model.vae_path model.te_name_or_path model.extras_name_or_path", _base),
    ("network.type network.linear network.rank network.linear_alpha network.alpha", _method),
    ("train.batch_size train.gradient_accumulation_steps train.gradient_accumulation", _images),
    ("train.steps", _length),
    ("train.lr train.unet_lr train.dtype", _rate),
    ("train.lr_scheduler", _schedule),
    ("train.optimizer train.max_grad_norm", _optimizer),
    ("train.timestep_type train.linear_timesteps train.linear_timesteps2", _noise),
    ("model.attn_masking", _mask),
    ("network.dropout", shared.dropout),
    ("network.pretrained_lora_path", shared.start),
    ("model.assistant_lora_path", shared.assistant),
    ("save.save_every save.max_step_saves_to_keep", _save),
    (
        "sample.samples sample.prompts sample.sample_every sample.width sample.height sample.sample_steps "
        "sample.guidance_scale sample.seed train.disable_sampling",
        _sample,
    ),
    # --- not needed ---
    (
        "job type device config.process sqlite_db_path meta.name meta.version",
        no_need("says nothing about the training"),
    ),
    ("training_folder", no_need(shared.IN_RUNS)),
    (
        "performance_log_every logging.log_every logging.verbose logging.use_ui_logger logging.project_name "
        "logging.run_name",
        no_need(shared.LOGGED),
    ),
    ("model.is_flux model.arch", no_need("the base says it")),
    (
        "model.quantize model.quantize_te model.qtype model.qtype_te model.quantize_kwargs.exclude "
        "model.quantize_kwargs model.low_vram model.layer_offloading model.layer_offloading_transformer_percent "
        "model.layer_offloading_text_encoder_percent model.split_model_over_gpus "
        "model.split_model_other_module_param_count_scale model.text_encoder_bits model.accuracy_recovery_adapter "
        "model.compile model.dtype model.vae_dtype model.te_dtype model.vae_device model.te_device "
        "train.gradient_checkpointing train.unload_text_encoder train.single_item_batching "
        "network.layer_offloading",
        no_need(shared.PLANNED),
    ),
    ("train.cache_text_embeddings", no_need(shared.CACHED)),
    ("train.xformers train.sdp train.attention_backend", no_need("attention is always torch's fast one")),
    (
        "network.conv network.conv_alpha network.transformer_only network.lokr_full_rank network.lokr_factor "
        "network.old_lokr_format network.split_multistage_loras",
        no_need("has no effect on a plain LoRA of FLUX"),
    ),
    (
        "train.skip_first_sample train.force_first_sample sample.sample_start_step",
        no_need("samples are always drawn before the first step"),
    ),
    ("sample.sampler train.noise_scheduler", no_need("FLUX is trained and drawn with its own flow")),
    (
        "sample.format sample.ext sample.num_frames sample.fps sample.refiner_start_at "
        "sample.adapter_conditioning_scale",
        no_need("samples are single pictures, .png"),
    ),
    ("sample.walk_seed", no_need("the seed stays the same, so that only the training changes the picture")),
    ("save.save_format", no_need("it is always .safetensors, in the layout ComfyUI and Forge load")),
    ("save.dtype", no_need("checkpoints are bf16, adapters float32")),
    ("train.train_unet", missing("Only the transformer is trained", True)),
    (
        "train.content_or_style train.content_or_style_reg",
        missing("All noise levels are drawn alike; see timestep_sampling", "balanced"),
    ),
    ("train.loss_type", missing("The loss is always the mean squared error", "mse")),
    ("train.loss_target", missing("The loss is always FLUX's own", "noise")),
    ("train.switch_boundary_every train.num_train_timesteps", no_need("has no effect on FLUX")),
    ("train.ema_config.use_ema train.ema_config.ema_decay", _average),
    # --- not supported ---
    (
        "train.ema_config train.ema_config.use_feedback train.ema_config.param_multiplier",
        no_need("has no effect on the average"),
    ),
    (
        "train.train_text_encoder train.text_encoder_lr train.embedding_lr train.refiner_lr train.adapter_lr",
        missing("Text encoders are not trained: they are encoded once. Teach a word by trigger and captions"),
    ),
    (
        "network.network_kwargs.rank_dropout network.network_kwargs.module_dropout",
        missing(
            "An adapter's single values are dropped, by lora.dropout; a lower rank keeps from learning by heart too"
        ),
    ),
    ("model.lora_path", missing("Put it into the base first with `fluxpod merge`, and name that file as base")),
    ("model.inference_lora_path", missing("Samples are drawn with the trained adapter alone")),
    ("sample.neg", missing("FLUX draws without a negative prompt")),
    ("sample.network_multiplier", missing("Samples are drawn with the adapter as it is", 1)),
    ("sample.guidance_rescale sample.do_cfg_norm sample.extra_values", missing("Samples are drawn as FLUX does")),
    ("save.push_to_hub save.hf_repo_id save.hf_private", missing("Nothing is uploaded. Take output/ from the volume")),
    ("logging.use_wandb", missing(shared.WANDB)),
    ("train.min_denoising_steps", missing("All noise levels are trained; shift them with timestep_sampling")),
    (
        "train.max_denoising_steps",
        missing("All noise levels are trained; shift them with timestep_sampling", 999, 1000),
    ),
    ("train.start_step", missing("States of other tools cannot be read. Name its checkpoint as base")),
    (
        "train.bypass_guidance_embedding model.use_flux_cfg train.do_cfg train.do_random_cfg train.do_guidance_loss "
        "train.do_differential_guidance train.unconditional_prompt train.negative_prompt",
        missing("The guidance of FLUX stays as it is; leave it out"),
    ),
    (
        "train.differential_guidance_scale train.guidance_loss_target train.cfg_scale train.max_cfg_scale "
        "train.cfg_rescale train.max_negative_prompts",
        no_need("belongs to another kind of guidance"),
    ),
    (
        "train.noise_offset train.dynamic_noise_offset train.noise_multiplier train.random_noise_multiplier "
        "train.random_noise_shift train.blended_blur_noise train.force_consistent_noise train.match_noise_norm",
        missing("The noise is FLUX's own; leave it out", 1),
    ),
    (
        "train.optimal_noise_pairing_samples train.img_multiplier train.noisy_latent_multiplier "
        "train.latent_multiplier train.target_noise_multiplier train.pred_scaler",
        missing("Pictures and noise are used as they are; leave it out", 1),
    ),
    ("train.min_snr_gamma train.snr_gamma train.learnable_snr_gos", missing("All noise levels weigh the same")),
    (
        "train.weight_jitter train.do_paramiter_swapping train.train_turbo train.show_turbo_outputs train.free_u "
        "train.merge_network_on_save train.standardize_images train.standardize_latents train.correct_pred_norm "
        "train.do_prior_divergence",
        missing("An experiment that is not here; leave it out"),
    ),
    (
        "train.paramiter_swapping_factor train.correct_pred_norm_multiplier",
        no_need("belongs to an experiment that is not here"),
    ),
    (
        "train.diff_output_preservation train.blank_prompt_preservation train.inverted_mask_prior",
        missing("There is no such preservation; add pictures of the class to the dataset"),
    ),
    (
        "train.diff_output_preservation_multiplier train.diff_output_preservation_class "
        "train.blank_prompt_preservation_multiplier train.inverted_mask_prior_multiplier",
        no_need("belongs to a preservation that is not here"),
    ),
    ("train.prompt_dropout_prob", missing("Write it as caption_dropout")),
    ("train.short_and_long_captions train.prompt_saturation_chance", missing("Captions are used as they stand")),
    (
        "train.diffusion_feature_extractor_path train.latent_feature_extractor_path",
        missing("The loss is always the mean squared error"),
    ),
    (
        "train.diffusion_feature_extractor_weight train.latent_feature_loss_weight",
        no_need("belongs to a feature extractor"),
    ),
    ("model.unet_path model.refiner_name_or_path", missing("Name the whole model as base")),
    ("model.only_if_contains", missing("Write the layers as patterns in lora.targets")),
    ("model.model_kwargs", missing("The model is as published")),
)


def _sizes(value: Any) -> Outcome:
    written = value if isinstance(value, list) else [value]
    sizes = [resolution_of(each) for each in written]
    found = sorted({size for size in sizes if size is not None})
    if len(sizes) != sum(size is not None for size in sizes) or not found:
        return Outcome("not supported", "This is no size. Write resolution: 512 into the job by hand")
    return sets("resolution", found[0] if len(found) == 1 else found)


ROWS = rows(
    ("num_repeats", as_number_of("repeats", whole=True, usual=1)),
    ("default_caption", as_text("caption")),
    ("trigger_word", as_text("trigger")),
    ("resolution", _sizes),
    ("caption_ext caption_type", entries.caption_ending),
    ("cache_latents cache_latents_to_disk cache_text_embeddings", needless(shared.CACHED)),
    ("num_workers prefetch_factor persistent_workers gpu_prefetch_batches fast_image_size", needless(shared.LAUNCHED)),
    (
        "type buckets bucket_tolerance scale num_frames shrink_video_to_frames fps do_i2v do_audio "
        "auto_frame_count debug",
        needless("pictures are always sorted into sizes of their own proportions"),
    ),
    ("shuffle_tokens", as_switch("shuffle_tags")),
    ("keep_tokens", as_number_of("keep_tags", whole=True, usual=0, only_with="shuffle_tags")),
    ("caption_dropout_rate", as_number_of("caption_dropout")),
    ("token_dropout_rate", unsupported("Tags are not dropped; caption_dropout drops whole captions")),
    (
        "random_triggers random_triggers_max use_short_captions replacements",
        unsupported("Captions are used as they stand", 1),
    ),
    ("flip_x", as_switch("flip")),
    ("flip_y", unsupported("Pictures are mirrored left to right only: put flipped copies into the folder")),
    ("random_crop", as_switch("random_crops", 4, "at 4 places, since each is cached")),
    ("random_scale square_crop poi", unsupported("crop says which part of a picture is kept")),
    ("augments augmentations shuffle_augmentations standardize_images", unsupported("Pictures are used as they are")),
    ("mask_path", as_path("mask", "datasets")),
    ("alpha_mask", as_switch("mask", "alpha")),
    ("mask_min_value", as_number_of("mask_floor", usual=0, only_with="mask")),
    ("invert_mask", unsupported("White is what is learned: invert the masks", only_with="mask")),
    ("loss_multiplier", as_number_of("weight", usual=1)),
    ("network_weight", unsupported("The adapter works alike on all datasets", 1)),
    (
        "control_path control_path_1 control_path_2 control_path_3 controls inpaint_path unconditional_path "
        "clip_image_path",
        unsupported("Only plain FLUX is trained: there are no control pictures"),
    ),
    (
        "full_size_control_images control_transparent_color replay_transforms guidance_type extra_values",
        needless("belongs to control pictures"),
    ),
    ("is_reg", lambda value: Outcome(NOT_NEEDED, OFF) if is_off(value) else Outcome(MAPPED, "a dataset of its own")),
    ("prior_reg", unsupported("Regularisation images are a dataset with a weight here")),
)


def read_datasets(draft: Draft, datasets: Sequence[Any]) -> None:
    """The job's datasets. A trigger word of the process holds for each that has none of its own."""
    outer = {"trigger_word": draft.given["trigger_word"]} if "trigger_word" in draft.given else {}
    for place, dataset in enumerate(datasets):
        if not isinstance(dataset, Mapping):
            continue
        level = {name: Given(f"datasets[{place}].{name}", value) for name, value in dataset.items()}
        folders = [level.pop(name) for name in ("folder_path", "dataset_path") if name in level]
        folder = next((str(each.value) for each in folders if not is_empty(each.value)), "")
        regularising = "is_reg" in level and not is_off(level["is_reg"].value)
        path, remark = path_here(folder, "datasets")
        remark = remark or (entries.REGULARISING if regularising else "")
        more = _regularising(draft) if regularising else {}
        entries.entry_of(draft, (path, remark), [outer, level], ROWS, folders, more)
        draft.given |= {given.key: given for given in level.values() if given.key not in draft.fates}
    entries.tell_unused(draft, [outer], ROWS)
    draft.not_needed(["train.reg_weight"], "there are no regularisation images")
    if not draft.datasets:
        nowhere = ("datasets/my-pictures", "the source names no folder: write yours")
        entries.entry_of(draft, nowhere, [outer], ROWS, ())
    for entry in draft.datasets:
        entry.setdefault("resolution", 512)  # the source's default
    entries.join(draft)


def _regularising(draft: Draft) -> dict[str, Any]:
    weight = draft.number("train.reg_weight", 1)
    draft.mapped(["train.reg_weight"], f"datasets[].weight: {weight:g}")
    return {"weight": weight} if weight != 1 else {}
