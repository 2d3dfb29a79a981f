"""Adapters with random numbers, and what a file of them adds to each weight, told by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from bootstrap.estimate import linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.layout import placements
from bootstrap.lora_file import Adapter, LowRank, tensors_of
from bootstrap.lora_targets import target_layers

SMALL = FluxShape(
    double_blocks=2,
    single_blocks=1,
    heads=2,
    head_size=16,
    text_size=24,
    pooled_size=12,
    channels=16,
    rope_axes=(4, 6, 6),
)
TARGETS: dict[str, Any] = {
    "all-linear": "all-linear",
    "attention+feed-forward": "attention+feed-forward",
    "attention": "attention",
    "some of a fused matrix": ("*.attn.to_k", "*.attn.add_v_proj", "single_transformer_blocks.0.proj_mlp"),
    "the last modulation": ("norm_out.linear",),
}


def make_adapter(
    shape: FluxShape = SMALL,
    targets: str | Sequence[str] = "all-linear",
    rank: Callable[[str], int] = lambda _: 4,
    scale: Callable[[str], float] = lambda _: 1.0,
    dora: bool = False,
    device: str = "cpu",
) -> Adapter:
    """With random numbers in both halves, as after some training."""
    sizes = linear_layers(shape)
    generator = torch.Generator().manual_seed(7)

    def random(*size: int) -> torch.Tensor:
        if device != "cpu":
            return torch.empty(size, device=device)
        return torch.randn(size, generator=generator)

    return {
        name: LowRank(
            random(rank(name), sizes[name][1]),
            random(sizes[name][0], rank(name)),
            scale(name),
            random(sizes[name][0]).abs() if dora else None,
        )
        for name in target_layers(list(sizes), targets)
    }


def write_lora(path: Path, shape: FluxShape = SMALL, dora: bool = False) -> Path:
    """A file in kohya's layout of an adapter, of rank 3, on every linear layer, strong enough to be seen."""
    save_file(tensors_of(make_adapter(shape, rank=lambda _: 3, scale=lambda _: 0.01, dora=dora), "kohya"), path)
    return path


def seem_trained(model: nn.Module, size: float) -> dict[str, torch.Tensor]:
    """The trained tensors of a model's adapter, with random numbers in both matrices; lengths stay."""
    generator = torch.Generator().manual_seed(7)
    tensors = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in tensors.items():
        if "magnitude" not in name:
            tensor.copy_(size * torch.randn(tensor.shape, generator=generator))
    return tensors


def bfl_products(adapter: Mapping[str, LowRank], shape: FluxShape) -> dict[str, torch.Tensor]:
    """What the adapter adds to each tensor of BFL's layout that it changes."""
    found: dict[str, torch.Tensor] = {}
    rows = {}
    for places in placements(shape).values():
        for place in places:
            rows[place.file_name] = max(rows.get(place.file_name, 0), place.file_first + place.count)
    for name, each in adapter.items():
        product = each.scale * (each.up.double() @ each.down.double())
        for place in placements(shape)[f"{name}.weight"]:
            whole = found.setdefault(
                place.file_name, torch.zeros(rows[place.file_name], product.shape[1], dtype=torch.float64)
            )
            part = product[place.first : place.first + place.count]
            whole[place.file_first : place.file_first + place.count] = part
    return found


def kohya_products(file: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """What a file of kohya's adds to each of BFL's tensors: alpha / rank * up @ down, as every tool reads it."""
    products = {}
    for name in names:
        key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        if f"{key}.lora_up.weight" in file:
            up, down = file[f"{key}.lora_up.weight"].double(), file[f"{key}.lora_down.weight"].double()
            products[name] = file[f"{key}.alpha"].double() / down.shape[0] * (up @ down)
    return products
