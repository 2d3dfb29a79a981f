"""The attention kernels that the model can run with, the fastest first, and how each is switched on.

Fast and wrong was met: cuDNN's attention, torch's own choice on Hopper, gives this model NaN gradients (H200, torch
2.11; why, and how it is had without, is told in ``trainer/cudnn_attention.py``). So none is trusted unseen:
``trainer/self_check.py`` compares the first that fits with float32 mathematics, on the card, before training, and takes
the next where it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import FluxTransformer2DModel

from trainer.cudnn_attention import use_cudnn

# What torch's own scaled_dot_product_attention may choose from; it takes the first of these that fits the inputs.
_SDPA: dict[str, Callable[[bool], None]] = {
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}


@dataclass(frozen=True)
class Attention:
    """One way to compute attention.

    ``switch_on`` makes a model use it; it is called before the model's first forward pass, compiled or not. ``cannot``
    says why it is out of the question on a device, with or without a mask over the text; "" where it can be tried.
    """

    name: str
    switch_on: Callable[[FluxTransformer2DModel], None]
    cannot: Callable[[torch.device, bool], str]


def candidates(device: torch.device, masked: bool) -> tuple[Attention, ...]:
    """Those worth trying there, the fastest first. The last, mathematics by plain matrix products, always is."""
    return tuple(attention for attention in ATTENTIONS if not attention.cannot(device, masked))


def _sdpa(*allowed: str) -> Callable[[FluxTransformer2DModel], None]:
    """Torch's own attention, for the whole process: the VAE's wide heads, too, must find a kernel that takes them."""

    def switch_on(_: FluxTransformer2DModel) -> None:
        for name, enable in _SDPA.items():
            enable(name in allowed)

    return switch_on


def _flash_cannot(device: torch.device, masked: bool) -> str:
    if device.type == "cuda" and masked:
        return "flash attention takes no mask"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs compute capability 8.0"
    return ""


def _efficient_cannot(device: torch.device, masked: bool) -> str:
    return "" if device.type == "cuda" else "there is no such kernel for the CPU"


def _cudnn(model: FluxTransformer2DModel) -> None:
    """By an operation of our own; torch's must never choose cuDNN beside it, for they would share its plans."""
    _sdpa("flash", "efficient", "math")(model)
    use_cudnn(model)


def _cudnn_cannot(device: torch.device, masked: bool) -> str:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "cuDNN's attention is the faster one from Hopper on"
    return "cuDNN's attention is taken without masks only" if masked else ""


ATTENTIONS = (
    Attention("cudnn", _cudnn, _cudnn_cannot),
    Attention("flash", _sdpa("flash", "efficient", "math"), _flash_cannot),
    Attention("efficient", _sdpa("efficient", "math"), _efficient_cannot),
    Attention("math", _sdpa("math"), lambda device, masked: ""),
)
