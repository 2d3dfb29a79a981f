"""Pictures drawn during training, by the stock pipeline from the live weights or from their average.

They are what diffusers draws from the saved file with the same prompt, seed, steps, guidance and size. Drawing uses
generators of its own and changes no later step.

The prompts of a round are shared out to the processes, as many at a time as there are, those of similar cost together.
All processes of a sharded model take part in each of its forward passes, so there each makes as many as the longest
drawing of a turn has. What fails is agreed on before anyone goes on.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch.distributed.fsdp import FSDPModule

from bootstrap.cache import Cache
from bootstrap.resume import step_of
from bootstrap.run_file import RunFile
from bootstrap.volume import write_atomically, write_json
from bootstrap.wanted import text_key
from bootstrap.whereabouts import Phase
from jobs.prompts import Drawing
from trainer.alarm import Fault, alarm_text, fault_of
from trainer.assistant import without_assistant
from trainer.ema import Ema
from trainer.out_of_memory import is_out_of_memory
from trainer.pipeline import Pipeline
from trainer.prompts import Prompts
from trainer.world import CONTROL_LIMIT, World

log = logging.getLogger(__name__)

MISSED = timedelta(seconds=60)  # in which processes that fail alike all have failed

Texts = Mapping[str, Mapping[str, torch.Tensor]]  # by prompt
Wanted = Sequence[tuple[int, Drawing]]  # with the place in the list of prompts


@dataclass(frozen=True)
class Drawn:
    """What became of one process's part of a turn."""

    number: int | None = None  # of the prompt
    fault: Fault = ""
    error: str = ""
    stop: bool = False


class Sampler:
    """Draws the job's prompts; knows when. Its methods are entered by all processes."""

    def __init__(
        self, run: RunFile, model: FluxTransformer2DModel, world: World, ema: Ema | None = None, start: int = 0
    ):
        """``start``: updates done; pictures of later steps are of weights that are gone, and are taken away."""
        self.run, self.model, self.world = run, model, world
        self.sample = run.job.sample
        self.ema = ema if run.job.ema and run.job.ema.samples else None
        self.prompts = Prompts(run, world)
        self.sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        if world.leads:
            with suppress(OSError):
                run.folder.alarm.unlink(missing_ok=True)
                for path in run.folder.samples.glob("step-*.png"):
                    if step_of(path) > start:
                        path.unlink(missing_ok=True)

    def due(self, step: int) -> bool:
        return bool(self.sample.prompts) and (step % self.sample.every == 0 or step == self.run.plan.steps)

    def path(self, step: int, number: int) -> Path:
        return self.run.folder.samples / f"step-{step:06d}-{number:02d}.png"

    def draw(self, step: int) -> bool:
        """Draws every prompt that has no picture of this step yet; whether there was one. A failure is a warning, on
        all processes alike."""
        self.world.place.enter(Phase.SAMPLING)
        drawings = self.prompts.now()
        missing = [
            (i, each) for i, each in enumerate(drawings) if notes_of(self.path(step, i)) != self._notes(each, step)
        ]
        missing = self.world.from_lead(missing)
        if not missing:
            return False
        guidance = "no" if not self.run.weights.shape.guidance else f"{missing[0][1].guidance:g}"
        log.info("drawing %d samples of step %d, with guidance %s", len(missing), step, guidance)
        with self.ema.shown() if self.ema else nullcontext(), evaluating(self.model), without_assistant(self.model):
            every = self._draw(step, missing)
        if not self.world.leads:
            return True
        for rank, told in sorted({(rank, drawn.error) for rank, drawn in every if drawn.error}):
            log.warning("samples of step %d are not complete: process %d: %s. Training goes on.", step, rank, told)
        self._alarm(step, {drawn.number: drawn.fault for _, drawn in every if drawn.number is not None}, len(missing))
        return True

    def _alarm(self, step: int, faults: Mapping[int, Fault], count: int) -> None:
        """Says where everyone looks that samples show a broken model; takes it back when they no longer do."""
        wrong = {number: fault for number, fault in faults.items() if fault}
        with suppress(OSError):
            if not wrong:
                self.run.folder.alarm.unlink(missing_ok=True)
                return
            text = alarm_text(step, wrong, count, self.run.job)
            log.error("ALARM: %s", text)
            write_json(self.run.folder.alarm, {"step": step, "message": text})

    def _draw(self, step: int, wanted: Wanted) -> list[tuple[int, Drawn]]:
        """What became of everything, with the rank: the same on every process."""
        begun, prepared = Drawn(), None
        try:
            prepared = self._prepare(wanted)
        except Exception as failure:  # whatever it is, training matters more
            begun = self._failed(failure)
        every = list(enumerate(self.world.gather(begun)))
        if prepared is None or any(drawn.error for _, drawn in every):
            return every
        pipeline, texts = prepared
        for turn in turns_of(wanted, self.world.size):
            every += enumerate(self.world.gather(self._take_turn(step, turn, pipeline, texts)))
            if any(drawn.stop for _, drawn in every):
                break  # the loop answers it; a round takes minutes
        return every

    def _prepare(self, wanted: Wanted) -> tuple[Pipeline, Texts]:
        run, cache = self.run, Cache(self.run.cache)
        prompts = {drawing.prompt for _, drawing in wanted}
        texts = {prompt: cache.read(text_key(prompt, run.weights, t5_mask=False)) for prompt in prompts}
        return Pipeline(run.weights, self.model, self.world.device, tiled=run.plan.tiled_decoding), texts

    def _take_turn(self, step: int, turn: Wanted, pipeline: Pipeline, texts: Texts) -> Drawn:
        number, drawing = turn[self.world.rank] if self.world.rank < len(turn) else (None, None)
        fault: Fault = ""
        try:
            if drawing is not None:
                latent = pipeline.denoise(drawing, texts[drawing.prompt], self.world.place.move)
            if self.sharded:
                self._keep_company(turn, drawing.steps if drawing else 0, pipeline, texts)
            if number is not None and drawing is not None:
                fault = self._finish(step, number, drawing, latent, pipeline)
            drawn = Drawn(number, fault, stop=self.world.stop_requested)
        except Exception as failure:
            drawn = self._failed(failure)
        self._meet(drawn.error)
        return drawn

    def _meet(self, error: str) -> None:
        """A sharded model runs on all processes at once: where one fails in the middle of it, the others wait for its
        share, and never come here. Where all fail alike, or after it, all are here soon, and training goes on."""
        if not self.sharded:
            return
        try:
            self.world.meet(MISSED if error else CONTROL_LIMIT)
        except RuntimeError as missing:
            if not error:
                raise
            raise RuntimeError(f"drawing samples failed where the others wait for this process: {error}") from missing

    def _keep_company(self, turn: Wanted, made: int, pipeline: Pipeline, texts: Texts) -> None:
        """Makes the forward passes that the longest drawing of the turn has beyond ``made``, for nothing."""
        rest = max(drawing.steps for _, drawing in turn) - made
        if rest:
            small = min((drawing for _, drawing in turn), key=lambda each: each.width * each.height)
            pipeline.denoise(replace(small, steps=rest), texts[small.prompt], self.world.place.move)

    def _finish(self, step: int, number: int, drawing: Drawing, latent: torch.Tensor, pipeline: Pipeline) -> Fault:
        """Decodes and writes a picture; gives what is wrong with it that was not wrong before training: a toy's base
        draws noise, too."""
        image = pipeline.decode(latent, drawing)
        write_picture(image, self.path(step, number), self._notes(drawing, step))
        if not bool(latent.isfinite().all()):
            return "no numbers"
        fault = fault_of(image)
        return "" if step == 0 or fault == self._fault_of_base(number, drawing) else fault

    def _fault_of_base(self, number: int, drawing: Drawing) -> Fault:
        """What was wrong with the same picture before training; "" where it was not drawn."""
        path = self.path(0, number)
        if notes_of(path) != self._notes(drawing, 0):
            return ""
        with Image.open(path) as image:
            return fault_of(image)

    def _notes(self, drawing: Drawing, step: int) -> dict[str, str]:
        return notes(drawing, step, average=self.ema is not None)

    def _failed(self, failure: Exception) -> Drawn:
        log.debug("sampling failed", exc_info=failure)
        told = f"{type(failure).__name__}: {failure}"
        if is_out_of_memory(failure):
            told = "out of GPU memory: smaller pictures (sample.width, sample.height) need less"
        return Drawn(error=told, stop=self.world.stop_requested)


def turns_of(wanted: Wanted, processes: int) -> list[Wanted]:
    """The drawings, one for each process at a time; the longest first, so that those of a turn take about as long."""
    by_cost = sorted(wanted, key=lambda each: (-each[1].steps, -each[1].width * each[1].height, each[0]))
    return [by_cost[first : first + processes] for first in range(0, len(by_cost), processes)]


# ---------------------------------------------------------------- files


def notes(drawing: Drawing, step: int, average: bool = False) -> dict[str, str]:
    """What a picture says of itself."""
    return {"prompt": drawing.prompt, "settings": f"step {step}, {drawing}{', average' * average}"}


def notes_of(path: Path) -> dict[str, str] | None:
    """What a picture that is there says of itself; None where there is none."""
    try:
        with Image.open(path) as image:
            return {name: str(image.info.get(name)) for name in ("prompt", "settings")}
    except OSError:
        return None


def write_picture(image: Image.Image, path: Path, told: Mapping[str, str]) -> None:
    """A PNG with text, whole or not at all."""
    info = PngInfo()
    for name, text in told.items():
        info.add_itxt(name, text)
    content = io.BytesIO()
    image.save(content, "PNG", pnginfo=info)
    write_atomically(path, content.getvalue())


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
