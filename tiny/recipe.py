"""Makes flux-tiny from nothing: ``python -m tiny.recipe --out FOLDER --seconds 600`` on one GPU.

1. the VAE, from drawings; 2. text encoders and transformer together, by flow matching as FLUX was trained (logit-normal
times, shifted by resolution): first in the whole world of ``tiny.scenes``, with guidance distilled from the model
itself, then in the small world that so few weights draw well, with strangers in it. Each stage takes its share of the
seconds, and its learning rate falls with the time. ``FOLDER/weights`` is what the repository holds. What lies there
already is gone on from, so that ``--small-from 0`` polishes. ``python -m tiny.judge`` makes the judge.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from bootstrap import flux_tiny
from bootstrap.bases import FLUX_TINY
from bootstrap.flux_shape import shift_of_tokens
from tiny.judge import FILE as JUDGE_FILE
from tiny.judge import load_judge, right
from tiny.scenes import COLOURS, KNOWN, SHAPES, caption, draw, random_scenes, standard_luck, varied_captions
from trainer.flow import image_ids, pack

ASPECTS = ((1.0, 1.0), (0.75, 1.25), (1.25, 0.75))  # height, width: what pictures of about 128 px are cut to
OFTEN = (0.8, 0.1, 0.1)
VAE_SHARE = 0.2  # of the seconds; the rest, but for what follows, is the flow's
PICTURES_SHARE = 0.04  # of the seconds, for the last pictures
VAE_RATE = 1e-3
KL = 1e-3  # of a latent's divergence beside a pixel's error: noise of about a tenth, which the decoder learns to bear
GUIDANCE = (1.0, 5.0)  # drawn evenly; 1 is no guidance
STRENGTH = 0.4  # classifier-free guidance of 1 + 0.4 (guidance - 1): 3.5, the usual one, extrapolates by 2
GUIDED_FROM = 0.6  # of the time in the whole world
STRANGE = 0.3  # of the small world's scenes have a strange shape, and as many a strange texture
OPEN = 0.2  # as often as in the whole world do the small one's captions leave things open
FRESH = 0.25  # of the steps draw new pictures; the others take one of the last batches with new noise
NAMES = {"transformer": "transformer", "text_encoder": "clip", "text_encoder_2": "t5"}  # files, and Drawer's parts


@dataclass(frozen=True)
class Options:
    out: Path
    seconds: float
    device: torch.device
    seed: int
    batch: int
    vae_batch: int
    pool: int
    side: int
    compile: bool
    small_from: float  # part of the flow's time
    rate: float

    @property
    def weights(self) -> Path:
        return self.out / "weights"


class Clock:
    """The time since the start; facts go with it to the screen and to ``progress.jsonl``."""

    def __init__(self, options: Options) -> None:
        options.weights.mkdir(parents=True, exist_ok=True)
        self.began, self.file = time.monotonic(), (options.out / "progress.jsonl").open("a")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tell(self, **facts: Any) -> None:
        line = json.dumps({"s": round(self.seconds, 1)} | facts)
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def parts(self, until: float) -> Iterator[float]:
        """The part of the time from now to ``until`` that is over, 0 to 1, again and again until it is."""
        first = self.seconds
        while (part := (self.seconds - first) / max(1e-9, until - first)) < 1:
            yield part


def rate(step: int, part: float, warmup: int = 200) -> float:
    """Linear warm-up, then half a cosine to nothing."""
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * part))


def _set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def _follow(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """The exponential average of the weights, short at first."""
    weight = 1 - min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight)


# ---- the VAE ----


def drawings(options: Options, seed: int) -> Iterator[torch.Tensor]:
    """Batches of drawings; the VAE sees the unseen shape and look too, as FLUX's has seen everything."""
    device = options.device
    chance = torch.Generator(device).manual_seed(seed)
    pool = random_scenes(np.random.default_rng(seed), options.pool, unseen=True)
    values = {name: torch.from_numpy(value).to(device) for name, value in pool.values.items()}
    while True:
        rows = torch.randint(options.pool, (options.vae_batch,), generator=chance, device=device)
        luck = torch.rand(options.vae_batch, 32, generator=chance, device=device)
        yield draw({name: value[rows] for name, value in values.items()}, luck, options.side, options.side)


def train_vae(options: Options, clock: Clock) -> Any:
    """The ``AutoencoderKL``, its shift and scale measured: latents of drawings have mean 0 and spread 1 after them."""
    vae = flux_tiny.new_vae().to(options.device, memory_format=torch.channels_last)
    with torch.no_grad():
        vae.encoder.conv_out.bias[16:] = -4.0  # log-variance: little noise at first
    fused = options.device.type == "cuda"
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_RATE, betas=(0.9, 0.98), weight_decay=1e-4, fused=fused)
    average = copy.deepcopy(vae).requires_grad_(False)
    if options.compile:
        vae.encoder.compile(dynamic=False)
        vae.decoder.compile(dynamic=False)
    batches = drawings(options, options.seed + 1)
    told = -1.0
    for step, part in enumerate(clock.parts(clock.seconds + options.seconds * VAE_SHARE)):
        pictures = next(batches).contiguous(memory_format=torch.channels_last)
        error, kl = _vae_losses(vae, pictures)
        optimizer.zero_grad(set_to_none=True)
        (error + KL * kl).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        _set_rate(optimizer, VAE_RATE * rate(step, part, 100))
        optimizer.step()
        _follow(average, vae, step, 0.995)
        if part - told > 0.05:
            told = part
            clock.tell(stage="vae", step=step, error=float(error.detach()), kl=float(kl.detach()))
    return measured(average.eval(), options, clock)


def _vae_losses(vae: Any, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kind = pictures.device.type
    with torch.autocast(kind, torch.bfloat16):
        mean, logvar = vae.encoder(pictures).float().chunk(2, dim=1)
    logvar = logvar.clamp(-20, 10)
    with torch.autocast(kind, torch.bfloat16):
        again = vae.decoder(mean + torch.randn_like(mean) * torch.exp(0.5 * logvar))
    difference = again.float() - pictures
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return difference.abs().mean() + difference.square().mean(), kl


@torch.no_grad()
def measured(vae: Any, options: Options, clock: Clock) -> Any:
    """Gives latents the mean and spread that FLUX's published shift and scale undo; tells how well it draws."""
    pictures = next(drawings(options, options.seed + 2))
    drawn = vae.encode(pictures).latent_dist.sample()
    rescale(vae, float(drawn.mean()), float(drawn.std()))
    latents = vae.encode(pictures).latent_dist
    again = vae.decode(latents.mean).sample.clamp(-1, 1)
    psnr = float(10 * torch.log10(4 / (again - pictures).square().mean()))
    by_channel = [round(float(x), 2) for x in latents.mean.std(dim=(0, 2, 3))]
    clock.tell(stage="vae", psnr=psnr, noise=float(latents.std.mean()), channels=by_channel)
    write_grid(torch.cat([pictures[:8], again[:8]]), options.out / "vae.png")
    save_part(options, "vae", vae)
    return vae


@torch.no_grad()
def rescale(vae: Any, mean: float, spread: float) -> None:
    """Latents of ``mean`` and ``spread`` become those of the configuration's shift and scale.

    z' = factor z + offset, written into the last layer before z and the first one behind it. Exact but at the
    picture's border, where that layer sees zeros for ``offset``, a fifteenth of the spread.
    """
    factor = 1 / (vae.config.scaling_factor * spread)
    offset = vae.config.shift_factor - mean * factor
    last, first = vae.encoder.conv_out, vae.decoder.conv_in
    last.weight[:16] *= factor
    last.bias[:16] = last.bias[:16] * factor + offset
    last.bias[16:] += 2 * math.log(factor)  # the log-variance
    first.weight /= factor
    first.bias -= first.weight.sum(dim=(1, 2, 3)) * offset


def load_vae(options: Options) -> Any:
    vae = flux_tiny.new_vae()
    vae.load_state_dict({name: t.float() for name, t in load_file(options.weights / "vae.safetensors").items()})
    return vae.to(options.device, memory_format=torch.channels_last).eval()


# ---- text encoders and transformer ----


class Drawer(nn.Module):
    """What learns together: words to velocities."""

    def __init__(self) -> None:
        super().__init__()
        clip_tokenizer, t5_tokenizer = flux_tiny.make_clip_tokenizer(), flux_tiny.make_t5_tokenizer()
        self.clip = flux_tiny.new_clip(len(clip_tokenizer), clip_tokenizer.eos_token_id, FLUX_TINY.pooled_size)
        self.t5 = flux_tiny.new_t5(len(t5_tokenizer), FLUX_TINY.text_size)
        self.transformer = flux_tiny.new_transformer(FLUX_TINY)
        _begin(self.transformer)

    def text(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.clip(clip_ids).pooler_output, self.t5(t5_ids)[0]

    def forward(
        self,
        text: tuple[torch.Tensor, torch.Tensor],
        x: torch.Tensor,
        sigma: torch.Tensor,
        guidance: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        nowhere = torch.zeros(text[1].shape[1], 3, device=x.device)
        return self.transformer(
            x, text[1], text[0], sigma, places, nowhere, guidance, return_dict=False
        )[0]  # fmt: skip


def _begin(transformer: nn.Module) -> None:
    """Every block begins as the identity: modulation and the last layer are nothing at first (DiT's adaLN-zero)."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if name == "proj_out" or name.endswith(("norm1.linear", "norm1_context.linear", "norm.linear")):
                nn.init.zeros_(module.weight)


def around_figures(values: dict[str, torch.Tensor], luck: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """4.4 on and close to figures, 0.4 elsewhere, for each place of the latents: [n, 1, height / 8, width / 8].

    Grounds are learned long before outlines are.
    """
    white, black = COLOURS.index("white"), COLOURS.index("black")
    plain = {name: torch.zeros_like(value) for name, value in values.items()}
    kept = {name: values[name] for name in ("count", "size", "position")}
    colours = {"colour": plain["colour"] + white, "ground": plain["ground"] + black}
    shapes = plain | kept | colours | {"shape": plain["shape"] + SHAPES.index("square")}
    squares = draw(shapes, luck, height // 4, width // 4)  # so coarse is enough
    near = F.max_pool2d((squares[:, :1] > 0).float(), 5, 1, 2)
    return 0.4 + 4 * F.avg_pool2d(near, 2)


def _begun(options: Options) -> Drawer:
    """With the weights of ``--out``, where there are some already."""
    drawer = Drawer()
    for name, part in NAMES.items():
        if (file := options.weights / f"{name}.safetensors").exists():
            tensors = {key: tensor.float() for key, tensor in load_file(file).items()}
            strange = getattr(drawer, part).load_state_dict(tensors, strict=False).unexpected_keys
            assert not strange, strange
    return drawer


@dataclass(frozen=True)
class Pool:
    """Scenes with captions in tokens, on the device; geometry and noise are drawn anew each time."""

    values: dict[str, torch.Tensor]
    clip_ids: torch.Tensor
    t5_ids: torch.Tensor
    small: bool

    @classmethod
    def of(cls, count: int, seed: int, device: torch.device, small: bool) -> Pool:
        chance = np.random.default_rng(seed)
        scenes = random_scenes(chance, count, among=KNOWN if small else None)
        if small:
            scenes = scenes.with_strangers(chance, STRANGE)
        captions = varied_captions(scenes, chance, OPEN if small else 1.0)
        for row in np.flatnonzero(chance.random(count) < (0.02 if small else 0.1)):
            captions[row] = ""
        values = {name: torch.from_numpy(value).to(device) for name, value in scenes.values.items()}
        return cls(values, *tokens(captions, device), small)

    def luck(self, count: int, chance: torch.Generator) -> torch.Tensor:
        """Where figures lie: in the small world always at the same places."""
        device = self.clip_ids.device
        return standard_luck(count).to(device) if self.small else torch.rand(count, 32, generator=chance, device=device)


def tokens(captions: list[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of CLIP, cut to as many as T5's (what follows the end token does not count), and of T5."""
    settings: dict[str, Any] = {"padding": "max_length", "max_length": flux_tiny.TEXT_TOKENS, "truncation": True}
    clip = flux_tiny.make_clip_tokenizer()(captions, return_tensors="np", **settings).input_ids
    t5 = flux_tiny.make_t5_tokenizer()(captions, return_tensors="np", **settings).input_ids
    return torch.as_tensor(clip).to(device), torch.as_tensor(t5).to(device)


@dataclass(frozen=True)
class Encoded:
    """Drawings as the VAE gives them: [n, 16, h, w] each."""

    mean: torch.Tensor
    spread: torch.Tensor
    counts: torch.Tensor  # what each place counts in the loss, [n, 1, h, w]

    def __getitem__(self, rows: torch.Tensor) -> Encoded:
        return Encoded(self.mean[rows].float(), self.spread[rows].float(), self.counts[rows].float())


@dataclass(frozen=True)
class Batch:
    drawn: Encoded
    ids: tuple[torch.Tensor, torch.Tensor]  # the captions' tokens


class FlowTraining:
    """Steps of flow matching on drawings, encoded by ``vae``."""

    def __init__(self, options: Options, vae: Any) -> None:
        self.options, self.device, self.vae = options, options.device, vae
        torch.manual_seed(options.seed + 3)
        self.drawer = _begun(options).to(self.device)
        self.average = copy.deepcopy(self.drawer).requires_grad_(False).eval()
        self.plain = copy.deepcopy(self.average)  # the average once more, not compiled: for pictures
        self.whole, self.small = (
            Pool.of(options.pool, options.seed + 4, self.device, small) for small in (False, True)
        )
        self.pool, self.encoded = self.whole, cast(Encoded | None, None)
        self.chance = torch.Generator(self.device).manual_seed(options.seed + 5)
        self.dice = np.random.default_rng(options.seed + 6)
        self.nothing = tokens([""], self.device)
        self.recent: dict[tuple[float, float], deque[Batch]] = {aspect: deque(maxlen=8) for aspect in ASPECTS}
        matrices = [p for p in self.drawer.parameters() if p.dim() >= 2]
        others = [p for p in self.drawer.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, options.rate, betas=(0.9, 0.98), fused=self.device.type == "cuda")
        if options.compile:
            for model in (self.drawer, self.average):
                for block in (*model.transformer.transformer_blocks, *model.transformer.single_transformer_blocks):
                    block.compile(dynamic=False)

    def warm_up(self, clock: Clock) -> None:
        """A step of each kind, which compiles all there is to compile; then all is as before."""
        before = copy.deepcopy(self.drawer.state_dict())
        whole = self.options.small_from > 0
        for aspect in ASPECTS if whole else ASPECTS[:1]:
            for guided in (False, True) if whole else (False,):
                loss = self.step(0, 0.0, guided, aspect)
                clock.tell(stage="warm-up", aspect=aspect, guided=guided, loss=float(loss))
        for model in (self.drawer, self.average):
            model.load_state_dict(before)
        self.optimizer.state.clear()
        self.live_in(self.whole)  # forgets the batches

    def live_in(self, pool: Pool) -> None:
        """Draws from ``pool`` from now on. Of the small world there are so few pictures that all are encoded now."""
        self.pool = pool
        self.encoded = self._encode(torch.arange(self.options.pool, device=self.device)) if pool.small else None
        for batches in self.recent.values():
            batches.clear()

    def batch(self, aspect: tuple[float, float]) -> Batch:
        if self.encoded:
            rows = self._rows()
            return Batch(self.encoded[rows], (self.pool.clip_ids[rows], self.pool.t5_ids[rows]))
        recent = self.recent[aspect]
        if len(recent) < 2 or self.dice.random() < FRESH:
            rows = self._rows()
            drawn = self._encode(rows, *(int(self.options.side * part) for part in aspect))
            recent.append(Batch(drawn, (self.pool.clip_ids[rows], self.pool.t5_ids[rows])))
            return recent[-1]
        return recent[self.dice.integers(len(recent))]

    def _rows(self) -> torch.Tensor:
        return torch.randint(self.options.pool, (self.options.batch,), generator=self.chance, device=self.device)

    @torch.no_grad()
    def _encode(self, rows: torch.Tensor, height: int | None = None, width: int | None = None) -> Encoded:
        """Scenes of the pool, drawn and encoded; as squares where no height and width are given."""
        size = height or self.options.side, width or self.options.side
        parts = [self._encode_some(some, *size) for some in rows.split(128)]
        return Encoded(*(torch.cat(each).contiguous() for each in zip(*parts, strict=True)))

    def _encode_some(
        self, rows: torch.Tensor, height: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = {name: value[rows] for name, value in self.pool.values.items()}
        luck = self.pool.luck(len(rows), self.chance)
        pictures = draw(values, luck, height, width).contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16):
            mean, logvar = self.vae.encoder(pictures).chunk(2, dim=1)
        counts = around_figures(values, luck, height, width) if self.pool.small else torch.ones_like(mean[:, :1])
        return mean, torch.exp(0.5 * logvar.float().clamp(-20, 10)).bfloat16(), counts.bfloat16()

    def step(self, index: int, part: float, guided: bool, aspect: tuple[float, float] | None = None) -> torch.Tensor:
        batch = self.batch(aspect or ASPECTS[0 if self.pool.small else self.dice.choice(3, p=OFTEN)])
        config, drawn = self.vae.config, batch.drawn
        fresh = torch.randn(drawn.mean.shape, generator=self.chance, device=self.device)
        latents = pack((drawn.mean + fresh * drawn.spread - config.shift_factor) * config.scaling_factor)
        places = image_ids(*drawn.mean.shape[2:]).to(self.device)
        shift = shift_of_tokens(len(places))
        # As many tokens as a square has, the first ones repeated: one compiled graph serves every aspect.
        order = torch.arange((self.options.side // 16) ** 2, device=self.device) % len(places)
        noise = torch.randn(latents.shape, generator=self.chance, device=self.device)[:, order]
        latents, places = latents[:, order], places[order]
        even = torch.sigmoid(torch.randn(len(latents), generator=self.chance, device=self.device))
        sigma = shift * even / (1 + (shift - 1) * even)
        if self.pool.small:  # half of them where it is decided what there will be
            high = 0.55 + 0.45 * torch.rand(len(latents), generator=self.chance, device=self.device) ** 0.7
            sigma = torch.where(torch.arange(len(latents), device=self.device) % 2 == 0, high, sigma)
        counts = pack(drawn.counts.expand_as(drawn.mean).contiguous())[:, order]
        loss = self._loss(latents, noise, sigma, batch.ids, places, guided, counts)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.drawer.parameters(), 1.0)
        _set_rate(self.optimizer, self.options.rate * rate(index, part))
        self.optimizer.step()
        _follow(self.average, self.drawer, index, 0.998)
        return loss.detach()

    def _loss(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        sigma: torch.Tensor,
        ids: tuple[torch.Tensor, torch.Tensor],
        places: torch.Tensor,
        guided: bool,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Half of the images have no guidance (1). Later a quarter is taught to extrapolate by it as much as the
        average would with and without words; before that half has one that means nothing."""
        n = len(latents)
        x = latents + (noise - latents) * sigma[:, None, None]
        target = noise - latents
        drawn = torch.rand(n, generator=self.chance, device=self.device) * (GUIDANCE[1] - GUIDANCE[0]) + GUIDANCE[0]
        taught = n // 4 if guided else n // 2
        guidance = torch.where(torch.arange(n, device=self.device) < taught, drawn, 1.0)
        with torch.autocast(self.device.type, torch.bfloat16):
            if guided:
                push = self._push(x[:taught], sigma[:taught], (ids[0][:taught], ids[1][:taught]), places)
                extra = STRENGTH * (guidance[:taught] - 1)[:, None, None] * push
                target = torch.cat([target[:taught] + extra, target[taught:]])
            prediction = self.drawer(self.drawer.text(*ids), x, sigma, guidance, places)
        return ((prediction.float() - target).square() * counts).mean()

    @torch.no_grad()
    def _push(
        self, x: torch.Tensor, sigma: torch.Tensor, ids: tuple[torch.Tensor, torch.Tensor], places: torch.Tensor
    ) -> torch.Tensor:
        """What the words change in the average's velocity: with them less without them."""
        n = len(x)
        both_ids = [torch.cat([said, nothing.expand(n, -1)]) for said, nothing in zip(ids, self.nothing, strict=True)]
        text = self.average.text(both_ids[0], both_ids[1])
        ones = torch.ones(2 * n, device=self.device)
        both = self.average(text, torch.cat([x, x]), torch.cat([sigma, sigma]), ones, places).float()
        return both[:n] - both[n:]

    def keep(self) -> Drawer:
        """The average, copied to where it is not compiled, and on the disk."""
        state = {name.replace("_orig_mod.", ""): tensor for name, tensor in self.average.state_dict().items()}
        self.plain.load_state_dict(state)
        for name, part in NAMES.items():
            save_part(self.options, name, getattr(self.plain, part))
        return self.plain


def train_flow(training: FlowTraining, options: Options, clock: Clock) -> None:
    losses: list[torch.Tensor] = []
    told, kept = 0.0, 0.0
    step = 0
    for part in clock.parts(options.seconds * (1 - PICTURES_SHARE)):
        if part >= options.small_from and not training.pool.small:
            training.live_in(training.small)
        guided = not training.pool.small and part > GUIDED_FROM * options.small_from
        losses.append(training.step(step, part, guided))
        step += 1
        if part - told > 0.025:
            told = part
            clock.tell(stage="flow", step=step, part=round(part, 3), loss=float(torch.stack(losses).mean()))
            losses.clear()
        if part - kept > 0.199:
            kept = part
            pictured(training.keep(), training.vae, options, clock, f"flow-{part:.1f}", 64)
    drawer = training.keep()
    clock.tell(stage="flow", step=step, saved=True)
    for guidance in (3.5, 1.0):
        pictured(drawer, training.vae, options, clock, f"final-{guidance:g}", 256, guidance)


# ---- what comes out ----


def save_part(options: Options, name: str, part: nn.Module) -> None:
    """One part as a file in bf16."""
    state = dict(part.state_dict())
    state.pop("encoder.embed_tokens.weight", None)  # T5's, tied to shared.weight
    tensors = {key: tensor.to(torch.bfloat16).contiguous().cpu() for key, tensor in state.items()}
    save_file(tensors, options.weights / f"{name}.safetensors")


@torch.no_grad()
def pictured(
    drawer: Drawer, vae: Any, options: Options, clock: Clock, name: str, count: int, guidance: float = 3.5
) -> None:
    """Draws captions that say everything, in one batch, by diffusers' pipeline; the judge's verdict goes to the log."""
    from diffusers import FluxPipeline

    count = count if options.device.type == "cuda" else 32
    wanted = random_scenes(np.random.default_rng(options.seed + 7), count, among=KNOWN)
    pipeline: Any = FluxPipeline(
        flux_tiny.make_scheduler(True), vae, drawer.clip, flux_tiny.make_clip_tokenizer(), drawer.t5,
        flux_tiny.make_t5_tokenizer(), drawer.transformer,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    with torch.autocast(options.device.type, torch.bfloat16):
        drawn = pipeline(
            [caption(wanted.words(row)) for row in range(count)], width=options.side, height=options.side,
            num_inference_steps=20, guidance_scale=guidance, max_sequence_length=flux_tiny.TEXT_TOKENS,
            generator=torch.Generator(options.device).manual_seed(0), output_type="pt",
        ).images  # fmt: skip
    pictures = drawn.float() * 2 - 1
    write_grid(pictures[:64], options.out / f"{name}.png")
    file = next((file for file in (options.out / "judge.safetensors", JUDGE_FILE) if file.exists()), None)
    verdict = right(load_judge(file).to(options.device), pictures, wanted) if file else {}
    clock.tell(picture=name, guidance=guidance, **{key: round(float(ok.mean()), 4) for key, ok in verdict.items()})


def write_grid(pictures: torch.Tensor, path: Path, columns: int = 8) -> None:
    """[n, 3, h, w] in -1 .. 1 as one PNG."""
    n, _, height, width = pictures.shape
    rows = -(-n // columns)
    sheet = torch.full((rows * columns, 3, height, width), 1.0, device=pictures.device)
    sheet[:n] = pictures.float().clamp(-1, 1)
    tiles = sheet.view(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2).reshape(rows * height, -1, 3)
    Image.fromarray(((tiles + 1) * 127.5).round().byte().cpu().numpy()).save(path)


def make(options: Options) -> None:
    clock = Clock(options)
    clock.tell(options={key: str(value) for key, value in asdict(options).items()}, torch=torch.__version__)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
    torch.backends.cuda.enable_cudnn_sdp(False)  # wrong in this model's backward pass; flash is right
    training = FlowTraining(options, flux_tiny.new_vae().to(options.device, memory_format=torch.channels_last).eval())
    training.warm_up(clock)
    made = (options.weights / "vae.safetensors").exists()
    training.vae = (load_vae(options) if made else train_vae(options, clock)).requires_grad_(False)
    train_flow(training, options, clock)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiny.recipe", description="Makes flux-tiny from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="a folder; made where it is not there")
    parser.add_argument("--seconds", type=float, default=600, help="that all of it may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=20240801)
    parser.add_argument("--batch", type=int, default=512, help="pictures in a step of the transformer")
    parser.add_argument("--vae-batch", type=int, default=64, help="pictures in a step of the VAE")
    parser.add_argument("--pool", type=int, default=1 << 16, help="scenes that there are captions for")
    parser.add_argument("--side", type=int, default=128, help="pixels, a multiple of 64")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="by default on a GPU alone")
    parser.add_argument("--small-from", type=float, default=0.35, help="part of the flow's time in the whole world")
    parser.add_argument("--rate", type=float, default=1e-3, help="the transformer's and text encoders' learning rate")
    given = parser.parse_args()
    device = torch.device(given.device)
    compiled = device.type == "cuda" if given.compile is None else given.compile
    make(
        Options(
            given.out,
            given.seconds,
            device,
            given.seed,
            given.batch,
            given.vae_batch,
            given.pool,
            given.side,
            compiled,
            given.small_from,
            given.rate,
        )
    )


if __name__ == "__main__":
    main()
