"""Attentions that are wrong on purpose, as real ones were: right forward, and a spoilt gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

from trainer.attention import ATTENTIONS, Attention

(FLASH,) = (attention for attention in ATTENTIONS if attention.name == "flash")


class Spoilt(FluxAttnProcessor):
    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.spoil = spoil

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return super().__call__(attn, self.spoil(hidden_states), *rest, **more)


def broken(name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    def switch_on(model: FluxTransformer2DModel) -> None:
        FLASH.switch_on(model)
        model.set_attn_processor(Spoilt(spoil))

    return Attention(name, switch_on, lambda device, masked: "")


# The same numbers forward; plain arithmetic, so that they can be compiled too.
NAN = broken("nan", lambda x: x + (x - x).sqrt())
HALF = broken("half", lambda x: x / 2 + (x / 2).detach())
