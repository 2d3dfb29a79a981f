"""Attentions that are wrong on purpose, as real ones were: right forward, and a spoilt gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

from trainer.attention import ATTENTIONS, Attention


class Spoilt(FluxAttnProcessor):
    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.spoil = spoil

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        hidden_states = hidden_states.clone()
        hidden_states.register_hook(self.spoil)
        return super().__call__(attn, hidden_states, *rest, **more)


def broken(name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    def switch_on(model: FluxTransformer2DModel) -> None:
        ATTENTIONS[0].switch_on(model)
        model.set_attn_processor(Spoilt(spoil))

    return Attention(name, switch_on, lambda device, masked: "")


NAN = broken("nan", lambda gradient: gradient * float("nan"))
HALF = broken("half", lambda gradient: gradient / 2)
