"""What CLIP, T5 and the VAE consist of: every tensor with its shape, from a configuration, and the other way round.

The configurations are those of transformers' ``CLIPTextModel`` and ``T5EncoderModel`` and diffusers' ``AutoencoderKL``.
The names are theirs too; of CLIP without the ``text_model.`` that files put before them, old ones and ComfyUI's alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

Part = Literal["clip", "t5", "vae"]
Shapes = Mapping[str, tuple[int, ...]]

CLIP_PREFIX = "text_model."
# What files may hold besides, and what becomes of it: nothing. The last is the first line of T5, under a second name.
WITHOUT_EFFECT: dict[Part, tuple[str, ...]] = {
    "clip": ("embeddings.position_ids", "text_projection.weight", "logit_scale"),
    "t5": ("encoder.embed_tokens.weight",),
    "vae": (),
}


def plain_names(part: Part, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The tensors of a file under the names used here, without those that have no effect."""
    cut = {name.removeprefix(CLIP_PREFIX) if part == "clip" else name: shape for name, shape in shapes.items()}
    return {name: shape for name, shape in cut.items() if name not in WITHOUT_EFFECT[part]}


def tensors_of(part: Part, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the part with its shape. Raises KeyError where the configuration says too little."""
    return {"clip": clip_tensors, "t5": t5_tensors, "vae": vae_tensors}[part](config)


def _linear(shapes: dict[str, tuple[int, ...]], name: str, *size: int) -> None:
    shapes[f"{name}.weight"], shapes[f"{name}.bias"] = size, size[:1]


# ---- CLIP


def clip_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    config = config.get("text_config", config)
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.token_embedding.weight": (config["vocab_size"], width),
        "embeddings.position_embedding.weight": (config["max_position_embeddings"], width),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layers.{i}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            _linear(shapes, f"{layer}.self_attn.{name}", width, width)
        _linear(shapes, f"{layer}.mlp.fc1", inner, width)
        _linear(shapes, f"{layer}.mlp.fc2", width, inner)
        for name in ("layer_norm1", "layer_norm2"):
            _linear(shapes, f"{layer}.{name}", width)
    _linear(shapes, "final_layer_norm", width)
    return shapes


def clip_config(shapes: Shapes, beside: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the number of heads stands in the shapes: it is ``beside``'s, or the size is CLIP's own (heads of
    64). Raises KeyError, ValueError."""
    vocabulary, width = shapes["embeddings.token_embedding.weight"]
    heads = beside.get("num_attention_heads") or (width // 64 if width in (512, 768, 1024, 1280) else None)
    if heads is None:
        raise ValueError(f"the number of heads of a CLIP {width} wide is not known")
    return {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "projection_dim": width,
        "intermediate_size": shapes["encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, r"encoder\.layers\.(\d+)\."),
        "num_attention_heads": heads,
        "max_position_embeddings": shapes["embeddings.position_embedding.weight"][0],
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
        "pad_token_id": 1,
    }


# ---- T5


def t5_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, heads = config["d_model"], config["d_kv"] * config["num_heads"], config["num_heads"]
    buckets = config.get("relative_attention_num_buckets", 32)
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (config["vocab_size"], width)}
    for i in range(config["num_layers"]):
        attention, forward = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        for name in ("q", "k", "v"):
            shapes[f"{attention}.SelfAttention.{name}.weight"] = (inner, width)
        shapes[f"{attention}.SelfAttention.o.weight"] = (width, inner)
        if i == 0:
            shapes[f"{attention}.SelfAttention.relative_attention_bias.weight"] = (buckets, heads)
        for name in ("wi_0", "wi_1"):
            shapes[f"{forward}.DenseReluDense.{name}.weight"] = (config["d_ff"], width)
        shapes[f"{forward}.DenseReluDense.wo.weight"] = (width, config["d_ff"])
        shapes[f"{attention}.layer_norm.weight"] = shapes[f"{forward}.layer_norm.weight"] = (width,)
    shapes["encoder.final_layer_norm.weight"] = (width,)
    return shapes


def t5_config(shapes: Shapes, beside: Mapping[str, Any]) -> dict[str, Any]:
    """All of it stands in the shapes. Raises KeyError, ValueError."""
    vocabulary, width = shapes["shared.weight"]
    block = "encoder.block.0.layer"
    buckets, heads = shapes[f"{block}.0.SelfAttention.relative_attention_bias.weight"]
    return {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shapes[f"{block}.0.SelfAttention.q.weight"][0] // heads,
        "d_ff": shapes[f"{block}.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": _count(shapes, r"encoder\.block\.(\d+)\."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


# ---- VAE


def vae_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    widths, layers, latent = list(config["block_out_channels"]), config["layers_per_block"], config["latent_channels"]
    shapes: dict[str, tuple[int, ...]] = {}

    def resnet(name: str, size: int, out: int) -> None:
        for number, into in ((1, size), (2, out)):
            _linear(shapes, f"{name}.norm{number}", into)
            _linear(shapes, f"{name}.conv{number}", out, into, 3, 3)
        if size != out:
            _linear(shapes, f"{name}.conv_shortcut", out, size, 1, 1)

    def side(name: str, blocks: str, order: list[int], depth: int, change: str, last: int) -> None:
        size = order[0]
        for i, out in enumerate(order):
            for j in range(depth):
                resnet(f"{name}.{blocks}.{i}.resnets.{j}", size if j == 0 else out, out)
            if i + 1 < len(order):
                _linear(shapes, f"{name}.{blocks}.{i}.{change}.0.conv", out, out, 3, 3)
            size = out
        middle = widths[-1]
        for j in (0, 1):
            resnet(f"{name}.mid_block.resnets.{j}", middle, middle)
        for projection in ("to_q", "to_k", "to_v", "to_out.0"):
            _linear(shapes, f"{name}.mid_block.attentions.0.{projection}", middle, middle)
        _linear(shapes, f"{name}.mid_block.attentions.0.group_norm", middle)
        _linear(shapes, f"{name}.conv_norm_out", order[-1])
        _linear(shapes, f"{name}.conv_out", last, order[-1], 3, 3)

    _linear(shapes, "encoder.conv_in", widths[0], config.get("in_channels", 3), 3, 3)
    side("encoder", "down_blocks", widths, layers, "downsamplers", 2 * latent)
    _linear(shapes, "decoder.conv_in", widths[-1], latent, 3, 3)
    side("decoder", "up_blocks", widths[::-1], layers + 1, "upsamplers", config.get("out_channels", 3))
    if config.get("use_quant_conv", True):
        _linear(shapes, "quant_conv", 2 * latent, 2 * latent, 1, 1)
    if config.get("use_post_quant_conv", True):
        _linear(shapes, "post_quant_conv", latent, latent, 1, 1)
    return shapes


def vae_config(shapes: Shapes, beside: Mapping[str, Any]) -> dict[str, Any]:
    """FLUX's, with the sizes that stand in the shapes; the number of groups does not: it is ``beside``'s, or 32.

    Raises KeyError, ValueError.
    """
    blocks = _count(shapes, r"encoder\.down_blocks\.(\d+)\.")
    widths = [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(blocks)]
    groups = beside.get("norm_num_groups", 32)
    if not widths or any(width % groups for width in widths):
        raise ValueError(f"the number of groups of a VAE with {widths} channels is not known")
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
        "block_out_channels": widths,
        "layers_per_block": _count(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "norm_num_groups": groups,
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "force_upcast": True,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }


def vae_in_bfl(name: str, blocks: int) -> str:
    """The name that ``ae.safetensors`` of Black Forest Labs gives a tensor of ``AutoencoderKL`` with that many blocks.

    Decoder blocks are counted from the other end there, and the attention's matrices are 1 x 1 convolutions.
    """
    name = re.sub(r"\.mid_block\.resnets\.(\d)", lambda found: f".mid.block_{int(found[1]) + 1}", name)
    name = re.sub(r"\.mid_block\.attentions\.0\.(to_)?(group_)?", ".mid.attn_1.", name)
    name = name.replace(".mid.attn_1.out.0.", ".mid.attn_1.proj_out.")
    name = re.sub(r"\.down_blocks\.(\d)\.resnets\.", r".down.\1.block.", name)
    name = re.sub(r"\.down_blocks\.(\d)\.downsamplers\.0\.", r".down.\1.downsample.", name)
    name = re.sub(r"\.up_blocks\.(\d)\.", lambda found: f".up.{blocks - 1 - int(found[1])}.", name)
    name = re.sub(r"(\.up\.\d)\.resnets\.", r"\1.block.", name).replace(".upsamplers.0.", ".upsample.")
    return name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def is_bfl_vae(shapes: Shapes) -> bool:
    return any(name.startswith("encoder.down.") for name in shapes)


def _count(shapes: Shapes, pattern: str) -> int:
    return len({found[1] for name in shapes if (found := re.match(pattern, name))})


CONFIG_OF: dict[Part, Callable[[Shapes, Mapping[str, Any]], dict[str, Any]]] = {
    "clip": clip_config,
    "t5": t5_config,
    "vae": vae_config,
}
