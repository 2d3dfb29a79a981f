"""Dropout of an adapter that is the same on any number of GPUs, after a resume, and when a block is computed again.

What is left out are single values between the adapter's two matrices, as in kohya's trainer (``network_dropout``), the
rest made larger by 1 / (1 - share). Which ones is a hash of (seed, step, the image's place in the step, the layer's
name, the value's place), so nothing hangs on a process' random state: torch's own dropout would differ with the number
of processes and passes. A hash of integers is plain arithmetic, which the compiler melts into the product's output.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.randomness import hash_keys

KEYS = "dropout_keys"  # a buffer of the model: two words of 32 bits for each image of the pass under way
_WORD = 0xFFFFFFFF


class Dropout(nn.Module):
    """``image_keys``: [images of a pass, 2], one tensor for all layers; ``own_key``: [2], of this layer."""

    image_keys: torch.Tensor
    own_key: torch.Tensor

    def __init__(self, share: float, image_keys: torch.Tensor, name: str):
        super().__init__()
        self.share = share
        self.register_buffer("image_keys", image_keys, persistent=False)
        words = [word & _WORD for word in hash_keys(0, 0, name)]
        self.register_buffer("own_key", torch.tensor(words, device=image_keys.device), persistent=False)

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        """inner: [images, ..., rank]."""
        if not self.training:
            return inner
        keys = self.image_keys[: inner.shape[0]] ^ self.own_key
        return torch.where(kept(inner, keys, self.share), inner / (1 - self.share), 0.0)


def kept(like: torch.Tensor, keys: torch.Tensor, share: float) -> torch.Tensor:
    """Which values stay, of a tensor shaped as ``like``; ``keys``: [images, 2], int64, words of 32 bits."""
    place = torch.arange(like[0].numel(), dtype=torch.int64, device=like.device)
    mixed = _mix(_mix(place ^ keys[:, :1]) + keys[:, 1:] & _WORD)
    return (mixed >= round(share * 2**32)).view(like.shape)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Of words of 32 bits in int64. A mixer of Wellons' search with small bias (github.com/skeeto/hash-prospector,
    issue 19) whose multipliers, below 2^31, keep products within 63 bits: no sign, no overflow."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _WORD
    x = (x ^ (x >> 15)) * 0x735A2D97 & _WORD
    return x ^ (x >> 15)


def new_keys(model: nn.Module, images: int, device: torch.device) -> torch.Tensor:
    """The model's buffer for the keys of ``images`` images."""
    model.register_buffer(KEYS, torch.zeros((images, 2), dtype=torch.int64, device=device), persistent=False)
    return model.get_buffer(KEYS)


def tell_images(model: nn.Module, keys: torch.Tensor) -> None:
    """Before a pass: which images it has. ``keys``: [batch, 2]."""
    if model.training and (held := getattr(model, KEYS, None)) is not None:
        held[: len(keys)].copy_(keys)
