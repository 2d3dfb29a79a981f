"""Which layers ``lora.targets`` means, by their diffusers module names: one answer for the estimate and the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_ATTENTION = ("*.attn.*",)
# A single block keeps its feed-forward in proj_mlp and proj_out.
_SINGLE = "single_transformer_blocks.*"
_FEED_FORWARD = ("*.ff.*", "*.ff_context.*", f"{_SINGLE}.proj_mlp", f"{_SINGLE}.proj_out")
_PATTERNS = {
    "all-linear": ("*",),
    "attention": _ATTENTION,
    "attention+feed-forward": (*_ATTENTION, *_FEED_FORWARD),
}


def patterns_of(targets: str | Sequence[str]) -> tuple[str, ...]:
    """The patterns behind a name of ``lora.targets``, or the written ones. ``*`` stands for anything, dots too."""
    return _PATTERNS[targets] if isinstance(targets, str) else tuple(targets)


def target_layers(linear: Iterable[str], targets: str | Sequence[str]) -> list[str]:
    """Those of the linear layers that get an adapter, in their order."""
    patterns = patterns_of(targets)
    return [name for name in linear if any(fnmatchcase(name, pattern) for pattern in patterns)]


def unmatched(linear: Sequence[str], targets: str | Sequence[str]) -> list[str]:
    """The patterns that no layer is called by."""
    return [pattern for pattern in patterns_of(targets) if not target_layers(linear, (pattern,))]
