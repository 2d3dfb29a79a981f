"""diffusers' own pipeline around a transformer that is in memory already: for samples, and for the grid.

A picture is drawn in two parts, the denoising, in which all processes of a sharded model take part, and the decoding,
which each does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL.Image import Image

from bootstrap.weights import Weights
from jobs.prompts import Drawing
from trainer.out_of_memory import decode_in_tiles, decode_patiently


class Pipeline:
    """Draws with ``model``; text comes encoded (``TextEncoders.encode``). Changes no generator but its own."""

    def __init__(self, weights: Weights, model: FluxTransformer2DModel, device: torch.device, *, tiled: bool):
        vae = AutoencoderKL.from_pretrained(weights.vae, torch_dtype=torch.bfloat16, disable_mmap=True)
        if tiled:
            decode_in_tiles(vae)
        self.device = device
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(weights.scheduler)
        self.stock = FluxPipeline(scheduler, vae.to(device), None, None, None, None, model)
        self.stock.set_progress_bar_config(disable=True)

    def denoise(
        self, drawing: Drawing, text: Mapping[str, torch.Tensor], took_step: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """One picture's latent, packed: [1, tokens, 64]. Runs the model once for each of ``drawing.steps``, and says so
        each time."""

        def took(_stock: FluxPipeline, _step: int, _time: torch.Tensor, kept: dict[str, Any]) -> dict[str, Any]:
            took_step()
            return kept

        settings: dict[str, Any] = {
            "prompt_embeds": text["prompt_embeds"][None].to(self.device),
            "pooled_prompt_embeds": text["pooled"][None].to(self.device),
            "width": drawing.width,
            "height": drawing.height,
            "num_inference_steps": drawing.steps,
            "guidance_scale": drawing.guidance,
            "generator": torch.Generator("cpu").manual_seed(drawing.seed),
            "callback_on_step_end": took,
        }
        return self.stock(**settings, output_type="latent").images

    @torch.no_grad()
    def decode(self, latent: torch.Tensor, drawing: Drawing) -> Image:
        """The picture of a latent, by the last lines of FluxPipeline's own call."""
        stock = self.stock
        latent = stock._unpack_latents(latent, drawing.height, drawing.width, stock.vae_scale_factor)
        latent = latent / stock.vae.config.scaling_factor + stock.vae.config.shift_factor
        pixels = decode_patiently(stock.vae, latent)
        return stock.image_processor.postprocess(pixels.nan_to_num(), output_type="pil")[0]
