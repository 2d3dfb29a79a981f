"""Which layers ``lora.targets`` means, by their diffusers module names, and what the adapter of each is: one answer for
the check, the estimate, the trainer and the files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bootstrap.layout import module_in_bfl
from jobs.problem import Problem
from jobs.schema import Lora

_ATTENTION = ("*.attn.*",)
# A single block keeps its feed-forward in proj_mlp and proj_out.
_SINGLE = "single_transformer_blocks.*"
_FEED_FORWARD = ("*.ff.*", "*.ff_context.*", f"{_SINGLE}.proj_mlp", f"{_SINGLE}.proj_out")
_PATTERNS = {
    "attention": _ATTENTION,
    "feed-forward": _FEED_FORWARD,
    "modulation": ("*.norm1.linear", "*.norm1_context.linear", f"{_SINGLE}.norm.linear", "norm_out.linear"),
    "embedders": ("x_embedder", "context_embedder", "time_text_embed.*", "proj_out"),
    "all-linear": ("*",),
}


@dataclass(frozen=True)
class AdapterLayer:
    """The adapter of one layer: W + scale * B A, with A [rank, inputs] and B [outputs, rank]."""

    rank: int
    scale: float
    learning_rate: float | None = None  # None: the run's

    @property
    def alpha(self) -> float:
        """As files tell it: what they divide by the rank."""
        return self.scale * self.rank


def patterns_of(targets: str | Sequence[str]) -> tuple[str, ...]:
    """The patterns behind names of ``lora.targets``, and those written. ``*`` stands for anything, dots too."""
    names = targets.split("+") if isinstance(targets, str) else targets
    return tuple(pattern for name in names for pattern in _PATTERNS.get(name, (name,)))


def target_layers(linear: Iterable[str], targets: str | Sequence[str]) -> list[str]:
    """Those of the linear layers that get an adapter, in their order."""
    patterns = patterns_of(targets)
    return [name for name in linear if any(fnmatchcase(name, pattern) for pattern in patterns)]


def unmatched(linear: Collection[str], targets: str | Sequence[str]) -> list[str]:
    """The patterns that no layer is called by."""
    return [pattern for pattern in patterns_of(targets) if not target_layers(linear, (pattern,))]


def adapters_of(linear: Iterable[str], lora: Lora) -> dict[str, AdapterLayer]:
    """The adapter of each layer that gets one, in the layers' order."""
    found = {}
    for name in target_layers(linear, lora.targets):
        rank, alpha, rate = lora.rank, None, None
        for entry in lora.layers:
            if target_layers((name,), entry.match):
                rank = entry.rank if entry.rank is not None else rank
                alpha = entry.alpha if entry.alpha is not None else alpha
                rate = entry.learning_rate if entry.learning_rate is not None else rate
        strength = lora.alpha / lora.rank if alpha is None else alpha / rank
        found[name] = AdapterLayer(rank, strength * math.sqrt(rank) if lora.rslora else strength, rate)
    return found


def lora_problems(linear: Collection[str], lora: Lora) -> list[Problem]:
    """What in ``lora`` cannot be with a model of these linear layers."""
    problems = []
    some = next(name for name in linear if "attn" in name)
    remedy = f"Layers are called like {some}; '*' stands for anything"
    for pattern in unmatched(linear, lora.targets):
        problems.append(Problem(f"no layer of this base is called {pattern!r}", remedy, "lora.targets"))
    adapted = target_layers(linear, lora.targets)
    for index, entry in enumerate(lora.layers):
        key = f"lora.layers[{index}].match"
        strange = unmatched(linear, entry.match)
        for pattern in strange:
            problems.append(Problem(f"no layer of this base is called {pattern!r}", remedy, key))
        if not strange and not target_layers(adapted, entry.match):
            told = "has no effect: no layer with an adapter is meant"
            problems.append(Problem(told, "Add these layers to lora.targets, or delete the entry", key))
    return problems or _parts_left_out(linear, adapted, lora)


def _parts_left_out(linear: Iterable[str], adapted: Collection[str], lora: Lora) -> list[Problem]:
    """A DoRA tells the length of every row of a matrix, and kohya's layout has one matrix of q, k and v (and proj_mlp):
    all of them need one."""
    if not lora.dora or lora.layout != "kohya":
        return []
    fused: dict[str, list[str]] = defaultdict(list)
    for name in linear:
        fused[module_in_bfl(name)[0]].append(name)
    for parts in fused.values():
        absent = [name for name in parts if name not in adapted]
        if 0 < len(absent) < len(parts):
            told = (
                f"leaves out {', '.join(absent)}, which are one matrix with others in the file; with dora all need one"
            )
            return [Problem(told, "Add them to lora.targets, or write layout: diffusers", "lora.targets")]
    return []
