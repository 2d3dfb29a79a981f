"""The assistant: a frozen LoRA beside the one that is trained, on in training and off while samples are drawn.

It is an adapter of its own and never part of the base's weights: those may be quantised, and what is added to a bf16
weight and taken away again leaves another weight behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from peft.tuners.lora import LoraLayer

from bootstrap.flux_shape import FluxShape
from bootstrap.lora_file import LoraFileError, check_fits, read_lora
from bootstrap.lora_targets import AdapterLayer
from trainer.adapter import ADAPTER, attach

ASSISTANT = "assistant"


@torch.no_grad()
def add_assistant(model: FluxTransformer2DModel, file: Path, shape: FluxShape) -> None:
    """Gives a model that has its adapter the LoRA in ``file``, in bf16, switched on. Raises LoraFileError."""
    found = read_lora(file)
    check_fits(found, shape, f"assistant_lora: {file}")
    if any(each.magnitude is not None for each in found.values()):
        raise LoraFileError(f"assistant_lora: {file} is a DoRA; only a plain LoRA can be switched on beside another")
    layers = {name: AdapterLayer(each.rank, each.scale) for name, each in found.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # there are two adapters, and are meant
        attach(model, ASSISTANT, layers, torch.bfloat16)
    for name, each in found.items():
        module = model.get_submodule(name)
        module.lora_A[ASSISTANT].weight.copy_(each.down)
        module.lora_B[ASSISTANT].weight.copy_(each.up)
    switch_assistant(model, on=True)


def switch_assistant(model: FluxTransformer2DModel, on: bool) -> None:
    """Switches the assistant on, or off, where the model has one."""
    if ASSISTANT not in (getattr(model, "peft_config", None) or {}):
        return
    # The trained one first: DoRA stretches the base and itself, not what comes after it.
    names = [ADAPTER, ASSISTANT] if on else [ADAPTER]
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(names)  # which makes all of them want gradients
            for halves in (module.lora_A, module.lora_B):
                if ASSISTANT in halves:
                    halves[ASSISTANT].requires_grad_(False)


@contextmanager
def without_assistant(model: FluxTransformer2DModel) -> Iterator[None]:
    """The model as people will use it."""
    switch_assistant(model, on=False)
    try:
        yield
    finally:
        switch_assistant(model, on=True)
