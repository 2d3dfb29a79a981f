"""Which layers ``lora.targets`` means, by their diffusers module names, and what the adapter of each is: one answer for
the check, the estimate, the trainer and the files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

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
    layer = AdapterLayer(lora.rank, lora.alpha / lora.rank)
    return dict.fromkeys(target_layers(linear, lora.targets), layer)


def lora_problems(linear: Collection[str], lora: Lora) -> list[Problem]:
    """What in ``lora`` cannot be with a model of these linear layers."""
    some = next(name for name in linear if "attn" in name)
    remedy = f"Layers are called like {some}; '*' stands for anything"
    return [
        Problem(f"no layer of this base is called {pattern!r}", remedy, "lora.targets")
        for pattern in unmatched(linear, lora.targets)
    ]
