"""The mathematics of flow matching as FLUX was trained: noise levels, mixing, patches. Pure functions.

A noise level sigma of 1 is pure noise, 0 the clean latent: x = (1 - sigma) latent + sigma noise, and the model predicts
the velocity noise - latent.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from bootstrap.flux_shape import shift_of_tokens

TimestepSampling = Literal["flux_shift", "shift", "sigmoid", "uniform"]


def shifted(sigma: float, shift: float) -> float:
    """Moves a level in (0, 1) towards noise: shift 1 changes nothing, 3 makes the middle 0.75."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def noise_level(
    generator: np.random.Generator,
    sampling: TimestepSampling,
    tokens: int,
    *,
    discrete_flow_shift: float,
    sigmoid_scale: float,
) -> float:
    """One sigma in (0, 1) for an image of ``tokens`` patches."""
    if sampling == "uniform":
        return float(generator.random())
    sigma = 1 / (1 + math.exp(-sigmoid_scale * generator.standard_normal()))
    if sampling == "sigmoid":
        return sigma
    return shifted(sigma, discrete_flow_shift if sampling == "shift" else shift_of_tokens(tokens))


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[batch, channels, height, width] to patches of 2 x 2: [batch, height/2 * width/2, channels * 4]."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height // 2 * (width // 2), channels * 4)


def image_ids(height: int, width: int) -> torch.Tensor:
    """Positions (0, row, column) of the patches of a latent of ``height`` x ``width``: [height/2 * width/2, 3]."""
    ids = torch.zeros(height // 2, width // 2, 3)
    ids[..., 1] = torch.arange(height // 2)[:, None]
    ids[..., 2] = torch.arange(width // 2)[None, :]
    return ids.reshape(-1, 3)


def mask_weights(mask: torch.Tensor, floor: float, normalize: bool) -> torch.Tensor:
    """What each place of a latent counts in the loss: [height, width] of 0 .. 1 to patches, [tokens, 4].

    What the mask hides counts ``floor``. With ``normalize`` the mean over the places is 1, so that an image of which
    little is learned counts as much as another; an image of which nothing is left counts nothing.
    """
    weights = floor + (1 - floor) * mask
    if normalize and (mean := weights.mean()) > 0:
        weights = weights / mean
    return pack(weights[None, None])[0]


def image_losses(prediction: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each image's mean squared error in float32: [batch].

    ``prediction`` and ``target`` are [batch, tokens, channels * 4] as ``pack`` makes them, ``mask`` (what each place of
    the latent counts) [batch, tokens, 4].
    """
    squared = (prediction.float() - target.float()).square()
    by_place = squared.unflatten(2, (-1, 4)).mean(dim=2)
    return (by_place * mask).mean(dim=(1, 2))


def loss_sum(prediction: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over images of weight x loss; ``weights`` is [batch]."""
    return (image_losses(prediction, target, mask) * weights).sum()
