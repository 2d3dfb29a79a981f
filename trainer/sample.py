"""Pictures drawn during training, by the stock pipeline from the live weights.

They are what diffusers draws from the saved file with the same prompt, seed, steps and guidance. Drawing uses
generators of its own and changes no later step. All processes take part: a sharded model runs on all of them at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo
from torch.distributed.fsdp import FSDPModule

from bootstrap.cache import Cache
from bootstrap.estimate import TILE
from bootstrap.run_file import RunFile
from bootstrap.wanted import text_key
from trainer.world import World

log = logging.getLogger(__name__)


class Sampler:
    """Draws the job's prompts; knows when."""

    def __init__(self, run: RunFile, model: FluxTransformer2DModel, world: World):
        self.run, self.model, self.world = run, model, world
        self.sample = run.job.sample

    def due(self, step: int) -> bool:
        return bool(self.sample.prompts) and (step % self.sample.every == 0 or step == self.run.plan.steps)

    def path(self, step: int, prompt: int) -> Path:
        return self.run.folder.samples / f"step-{step:06d}-{prompt:02d}.png"

    def draw(self, step: int) -> None:
        """Draws every prompt that has no picture of this step yet. A failure is a warning, on all processes alike."""
        missing = [i for i in range(len(self.sample.prompts)) if not self.path(step, i).exists()]
        missing = self.world.from_lead(missing)
        if not missing:
            return
        error = None
        try:
            with evaluating(self.model):
                self._draw(step, missing)
        except Exception as failure:  # whatever it is, training matters more; it is told below
            log.debug("sampling failed", exc_info=True)
            error = f"process {self.world.rank}: {type(failure).__name__}: {failure}"
        for told in filter(None, self.world.gather(error)):
            if self.world.leads:
                log.warning("samples of step %d are not complete: %s. Training goes on.", step, told)

    def _draw(self, step: int, prompts: list[int]) -> None:
        pipeline = self._pipeline()
        cache = Cache(self.run.cache)
        unwritten: OSError | None = None
        for turn in range(0, len(prompts), self.world.size):
            if self.world.any(self.world.stop_requested)[0]:
                break  # the loop answers it; a round takes minutes
            place = turn + self.world.rank
            real = place < len(prompts)
            index = prompts[place] if real else prompts[-1]  # a sharded model needs every process in every forward
            image = self._one(pipeline, cache, index)
            try:
                if real:
                    self._write(image, step, index)
            except OSError as error:  # told at the end: until then the others need this process
                unwritten = error
        if unwritten is not None:
            raise unwritten

    def _pipeline(self) -> FluxPipeline:
        weights = self.run.weights
        vae = AutoencoderKL.from_pretrained(weights.vae, torch_dtype=torch.bfloat16, disable_mmap=True)
        if self.run.plan.tiled_decoding:
            vae.enable_tiling()
            vae.tile_sample_min_size = TILE
            vae.tile_latent_min_size = TILE // 2 ** (len(vae.config.block_out_channels) - 1)
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(weights.scheduler)
        pipeline = FluxPipeline(scheduler, vae.to(self.world.device), None, None, None, None, self.model)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _one(self, pipeline: FluxPipeline, cache: Cache, index: int) -> Image:
        sample = self.sample
        text = cache.read(text_key(sample.prompts[index], self.run.weights, t5_mask=False))
        settings: dict[str, Any] = {
            "prompt_embeds": text["prompt_embeds"][None].to(self.world.device),
            "pooled_prompt_embeds": text["pooled"][None].to(self.world.device),
            "width": sample.width,
            "height": sample.height,
            "num_inference_steps": sample.steps,
            "guidance_scale": sample.guidance,
            "generator": torch.Generator("cpu").manual_seed(sample.seed),
        }
        return pipeline(**settings).images[0]

    def _write(self, image: Image, step: int, index: int) -> None:
        sample, path = self.sample, self.path(step, index)
        notes = PngInfo()
        notes.add_itxt("prompt", sample.prompts[index])
        notes.add_text("settings", f"step {step}, seed {sample.seed}, {sample.steps} steps, guidance {sample.guidance}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        image.save(part, "PNG", pnginfo=notes)
        part.replace(path)


@contextmanager
def evaluating(model: FluxTransformer2DModel) -> Iterator[None]:
    """The model in evaluation, and after it gathered shards given up, so that none outlives the next update."""
    model.eval()
    try:
        yield
    finally:
        model.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
