"""The JSON of the kohya_ss GUI: sd-scripts' arguments under names of its own, and some keys of the GUI alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.convert import shared
from jobs.convert.draft import Given, Table, missing, no_need
from jobs.convert.sd_scripts import expanded, literal, put

_SAME = {
    "max_resolution": "resolution",
    "optimizer": "optimizer_type",
    "image_folder": "train_data_dir",
    "flux1_clip_l": "clip_l",
    "flux1_t5xxl": "t5xxl",
    "flux1_cache_text_encoder_outputs": "cache_text_encoder_outputs",
    "flux1_cache_text_encoder_outputs_to_disk": "cache_text_encoder_outputs_to_disk",
    "flux_fused_backward_pass": "fused_backward_pass",
}
_NETWORK_ARGS = (
    "train_blocks split_qkv train_t5xxl img_attn_dim img_mlp_dim img_mod_dim single_dim txt_attn_dim txt_mlp_dim "
    "txt_mod_dim single_mod_dim in_dims train_double_block_indices train_single_block_indices ggpo_sigma ggpo_beta "
    "rank_dropout module_dropout"
)
_RENAMED = _SAME | {name: f"network_args.{name}" for name in _NETWORK_ARGS.split()}
# Of other models, though FLUX has a key of that name: told apart by the key of FLUX's own beside it.
_RIVALS = {"flux1_clip_l": "clip_l", "flux1_t5xxl": "t5xxl", "flux_fused_backward_pass": "fused_backward_pass"}
# The GUI hands these on for SD3 only, whatever stands there.
_SD3_ONLY = ("weighting_scheme", "logit_mean", "logit_std", "mode_scale")


def given_in(document: Mapping[str, Any]) -> tuple[dict[str, Given], list[Given]]:
    """The keys by sd-scripts' names, and those that another of the same name replaces."""
    given: dict[str, Given] = {}
    replaced: list[Given] = []
    others = {rival for own, rival in _RIVALS.items() if own in document}
    for key, value in document.items():
        name = f"other.{key}" if key in others or key in _SD3_ONLY else _RENAMED.get(key, key)
        put(given, name, Given(key, value), replaced)
    for name, value in _arguments(str(document.get("additional_parameters") or "")).items():
        put(given, name, Given(f"additional_parameters: --{name}", value), replaced)
        given.pop("additional_parameters", None)
    ggpo = bool(document.get("train_lora_ggpo"))
    unset = {name for name, each in given.items() if _is_unset(name, each.value, ggpo)}
    given = {f"unset.{name}" if name in unset else name: each for name, each in given.items()}
    return expanded(given, replaced), replaced


def _is_unset(name: str, value: Any, ggpo: bool) -> bool:
    """A rank, or another option of the adapter, that the GUI shows and does not hand on. "0" it does."""
    option = name.removeprefix("network_args.")
    return option != name and (not value or (option.startswith("ggpo") and not ggpo))


def _arguments(text: str) -> dict[str, Any]:
    """ "--a 1 --b" as {"a": 1, "b": True}; several values are a list."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in text.split():
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").replace("-", "_").partition("=")
            found[name] = [value] if value else []
        elif name:
            found[name].append(word)
    values = {name: [word.strip("\"'") for word in words] for name, words in found.items()}
    return {
        name: True if not words else literal(words[0]) if len(words) == 1 else words for name, words in values.items()
    }


_SD = "belongs to another model than FLUX"
TABLE: Table = (
    ("save_as_bool training_preset headless print_only", no_need("is a state of the GUI")),
    (
        "sdxl_cache_text_encoder_outputs sdxl_no_half_vae sd3_cache_text_encoder_outputs "
        "sd3_cache_text_encoder_outputs_to_disk sd3_fused_backward_pass sd3_clip_l sd3_clip_l_dropout_rate "
        "sd3_disable_mmap_load_safetensors sd3_enable_scaled_pos_embed sd3_t5_dropout_rate sd3_t5xxl "
        "sd3_text_encoder_batch_size clip_g clip_g_dropout_rate pos_emb_random_crop_rate save_clip save_t5xxl "
        "t5xxl_device t5xxl_dtype other.clip_l other.t5xxl other.fused_backward_pass other.weighting_scheme "
        "other.logit_mean other.logit_std other.mode_scale",
        no_need(_SD),
    ),
    (" ".join(f"unset.network_args.{name}" for name in _NETWORK_ARGS.split()), no_need("is empty, or off")),
    (
        "LyCORIS_preset bypass_mode constrain conv_alpha conv_block_alphas conv_block_dims conv_dim "
        "decompose_both dora_wd factor rank_dropout_scale rescaled train_norm train_on_input unit use_cp "
        "use_scalar use_tucker block_alphas block_dims block_lr_zero_threshold down_lr_weight mid_lr_weight "
        "up_lr_weight enable_all_linear",
        no_need("belongs to another kind of adapter than a plain LoRA of FLUX"),
    ),
    ("train_lora_ggpo", missing("There is no GGPO; leave it out")),
    (
        "caption_metadata_filename latent_metadata_filename create_caption create_buckets full_path use_latent_files "
        "train_dir batch_size",
        no_need("captions are read from beside the pictures, and pictures are sorted at the start"),
    ),
    ("use_wandb", missing(shared.WANDB)),
)
