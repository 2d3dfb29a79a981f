"""Tells what a picture shows, without any part of flux-tiny: a small network that has only ever seen true drawings.

It scores what flux-tiny draws against the words of the prompt. It knows the unseen shape and look too, so that it can
tell whether fine-tuning taught them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tiny.scenes import ATTRIBUTES, Scenes, draw, random_scenes

SIDE = 128  # pixels of the pictures that it looks at
RATE = 2e-3
NOT_JUDGED = ("style",)  # flux-tiny has one, flat, and its VAE's edges are never quite sharp
FILE = Path(__file__).with_name("judge.safetensors")


class Judge(nn.Module):
    """Pictures [n, 3, 128, 128] in -1 .. 1 to logits [n, values] of every attribute."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 32, 2), (32, 48, 2), (48, 64, 1), (64, 96, 2), (96, 96, 1), (96, 96, 2))
        layers: list[nn.Module] = []
        for before, after, stride in sizes:
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.Conv2d(96, 24, 1), nn.Flatten(), nn.Linear(24 * 64, 192), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.heads = nn.ModuleDict({name: nn.Linear(192, len(words)) for name, words in ATTRIBUTES.items()})

    def forward(self, pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.body(pictures)
        return {name: head(seen) for name, head in self.heads.items()}

    @torch.inference_mode()
    def look(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """The likeliest value of every attribute, as an index: [n] each."""
        self.eval()
        if pictures.shape[2:] != (SIDE, SIDE):
            pictures = F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", antialias=True)
        parts = [self(part) for part in pictures.split(256)]
        return {name: torch.cat([part[name] for part in parts]).argmax(1).cpu().numpy() for name in ATTRIBUTES}


def right(judge: Judge, pictures: torch.Tensor, scenes: Scenes) -> dict[str, np.ndarray]:
    """Which pictures show what their scenes say: bool [n] for each attribute, and for ``all`` but style together.

    What a caption leaves open (-1, and a figure that may lie anywhere) is not judged: right.
    """
    seen = judge.look(pictures)
    verdict = {name: (seen[name] == wanted) | (wanted < 0) for name, wanted in scenes.values.items()}
    verdict["position"] |= scenes.values["position"] == 0
    judged = [ok for name, ok in verdict.items() if name not in NOT_JUDGED]
    return verdict | {"all": np.logical_and.reduce(judged)}


def train_judge(judge: Judge, seconds: float, batch: int, device: torch.device, seed: int = 0) -> int:
    """Trains on drawings alone, disturbed as a model's pictures are, for so long; gives the steps."""
    generator = torch.Generator(device).manual_seed(seed)
    pool = random_scenes(np.random.default_rng(seed), 1 << 16, unseen=True)
    values = {name: torch.from_numpy(value).to(device) for name, value in pool.values.items()}
    optimizer = torch.optim.AdamW(judge.parameters(), lr=RATE, weight_decay=0.01)
    judge.train().to(device)
    began, step = time.monotonic(), 0
    while (part := (time.monotonic() - began) / seconds) < 1:
        rows = torch.randint(len(pool), (batch,), generator=generator, device=device)
        labels = {name: value[rows] for name, value in values.items()}
        luck = torch.rand(batch, 32, generator=generator, device=device)
        pictures = _disturb(draw(labels, luck, SIDE, SIDE), generator)
        with torch.autocast(device.type, torch.bfloat16):
            logits = judge(pictures)
        loss = _loss(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * part))
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}, {100 * part:.0f} % of the time, loss {float(loss.detach()):.3f}", flush=True)
        step += 1
    judge.eval()
    return step


def _loss(logits: Mapping[str, torch.Tensor], labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), device=labels["shape"].device)
    for name, label in labels.items():
        ignored = label.masked_fill(label == 0, -100) if name == "position" else label  # anywhere: nothing to learn
        total = total + F.cross_entropy(logits[name].float(), ignored)
    return total


def _disturb(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Blurred, noisy, a little off in colour: what tells a drawing from a model's picture must not matter."""
    n, device = len(pictures), pictures.device
    luck = torch.rand(n, 6, generator=generator, device=device)[:, :, None, None, None]
    blurred = F.interpolate(F.avg_pool2d(pictures, 2), scale_factor=2, mode="bilinear")
    pictures = torch.where(luck[:, 0] < 0.3, blurred, pictures)
    pictures = pictures * (0.9 + 0.2 * luck[:, 1]) + 0.15 * (luck[:, 2:5, 0] - 0.5)
    noise = torch.randn(pictures.shape, generator=generator, device=device)
    return pictures + noise * 0.12 * luck[:, 5] ** 2


def examination(judge: Judge, device: torch.device, count: int = 4096, seed: int = 987654) -> dict[str, float]:
    """The share of true drawings, new to the judge, that it reads right: for each attribute and for all at once."""
    scenes = random_scenes(np.random.default_rng(seed), count, unseen=True)
    luck = torch.rand(count, 32, generator=torch.Generator().manual_seed(seed)).to(device)
    values = {name: torch.from_numpy(value).to(device) for name, value in scenes.values.items()}
    pictures = torch.cat(
        [
            draw({name: v[i : i + 256] for name, v in values.items()}, luck[i : i + 256], SIDE, SIDE)
            for i in range(0, count, 256)
        ]
    )
    return {name: float(ok.mean()) for name, ok in right(judge, pictures, scenes).items()}


def save_judge(judge: Judge, path: Path = FILE) -> None:
    part = path.with_suffix(".part")
    save_file({name: tensor.half().contiguous().cpu() for name, tensor in judge.state_dict().items()}, part)
    part.replace(path)


def load_judge(path: Path = FILE) -> Judge:
    judge = Judge()
    judge.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return judge.eval()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiny.judge", description="Trains the judge on drawings.")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--begin", type=Path, help="a judge to go on from")
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=20240801)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    judge = load_judge(options.begin) if options.begin else Judge()
    steps = train_judge(judge, options.seconds, options.batch, device, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_judge(judge, options.out)
    told = "  ".join(f"{name} {100 * share:.2f}" for name, share in examination(judge, device).items())
    print(f"{steps} steps. Of true drawings it reads right, in %: {told}")


if __name__ == "__main__":
    main()
