"""The dimensions of a FLUX transformer, and what follows from them: tensors, parameters, floating-point operations.

FLUX.1 (dev, schnell, Krea, depth-pruned ones) is one architecture with a few sizes; everything that plans, converts or
checks a model asks a ``FluxShape``, never a model's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TIME_FREQUENCIES = 256  # width of the sinusoidal embedding of time and guidance, fixed in the architecture
MLP_RATIO = 4


@dataclass(frozen=True)
class FluxShape:
    """Sizes as in diffusers' ``FluxTransformer2DModel`` configuration; the defaults are FLUX.1-dev's."""

    double_blocks: int = 19
    single_blocks: int = 38
    heads: int = 24
    head_size: int = 128
    text_size: int = 4096  # width of a T5 token
    pooled_size: int = 768  # width of the pooled CLIP output
    channels: int = 64  # 16 latent channels x 2 x 2 pixels of a patch
    guidance: bool = True
    rope_axes: tuple[int, int, int] = (16, 56, 56)

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FluxShape:
        """From a diffusers ``config.json``; keys it leaves out have that class's own defaults."""
        return cls(
            double_blocks=config.get("num_layers", 19),
            single_blocks=config.get("num_single_layers", 38),
            heads=config.get("num_attention_heads", 24),
            head_size=config.get("attention_head_dim", 128),
            text_size=config.get("joint_attention_dim", 4096),
            pooled_size=config.get("pooled_projection_dim", 768),
            channels=config.get("in_channels", 64),
            guidance=config.get("guidance_embeds", False),
            rope_axes=tuple(config.get("axes_dims_rope", (16, 56, 56))),
        )

    @classmethod
    def from_config_file(cls, path: Path) -> FluxShape:
        return cls.from_config(json.loads(path.read_text(encoding="utf-8")))

    def config(self) -> dict[str, Any]:
        """The arguments of ``FluxTransformer2DModel``."""
        return {
            "patch_size": 1,
            "in_channels": self.channels,
            "out_channels": None,
            "num_layers": self.double_blocks,
            "num_single_layers": self.single_blocks,
            "attention_head_dim": self.head_size,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text_size,
            "pooled_projection_dim": self.pooled_size,
            "guidance_embeds": self.guidance,
            "axes_dims_rope": list(self.rope_axes),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the diffusers model by name, with its shape, in the model's own order."""
        w, mlp = self.width, MLP_RATIO * self.width
        shapes: dict[str, tuple[int, ...]] = {}

        def linear(name: str, out: int, size: int) -> None:
            shapes[f"{name}.weight"] = (out, size)
            shapes[f"{name}.bias"] = (out,)

        embedders = {"timestep_embedder": TIME_FREQUENCIES}
        if self.guidance:
            embedders["guidance_embedder"] = TIME_FREQUENCIES
        embedders["text_embedder"] = self.pooled_size
        for name, size in embedders.items():
            linear(f"time_text_embed.{name}.linear_1", w, size)
            linear(f"time_text_embed.{name}.linear_2", w, w)
        linear("context_embedder", w, self.text_size)
        linear("x_embedder", w, self.channels)
        for i in range(self.double_blocks):
            block = f"transformer_blocks.{i}"
            linear(f"{block}.norm1.linear", 6 * w, w)
            linear(f"{block}.norm1_context.linear", 6 * w, w)
            for norm in ("norm_q", "norm_k"):
                shapes[f"{block}.attn.{norm}.weight"] = (self.head_size,)
            for projection in ("to_q", "to_k", "to_v", "to_out.0"):
                linear(f"{block}.attn.{projection}", w, w)
            for norm in ("norm_added_q", "norm_added_k"):
                shapes[f"{block}.attn.{norm}.weight"] = (self.head_size,)
            for projection in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
                linear(f"{block}.attn.{projection}", w, w)
            for ff in ("ff", "ff_context"):
                linear(f"{block}.{ff}.net.0.proj", mlp, w)
                linear(f"{block}.{ff}.net.2", w, mlp)
        for i in range(self.single_blocks):
            block = f"single_transformer_blocks.{i}"
            linear(f"{block}.norm.linear", 3 * w, w)
            linear(f"{block}.proj_mlp", mlp, w)
            linear(f"{block}.proj_out", w, w + mlp)
            for norm in ("norm_q", "norm_k"):
                shapes[f"{block}.attn.{norm}.weight"] = (self.head_size,)
            for projection in ("to_q", "to_k", "to_v"):
                linear(f"{block}.attn.{projection}", w, w)
        linear("norm_out.linear", 2 * w, w)
        linear("proj_out", self.channels, w)
        return shapes

    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors().values())

    @property
    def blocks(self) -> int:
        """Transformer blocks of both kinds."""
        return self.double_blocks + self.single_blocks

    def parameters_of_blocks(self) -> tuple[int, ...]:
        """Parameters of each transformer block, in the model's order."""
        return _parameters_of_blocks(self)

    def parameters_of_spread(self, count: int) -> int:
        """Parameters of ``count`` blocks, spread evenly over all."""
        return _parameters_of_spread(self, count)

    def block_parameters(self) -> int:
        """Parameters of the largest block, a double one: what sharded training gathers at a time."""
        return self.parameters_of_blocks()[0]

    def forward_flops(self, width: int, height: int, text_tokens: int) -> float:
        """Floating-point operations of one forward of one image of ``width`` x ``height`` pixels.

        Two per multiply-add. Linear layers: weights x tokens that pass through them; attention: 4 S^2 width per layer.
        FLUX.1-dev with 512 text tokens: 21.5e12 at 512 px, 74.4e12 at 1024 px.
        """
        w = self.width
        image = (width // 16) * (height // 16)
        tokens = image + text_tokens
        per_stream = 2 * (4 + 2 * MLP_RATIO) * w * w  # q k v out + two feed-forward matrices
        double = self.double_blocks * per_stream * tokens
        single = self.single_blocks * per_stream * tokens  # q k v + mlp in, (attention | mlp) out: the same count
        attention = (self.double_blocks + self.single_blocks) * 4 * tokens**2 * w
        modulation = 2 * w * w * (12 * self.double_blocks + 3 * self.single_blocks)
        return float(double + single + attention + modulation)


@cache
def _parameters_of_blocks(shape: FluxShape) -> tuple[int, ...]:
    tensors = shape.tensors().items()
    double = sum(math.prod(s) for n, s in tensors if n.startswith("transformer_blocks.0."))
    single = sum(math.prod(s) for n, s in tensors if n.startswith("single_transformer_blocks.0."))
    return (double,) * shape.double_blocks + (single,) * shape.single_blocks


@cache
def _parameters_of_spread(shape: FluxShape, count: int) -> int:
    """Kept: a plan that looks for what fits asks hundreds of thousands of times."""
    sizes = shape.parameters_of_blocks()
    return sum(sizes[number] for number in spread(count, len(sizes)))


def spread(count: int, blocks: int) -> tuple[int, ...]:
    """``count`` of so many blocks, as evenly as can be: what streams in for them then has the longest time to come."""
    return tuple((2 * i + 1) * blocks // (2 * count) for i in range(count))


def shift_of_tokens(tokens: int) -> float:
    """FLUX's shift of noise levels for an image of ``tokens`` patches: e**mu, mu linear from 0.5 at 256 to 1.15 at 4096
    tokens.

    1.878 at 512 px, 3.158 at 1024 px. The formula is that of BFL's sampling code and of diffusers' scheduler.
    """
    return math.exp(0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256))
