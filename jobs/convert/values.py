"""Values that the tools write in their own ways: models, paths, optimizers, sizes, prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def is_off(value: Any) -> bool:
    """Whether a value means: not used. Other tools write 0 or "" for what is switched off."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "0", "0.0", "none", "false", "no")
    return value is None or value is False or value == 0 or value in ([], {}, ())


def is_empty(value: Any) -> bool:
    return value is None or value in ([], {}, ()) or (isinstance(value, str) and not value.strip())


def as_number(value: Any) -> float | None:
    """1e-4, "1e-4" and " 0.0001 " as the number they are; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


# ---------------------------------------------------------------- models and paths

DEV = "black-forest-labs/FLUX.1-dev"
_OFFICIAL = re.compile(r"flux\.?1?-(?P<which>krea-dev|dev|schnell)(-(fp8|fp16|bf16|e4m3fn|e5m2|scaled|sft|diffusers))*")
_OFFICIAL_IDS = {
    "dev": DEV,
    "schnell": "black-forest-labs/FLUX.1-schnell",
    "krea-dev": "black-forest-labs/FLUX.1-Krea-dev",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")


def base_of(model: str) -> tuple[str, str]:
    """The base that a model's path or id means, and what is to be said of it.

    The published files, under their usual names, are those of the hub, which brings all parts.
    """
    model = model.strip()
    if not model:
        return DEV, "the source names no model"
    stem = re.sub(r"\.(safetensors|sft)$", "", re.split(r"[\\/]", model)[-1].lower()).replace("_", "-")
    if match := _OFFICIAL.fullmatch(stem):
        base = _OFFICIAL_IDS[match["which"]]
        return base, "" if model == base else f"was {model}"
    if re.search(r"\.(safetensors|sft)$", model, re.IGNORECASE):
        return path_here(model, "models")
    if _HUB_ID.fullmatch(model) and not _WINDOWS.match(model):
        return model, ""
    if re.search(r"\.(ckpt|pt|pth|bin|gguf)$", model, re.IGNORECASE):
        return DEV, f"{model} is no .safetensors file, and cannot be read"
    return path_here(model, "models")


def path_here(path: str, folder: str) -> tuple[str, str]:
    """A path as a job may name it, and what to copy where. What lies on another computer is expected in ``folder`` of
    the volume; an absolute path, or one below the volume, stays as it is."""
    clean = "".join(letter for letter in path.strip() if ord(letter) >= 32)
    parts = [part for part in re.split(r"[\\/]+", clean) if part not in ("", ".")]
    if not parts:
        return f"{folder}/my-files", "the source names no path: write yours"
    if clean.startswith("/") and not clean.startswith("//"):
        return "/" + "/".join(parts), ""
    if _WINDOWS.match(clean) or ".." in parts or parts[0] == "~":
        here = f"{folder}/{parts[-1].rstrip(':')}"
        return here, f"was {path.strip()}: copy it there, on the volume"
    return "/".join(parts), "below the volume"


def name_of(text: str) -> str:
    """A run's name made of any text."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100]
    return slug or "converted"


# ---------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class Chosen:
    """An optimizer of ours for one of another tool."""

    name: str
    weight_decay: float | None = 0.01  # what that tool uses where nothing is written; None where it takes none
    args: dict[str, Any] = field(default_factory=dict)  # needed to make it the same
    remark: str = ""


# transformers' Adafactor, which both tools use; torch's, our Adafactor, always scales by the size of the weights, so
# that a rate found with scale_parameter=False would do next to nothing there.
_ADAFACTOR = Chosen(
    "transformers.optimization.Adafactor",
    0.0,
    {"relative_step": False},
    "the one that the source used; plain Adafactor is torch's, which scales otherwise",
)
_BY_NAME = {
    "adamw": Chosen("AdamW"),
    "adam": Chosen("torch.optim.Adam", 0.0),
    "adamw8bit": Chosen("AdamW8bit"),
    "adam8bit": Chosen("AdamW8bit", 0.0, remark="without weight decay it is Adam"),
    "pagedadamw": Chosen("PagedAdamW32bit", remark="PagedAdamW is the one with 32 bits"),
    "pagedadamw8bit": Chosen("PagedAdamW8bit"),
    "pagedadamw32bit": Chosen("PagedAdamW32bit"),
    "lion8bit": Chosen("Lion8bit", 0.0),
    "pagedlion8bit": Chosen("PagedLion8bit", 0.0),
    "lion": Chosen("Lion8bit", 0.0, remark="nearest to Lion: its states in 8 bits"),
    "adafactor": _ADAFACTOR,
    "prodigy": Chosen("Prodigy", 0.0),
    "sgdnesterov": Chosen("torch.optim.SGD", 0.0, {"momentum": 0.9, "nesterov": True}),
    "sgdnesterov8bit": Chosen("torch.optim.SGD", 0.0, {"momentum": 0.9, "nesterov": True}),
}


def optimizer_of(name: str) -> Chosen | None:
    """The optimizer that ``name`` means in these tools, in any case; None for one that only they bring along."""
    known = _BY_NAME.get(name.strip().lower().replace("_", ""))
    if known is not None:
        return known
    if re.fullmatch(r"(torch|bitsandbytes|transformers|prodigyopt)(\.\w+)+", name):
        return Chosen(name, None, remark="weight_decay is 0.01 here unless it is written")
    return None


# ---------------------------------------------------------------- sizes


def resolution_of(value: Any) -> int | None:
    """512, "512", "512,512", [768, 512]: the side of the square of the same area, in steps of 16; None for no size."""
    sides = value if isinstance(value, (list, tuple)) else str(value).replace("x", ",").split(",")
    numbers = [as_number(side if not isinstance(side, str) else side.strip()) for side in sides]
    if not 1 <= len(numbers) <= 2 or any(number is None or number <= 0 for number in numbers):
        return None
    first, last = float(numbers[0] or 0), float(numbers[-1] or 0)
    return min(max(round((first * last) ** 0.5 / 16) * 16, 64), 2048)


def in_steps_of_16(value: float, least: int, most: int) -> int:
    return min(max(round(value / 16) * 16, least), most)


# ---------------------------------------------------------------- prompts

# After a prompt: --w 768 --h 1024 --s 20 --d 42 --g 3.5 --l 1 --n "what not to draw"
_OPTION = re.compile(r"(?:^|\s)--(?P<name>[A-Za-z]\w*)(?:\s+(?P<value>(?:(?!\s--[A-Za-z]).)*))?", re.DOTALL)
_PROMPT_OPTIONS = {
    "w": "width",
    "h": "height",
    "s": "steps",
    "steps": "steps",
    "d": "seed",
    "seed": "seed",
    "g": "guidance",
    "l": "guidance",
    "cfg": "guidance",
}


@dataclass(frozen=True)
class Drawn:
    """A sample as the source writes it: the prompt, what of its options has a key here, and the others."""

    prompt: str
    options: dict[str, float]
    others: dict[str, str]


def drawn_of(line: str) -> Drawn:
    """A line of prompts. ``l`` was the guidance of FLUX before the tools had ``g``, which wins where both stand."""
    prompt = line[: match.start()] if (match := _OPTION.search(line)) else line
    options: dict[str, float] = {}
    others: dict[str, str] = {}
    for match in _OPTION.finditer(line):
        name, value = match["name"], (match["value"] or "").strip()
        number = as_number(value)
        ours = _PROMPT_OPTIONS.get(name)
        if ours is None or number is None or (name in ("l", "cfg") and re.search(r"(^|\s)--g\s", line)):
            others[name] = value
        else:
            options[ours] = number
    return Drawn(prompt.strip(), options, others)


def prompt_lines(text: str) -> list[str]:
    """The prompts in a text: one a line, without remarks."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def lost_options(samples: Sequence[Drawn]) -> dict[str, list[str]]:
    """What single prompts ask for and cannot have: options without a key here; with their values."""
    lost: dict[str, list[str]] = {}
    for sample in samples:
        for name, text in sample.others.items():
            lost.setdefault(f"--{name}", []).append(text)
    return lost
