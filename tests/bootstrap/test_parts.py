"""What the parts consist of is what their libraries' classes hold, at real size, by names and shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bootstrap.parts import CONFIG_OF, Part, plain_names, tensors_of, vae_in_bfl

FLUX_VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def real(part: Part) -> Any:
    """The part as FLUX.1 has it, without memory."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    with torch.device("meta"):
        if part == "vae":
            return AutoencoderKL(**FLUX_VAE)
        if part == "clip":
            return CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))
        size = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
        return T5EncoderModel(T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **size))


@pytest.mark.parametrize(("part", "count"), [("clip", 196), ("t5", 219), ("vae", 244)])
def test_names_and_shapes(part: Part, count: int) -> None:
    model = real(part)
    held = plain_names(part, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    config = json.loads(model.config.to_json_string()) if part != "vae" else dict(model.config)
    assert tensors_of(part, config) == held
    assert len(held) == count
    told = CONFIG_OF[part](held, {})
    assert tensors_of(part, told) == held
    for key in ("hidden_act", "layer_norm_eps", "num_attention_heads", "eos_token_id", "num_heads", "d_kv"):
        assert key not in told or told[key] == config[key]


def test_the_names_of_ae_safetensors_are_those_that_diffusers_reads() -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    held = real("vae").state_dict()
    named = {
        vae_in_bfl(name, 4): tensor[:, :, None, None] if ".attentions.0.to_" in name and tensor.dim() == 2 else tensor
        for name, tensor in held.items()
    }
    assert {"encoder.down.0.downsample.conv.weight", "decoder.up.3.block.0.norm1.weight"} <= named.keys()
    back = convert_ldm_vae_checkpoint(named, FLUX_VAE)
    assert {name: tensor.shape for name, tensor in back.items()} == {name: t.shape for name, t in held.items()}
