"""How much of what an optimizer wants arrives in bf16 weights: each optimizer against the same in float32.

``python -m bench.fidelity`` trains a small FLUX again and again from the same weights on the same images and noise, by
the product's own optimizers: with float32 masters of all weights (``fp32``: what everything is measured by), with bf16
weights rounded stochastically (``bf16``: what the product does), and with bf16 weights rounded to nearest
(``nearest``: what it does not do, and why). It prints one Markdown table, and ends with 1 where bf16 weights went less
far, or further, than float32 masters by more than 2 %. ``--products`` adds what products in fp8 do to it.

A model of 250 M parameters on a GPU (one process for each learning rate, side by side), flux-tiny on a CPU.

Lion and Adafactor have other scales: they run at their own rate (jobs/learning_rates.py), told beside their name.

Columns, of the way d from the first to the last weights, over all of them as one vector:
  progress   <d, r> / <r, r> with r the way of the same optimizer in float32: 1 is all of it, 0 is standing still
  of AdamW   the same with r the way of AdamW in float32
  length     |d| / |r|; above 1 by what rounding adds at random, which leads nowhere
  changed    share of the weights whose bf16 value changed, over the same share of the rounded float32 masters
  loss fall  how much less the loss is on images and noise that were not trained on, over that in float32
  curve      mean |loss - loss in float32| of the last fifth of the steps, in parts of how far it fell there
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from bench.random_weights import make_transformer
from bootstrap.bases import FLUX_TINY
from bootstrap.cache import ShardWriter
from bootstrap.dataset import Item
from bootstrap.flux_shape import FluxShape
from bootstrap.plan import DataSummary, make_plan
from bootstrap.pod import read_pod
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume
from bootstrap.wanted import Wanted
from bootstrap.weights import Weights
from jobs.learning_rates import rates_of
from jobs.schema import Job
from jobs.values import Products
from trainer.attention import ATTENTIONS
from trainer.data import Batch, Latents, TrainingData
from trainer.flow import loss_sum
from trainer.fp8_products import SCALINGS, multiply_in_fp8
from trainer.make_optimizer import make_optimizer
from trainer.model import predict
from trainer.optimizer import Optimizer
from trainer.processor import use_processor
from trainer.trained import Trained, trained_tensors
from trainer.world import World

RATES = (1e-6, 1e-5, 2e-5, 1e-4)
TOLERANCE = 0.02  # of float32's progress
MID_SIZE = replace(FLUX_TINY, heads=12, head_size=128, single_blocks=2, rope_axes=(16, 56, 56))  # 250 M parameters
TEXT_TOKENS = 64
IMAGES = 32
SETTLING, SETTLING_RATE = 200, 3e-4  # steps before all, so that weights and gradients are those of a trained model
HELD_OUT = 16  # batches, of steps that no training comes to

Arithmetic = Literal["fp32", "bf16", "nearest"]


@dataclass(frozen=True)
class Mode:
    optimizer: str
    arithmetic: Arithmetic
    products: Products = "bf16"

    @property
    def twin(self) -> Mode:
        """The same in float32; a Paged optimizer only keeps its states elsewhere."""
        name = "AdamW" if self.optimizer == "PagedAdamW32bit" else self.optimizer.removeprefix("Paged")
        return Mode(name, "fp32")

    def own_rate(self, rate: float) -> float:
        """What ``rate`` is to AdamW, for this optimizer: Lion's steps are larger at one rate, Adafactor's smaller."""
        own, adamw = rates_of(self.optimizer, "full"), rates_of("AdamW", "full")
        assert own is not None
        assert adamw is not None
        return rate * own.usual / adamw.usual


REFERENCE = Mode("AdamW", "fp32")
MODES = (
    *(Mode(name, "fp32") for name in ("AdamW", "AdamW8bit", "Lion8bit", "Adafactor")),
    Mode("AdamW", "nearest"),
    *(Mode(name, "bf16") for name in ("AdamW", "PagedAdamW32bit", "AdamW8bit", "Lion8bit", "Adafactor")),
)
# Streamed from the host, on a GPU: the same to the bit as those without Paged, so shown at the first rate alone.
PAGED = (Mode("PagedAdamW8bit", "bf16"), Mode("PagedLion8bit", "bf16"))


@dataclass(frozen=True)
class Row:
    """What became of one mode at one learning rate; see the head of this file."""

    learning_rate: float  # AdamW's
    own_rate: float  # this optimizer's
    optimizer: str
    arithmetic: Arithmetic
    products: Products
    progress: float
    of_adamw: float
    length: float
    changed: float
    loss_fall: float
    curve: float
    seconds: float

    @property
    def arrives(self) -> bool:
        """Whether rounding the weights takes nothing away; of rounding before products nothing is asked here."""
        free = self.arithmetic == "nearest" or self.products != "bf16"
        return free or abs(self.progress - 1) <= TOLERANCE


# ---------------------------------------------------------------- what is trained, on what


def prepare(volume: Volume, shape: FluxShape, size: int, images_per_step: int) -> Path:
    """A run as the entrypoint prepares it, on smooth random latents, each with a text of its own; gives run.json."""
    volume.create()
    job = Job.model_validate(
        {"name": "fidelity", "base": "random", "method": "full", "datasets": [{"path": "none"}]}
        | {"images_per_step": images_per_step, "resolution": size, "warmup": 0, "optimizer": "AdamW"}
    )
    nothing = volume.models / "none"
    weights = Weights(
        (), "bfl", nothing, shape, nothing, nothing, nothing, nothing, nothing, nothing, TEXT_TOKENS, "", ""
    )
    items = tuple(Item(f"{i}.png", f"{i}", f"image {i}", 1, size, size, (size, size)) for i in range(IMAGES))
    plan = make_plan(job, read_pod(volume.root), shape, DataSummary(IMAGES, IMAGES, ((size, size, IMAGES),)))
    run = RunFile(job, plan, weights, volume.root)
    generator = torch.Generator().manual_seed(0)
    wanted = Wanted.of(job, plan, items, weights)
    with ShardWriter(run.cache) as writer:
        for key in wanted.crops:
            coarse = torch.randn(1, 16, 4, 4, generator=generator)
            mean = nn.functional.interpolate(coarse, (size // 8, size // 8), mode="bicubic")[0]
            writer.add(key, {"mean": mean.half(), "spread": torch.full_like(mean, 0.05).half()})
        for key in wanted.texts:
            embeds = torch.randn(TEXT_TOKENS, shape.text_size, generator=generator).bfloat16()
            pooled = torch.randn(shape.pooled_size, generator=generator).bfloat16()
            writer.add(
                key, {"prompt_embeds": embeds, "pooled": pooled, "mask": torch.ones(TEXT_TOKENS, dtype=torch.bool)}
            )
    return run.write(items)


class Gradients:
    """Loss and gradients of a model for a batch. On a GPU one CUDA graph, so that a small model is not bound by the
    host's time for each kernel; all batches have one shape."""

    def __init__(self, model: FluxTransformer2DModel, batch: Batch, guidance: float):
        self.model, self.guidance = model, guidance
        self.parameters = list(model.parameters())
        self.graph: torch.cuda.CUDAGraph | None = None
        if batch.noisy.device.type != "cuda":
            return
        self.batch = Batch(**{f.name: getattr(batch, f.name).clone() for f in fields(batch)})
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what is set up at first use may not be captured
            for _ in range(3):
                self._run(self.batch)
        torch.cuda.current_stream().wait_stream(aside)
        model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self._run(self.batch)
        self.gradients = [parameter.grad for parameter in self.parameters]

    def _run(self, batch: Batch) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss.detach()

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean over the batch's images."""
        prediction = predict(self.model, batch, self.guidance, False)
        return loss_sum(prediction, batch.target, batch.mask, batch.weights) / batch.noisy.shape[0]

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The loss; the gradients are where the optimizer looks for them."""
        if self.graph is None:
            return self._run(batch)
        for field in fields(batch):
            getattr(self.batch, field.name).copy_(getattr(batch, field.name))
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.result.clone()


@dataclass(frozen=True)
class Way:
    """What one training did. ``moved``: by tensor, float32; ``changed``: which bf16 values are others now."""

    moved: list[torch.Tensor]
    changed: float
    losses: list[float]
    held_out: float  # loss at the end
    seconds: float


class Trials:
    """Trainings of one model, all from the same weights, on the same images and noise."""

    def __init__(self, run: RunFile, steps: int, settling: int):
        self.run = run
        on_gpu = run.plan.device == "cuda"
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.world = World(0, 1, self.device, None)  # type: ignore[arg-type]  # alone: nobody is talked to
        model = make_transformer(run.weights.shape).to(self.device).train()
        next(each for each in ATTENTIONS if each.name == "flash").switch_on(model)
        self.tensors = trained_tensors(model, 0, 1)
        data = TrainingData(run, run.read_items(), Latents(shift=0.0, scale=1.0), 0)

        def batches(first: int, count: int) -> list[Batch]:
            return [step.batches[0].to(self.device) for step in data.prepared(first, first + count)]

        self.batches, self.held_out = batches(0, steps), batches(steps, HELD_OUT)
        self.model = model
        self.gradients = Gradients(model, self.batches[0], run.job.guidance)
        self.by_products: dict[Products, Gradients] = {"bf16": self.gradients}
        self.start = [tensor.weight.clone() for tensor in self.tensors]
        if settling:
            self.train(REFERENCE, SETTLING_RATE, batches(steps + HELD_OUT, settling))
            self.start = [tensor.weight.clone() for tensor in self.tensors]  # the masters, rounded
        self.held_out_before = self.held_out_loss()

    def measure(self, mode: Mode, learning_rate: float) -> Way:
        begun = time.monotonic()
        losses, weights = self.train(mode, learning_rate, self.batches)
        held_out = self.held_out_loss()  # waits for the GPU
        seconds = time.monotonic() - begun
        moved = [after.float() - before.float() for after, before in zip(weights, self.start, strict=True)]
        others = sum(
            int((tensor.weight != before).sum()) for tensor, before in zip(self.tensors, self.start, strict=True)
        )
        share = others / sum(before.numel() for before in self.start)
        return Way(moved, share, torch.stack(losses).tolist(), held_out, seconds)

    def train(
        self, mode: Mode, learning_rate: float, batches: Sequence[Batch]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """At the optimizer's own rate. The loss of every step, and the last weights, float32 masters where there are;
        the model has them in bf16."""
        learning_rate = mode.own_rate(learning_rate)
        job = self.run.job.model_copy(update={"optimizer": mode.optimizer, "learning_rate": learning_rate})
        self._put(self.start)
        held = self._masters() if mode.arithmetic == "fp32" else self.tensors
        on_host = self.run.weights.shape.blocks if mode.optimizer.startswith("Paged") else 0
        plan = replace(
            self.run.plan, optimizer_in_backward=mode.arithmetic != "fp32", host_state_blocks=on_host
        )  # in backward each tensor has an update of its own, as a full model's have
        optimizer = make_optimizer(held, job, plan, self.world)
        if mode.arithmetic == "nearest":
            optimizer.put_back = round_to_nearest  # type: ignore[method-assign]
        go = torch.ones((), device=self.device)
        losses, gradients = [], self._gradients_by(mode.products)
        for step, batch in enumerate(batches):
            losses.append(gradients(batch))
            optimizer.begin_step(step, learning_rate, go)
            if mode.arithmetic == "fp32":
                self._step_masters(held, optimizer)
            else:
                for tensor in reversed(held):  # as a backward pass comes to them
                    optimizer.update(tensor)
        return losses, [tensor.weight for tensor in held]

    def _gradients_by(self, products: Products) -> Gradients:
        """Of the same weights; every loss on what is held out is by products in bf16."""
        if products != "bf16" and products not in self.by_products:
            model = sharing_weights(self.model)
            multiply_in_fp8(model, products)
            self.by_products[products] = Gradients(model, self.batches[0], self.run.job.guidance)
        return self.by_products[products]

    def _masters(self) -> list[Trained]:
        return [replace(tensor, parameter=nn.Parameter(tensor.weight.float())) for tensor in self.tensors]

    def _step_masters(self, masters: list[Trained], optimizer: Optimizer) -> None:
        for master, tensor in zip(masters, self.tensors, strict=True):
            gradient = tensor.take_gradient()
            assert gradient is not None
            master.parameter.grad = gradient.float()
        optimizer.finish_step()
        self._put([master.weight for master in masters])

    @torch.no_grad()
    def _put(self, weights: list[torch.Tensor]) -> None:
        """Into the model, rounded to nearest where they are float32."""
        torch._foreach_copy_([tensor.weight for tensor in self.tensors], weights)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return float(torch.stack([self.gradients.loss(batch) for batch in self.held_out]).mean())


def sharing_weights(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    """Another model with the same parameters."""
    same = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, same)  # a memo: these are taken for copied already


def round_to_nearest(tensor: Trained, stepped: torch.Tensor) -> None:
    """In place of Optimizer.put_back."""
    tensor.weight.copy_(stepped)


# ---------------------------------------------------------------- figures


def dot(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([(x * y).sum(dtype=torch.float64) for x, y in zip(a, b, strict=True)]).sum())


def compare(mode: Mode, learning_rate: float, way: Way, twin: Way, adamw: Way, before: float) -> Row:
    last = len(way.losses) // 5
    curves = list(zip(way.losses, twin.losses, strict=True))
    fell = before - twin.held_out
    return Row(
        learning_rate,
        mode.own_rate(learning_rate),
        mode.optimizer,
        mode.arithmetic,
        mode.products,
        progress=dot(way.moved, twin.moved) / dot(twin.moved, twin.moved),
        of_adamw=dot(way.moved, adamw.moved) / dot(adamw.moved, adamw.moved),
        length=math.sqrt(dot(way.moved, way.moved) / dot(twin.moved, twin.moved)),
        changed=way.changed / twin.changed if twin.changed else math.nan,
        loss_fall=(before - way.held_out) / fell if fell else math.nan,
        curve=sum(abs(a - b) for a, b in curves[-last:]) / last / abs(fell) if fell else math.nan,
        seconds=way.seconds,
    )


def measure_rate(run_file: Path, steps: int, settling: int, modes: tuple[Mode, ...], rate: float) -> list[Row]:
    """All modes at one learning rate; the twins in float32 come first."""
    use_processor(1)
    trials = Trials(RunFile.read(run_file), steps, settling)
    ways: dict[Mode, Way] = {}
    rows = []
    for mode in modes:
        way = trials.measure(mode, rate)
        if mode.arithmetic == "fp32":
            ways[mode] = way
        rows.append(compare(mode, rate, way, ways[mode.twin], ways[REFERENCE], trials.held_out_before))
        told = f"{rate:g} {mode.optimizer} {mode.arithmetic} {mode.products}"
        print(f"{told}: progress {rows[-1].progress:.3f}, {way.seconds:.1f} s", file=sys.stderr, flush=True)
    return rows


def measure_all(run_file: Path, steps: int, settling: int, rates: Sequence[float], modes: Sequence[Mode]) -> list[Row]:
    """Side by side: one process for each rate on a GPU, which one of them cannot fill, and for each core on a CPU."""
    paged = tuple(mode for mode in PAGED if mode.twin in modes and torch.cuda.is_available())
    work = [
        partial(measure_rate, run_file, steps, settling, (*modes, *(() if place else paged)), rate)
        for place, rate in enumerate(rates)
    ]
    if len(rates) == 1:
        return work[0]()
    at_once = len(rates) if torch.cuda.is_available() else min(len(rates), os.cpu_count() or 1)
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(one) for one in work]
        return [row for one in running for row in one.result()]


HEAD = (
    "| rate | optimizer | weights | products | progress | of AdamW | length | changed | loss fall | curve | s |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        at = "" if row.own_rate == row.learning_rate else f" at {row.own_rate:g}"
        off = "" if row.arrives else " **off**"
        lines.append(
            f"| {row.learning_rate:g} | {row.optimizer}{at} | {row.arithmetic}{off} | {row.products} "
            f"| {row.progress:.3f} | {row.of_adamw:.3f} | {row.length:.2f} | {row.changed:.2f} | {row.loss_fall:.3f} "
            f"| {row.curve:.1%} | {row.seconds:.1f} |"
        )
    return "\n".join((*HEAD, *lines))


def main(arguments: Sequence[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description="Weights in bf16 against float32.")
    parser.add_argument("--steps", type=int, default=500 if on_gpu else 60)
    parser.add_argument("--settling", type=int, default=SETTLING if on_gpu else 30, help="steps before, in float32")
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="comma-separated")
    parser.add_argument("--optimizers", default="", help="comma-separated; all by default")
    parser.add_argument("--products", default="", help="AdamW with these as well: fp8-rowwise,fp8-tensorwise")
    parser.add_argument("--json", type=Path, help="where to write the rows, too")
    options = parser.parse_args(arguments)
    rates = [float(rate) for rate in options.rates.split(",")]
    names = options.optimizers.split(",") if options.optimizers else [mode.optimizer for mode in MODES]
    modes = [mode for mode in MODES if mode.optimizer in names or mode == REFERENCE]
    modes += [Mode("AdamW", "bf16", products) for products in SCALINGS if products in options.products.split(",")]
    shape, size, images = (MID_SIZE, 256, 4) if on_gpu else (FLUX_TINY, 64, 2)
    with tempfile.TemporaryDirectory() as folder:
        run_file = prepare(Volume(Path(folder)), shape, size, images)
        rows = measure_all(run_file, options.steps, options.settling, rates, modes)
    print(f"{shape.parameters() / 1e6:.0f} M parameters, {options.steps} steps of {images} images of {size} px")
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.arrives for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
