"""What someone may have meant by a key that does not exist."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from jobs.schema import Job, Section

# Names of the same thing in the tools people come from (kohya_ss, ai-toolkit, diffusion-pipe, OneTrainer, diffusers).
_OTHER_NAMES = {
    "name": "output_name job_name project_name run_name config_name",
    "base": "model base_model model_name pretrained_model_name_or_path name_or_path model_path checkpoint unet "
    "diffusers_path transformer_path ckpt",
    "vae": "ae vae_path",
    "text_encoders.clip": "clip_l clip_path clip",
    "text_encoders.t5": "t5xxl t5_path t5",
    "method": "type training_method adapter network_module train_type",
    "lora": "network adapter_config",
    "lora.rank": "network_dim network_rank dim r linear lora_rank",
    "lora.alpha": "network_alpha linear_alpha lora_alpha",
    "lora.targets": "target_modules lora_layers only_if_contains",
    "lora.dora": "use_dora dora_wd",
    "lora.rslora": "use_rslora rs_lora",
    "lora.dropout": "network_dropout lora_dropout",
    "lora.start": "network_weights pretrained_lora_path init_lora resume_from_lora",
    "assistant_lora": "assistant_lora_path training_adapter assistant",
    "datasets": "dataset data directory concepts",
    "datasets[].path": "train_data_dir image_dir folder_path folder dataset_path instance_data_dir directory_path dir",
    "datasets[].repeats": "num_repeats repeat",
    "datasets[].trigger": "trigger_word instance_prompt class_tokens",
    "datasets[].caption": "default_caption",
    "datasets[].prefix": "caption_prefix",
    "datasets[].suffix": "caption_suffix",
    "datasets[].multiline": "enable_multiline",
    "datasets[].wildcards": "enable_wildcard wildcard",
    "datasets[].shuffle_tags": "shuffle_caption shuffle_tokens tag_shuffle",
    "datasets[].keep_tags": "keep_tokens",
    "datasets[].random_crops": "random_crop",
    "datasets[].flip": "flip_aug flip_x random_flip horizontal_flip",
    "datasets[].weight": "prior_loss_weight loss_weight",
    "steps": "max_train_steps train_steps num_steps max_steps num_train_steps total_steps iterations",
    "epochs": "max_train_epochs num_train_epochs num_epochs epoch",
    "images_per_step": "batch_size train_batch_size global_batch_size micro_batch_size_per_gpu batch "
    "gradient_accumulation_steps gradient_accumulation",
    "resolution": "max_resolution image_size size resolutions",
    "bucket_step": "bucket_reso_steps",
    "upscale": "bucket_no_upscale enable_upscale",
    "learning_rate": "lr unet_lr max_lr lr_rate",
    "schedule": "lr_scheduler scheduler lr_scheduler_type learning_rate_scheduler",
    "schedule_args": "lr_scheduler_args lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_params",
    "warmup": "lr_warmup_steps warmup_steps lr_warmup learning_rate_warmup_steps num_warmup_steps",
    "optimizer": "optimizer_type optim",
    "optimizer_args": "optimizer_params optimizer_kwargs betas",
    "weight_decay": "decay adam_weight_decay",
    "max_grad_norm": "gradient_clipping clip_grad_norm grad_clip clip_grad",
    "timestep_sampling": "timestep_type timestep_sample_method weighting_scheme timestep_distribution",
    "discrete_flow_shift": "shift flow_shift timestep_shift",
    "sigmoid_scale": "logit_std",
    "guidance": "training_guidance",
    "sample.guidance": "guidance_scale cfg_scale cfg",
    "t5_mask": "apply_t5_attn_mask t5_attn_mask t5_attention_mask",
    "caption_dropout": "caption_dropout_rate caption_dropout_p text_dropout",
    "save.every": "save_every save_every_n_steps save_steps save_every_n_epochs checkpointing_steps "
    "checkpoint_every_n_minutes save_every_n_train_steps",
    "save.weights": "save_last_n_steps save_last_n_epochs max_step_saves_to_keep checkpoints_total_limit",
    "save.states": "save_last_n_steps_state save_last_n_epochs_state save_state",
    "ema": "use_ema ema_config",
    "ema.decay": "ema_decay",
    "sample.every": "sample_every sample_every_n_steps sample_every_n_epochs sample_steps validation_steps",
    "sample.prompts": "sample_prompts sample_prompt validation_prompt validation_prompts",
    "sample.prompts_file": "sample_prompts_file prompt_file validation_prompts_file",
    "gpus": "num_gpus num_processes gpu gpu_count devices",
    "plan.checkpointing": "gradient_checkpointing activation_checkpointing",
    "plan.optimizer_in_backward": "fused_backward_pass blockwise_fused_optimizers fused_back_pass",
    "plan.optimizer_states": "offload_optimizer",
    "plan.compile": "torch_compile",
}
_KNOWN_ELSEWHERE = {name: ours for ours, names in _OTHER_NAMES.items() for name in names.split()}

_NOT_NEEDED = {
    **dict.fromkeys(
        ("mixed_precision", "precision", "dtype", "full_bf16", "train_dtype"),
        "training is in bf16 with stochastic rounding",
    ),
    **dict.fromkeys(("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs"), "everything is cached"),
    **dict.fromkeys(
        ("model_prediction_type", "prediction_type", "loss_type"), "it is always the one FLUX was trained with (raw)"
    ),
    **dict.fromkeys(("output_dir", "output_folder", "save_root", "training_folder"), "results are in runs/<name>/"),
}


def sections(kind: type[Section] = Job, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every group of keys of a job: "", "lora", "datasets[]", ..."""
    yield prefix, kind
    for name, field in kind.model_fields.items():
        many, inner = section_of(field.annotation)
        if inner is not None:
            path = f"{prefix}.{name}" if prefix else name
            yield from sections(inner, path + "[]" * many)


def section_of(annotation: Any) -> tuple[bool, type[Section] | None]:
    """The group of keys a field holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, Section):
        return False, annotation
    if get_origin(annotation) in (types.UnionType, tuple):
        for each in get_args(annotation):
            many, inner = section_of(each)
            if inner is not None:
                return get_origin(annotation) is tuple or many, inner
    return False, None


_KEYS: dict[str, tuple[str, ...]] = {prefix: tuple(kind.model_fields) for prefix, kind in sections()}


def remedy(group: str, name: str) -> tuple[str, str]:
    """What to do about the unknown key ``name`` in ``group`` ("", "lora", "datasets[]"), and the key that is meant
    ("" where there is no telling)."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    near = difflib.get_close_matches(plain, _KEYS[group], n=1, cutoff=0.75)
    if near:
        return f"Did you mean {near[0]}?", near[0]
    homes = [prefix for prefix, keys in _KEYS.items() if plain in keys]
    homes = [home for home in homes if not any(home.startswith(f"{outer}.") for outer in homes)]
    if homes:
        return f"{plain} belongs {' or '.join(_under(home) for home in homes)}", ""
    if plain in _KNOWN_ELSEWHERE:
        return _called(group, _KNOWN_ELSEWHERE[plain])
    if plain in _NOT_NEEDED:
        return f"Delete the line, it is not needed: {_NOT_NEEDED[plain]}", ""
    far = {key: prefix for prefix, keys in _KEYS.items() for key in keys}
    near = difflib.get_close_matches(plain, far, n=1, cutoff=0.75)
    if near:
        return f"Did you mean {near[0]}, which belongs {_under(far[near[0]])}?", ""
    return f"Delete it, or use one of {', '.join(_KEYS[group])}", ""


def _under(home: str) -> str:
    if home == "datasets[]":
        return "under datasets:, beside the path of a folder"
    return f"under {home}:" if home else "at the outermost level, not indented"


def _called(group: str, ours: str) -> tuple[str, str]:
    home, _, key = ours.rpartition(".")
    if home == group:
        return f"Here it is called {key}", key
    return f"Here it is called {key}, {_under(home)}", ""
