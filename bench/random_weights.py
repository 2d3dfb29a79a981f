"""A FLUX of any size with seeded random weights, for what is measured and not looked at."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from bootstrap.flux_shape import FluxShape
from bootstrap.flux_tiny import new_transformer

SEED = 20240801


def make_transformer(shape: FluxShape) -> Any:
    """The ``FluxTransformer2DModel``, in bf16."""
    model = new_transformer(shape)
    # Modulation and the last layer start small: gates near 0.3 and a prediction of spread 0.3, so that the loss of
    # an untrained model, E|noise - latent - prediction|^2, is about 1 (noise) + 1 (latent) + 0.1.
    _fill(model, SEED, gains={"norm1.linear": 0.3, "norm1_context.linear": 0.3, "norm.linear": 0.3, "proj_out": 0.3})
    return model.to(torch.bfloat16)


def _fill(model: nn.Module, seed: int, gains: dict[str, float] | None = None) -> None:
    """Fills every parameter from ``seed``, in name order.

    Matrices and kernels: normal, 1/sqrt(inputs) x the gain of the module whose name ends so. Embeddings: 0.5. Biases:
    0.02. Norm weights: 1 + 0.05. No two tensors are equal, so that a swapped pair is noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            module = name.rpartition(".")[0]
            noise = torch.empty_like(parameter).normal_(generator=generator)
            if name.endswith("bias"):
                noise *= 0.02
            elif parameter.dim() == 1:
                noise = 1 + 0.05 * noise
            elif isinstance(model.get_submodule(module), nn.Embedding):
                noise *= 0.5
            else:
                gain = next((g for suffix, g in (gains or {}).items() if module.endswith(suffix)), 1.0)
                noise *= gain / math.sqrt(parameter[0].numel())
            parameter.copy_(noise)
