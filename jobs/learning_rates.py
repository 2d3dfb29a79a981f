"""Which learning rates work, by optimizer and method: the defaults, and what is warned of."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Below ``least`` nothing happens in the steps that people pay for; above ``most`` pictures fall apart."""

    least: float
    usual: float
    most: float


_BY_FAMILY: dict[str, dict[str, Rates]] = {
    # Every weight moves by the whole rate, so the authors take 3 to 10 times less than Adam's: arXiv 2302.06675.
    "Lion": {"lora": Rates(3e-6, 2e-5, 4e-4), "full": Rates(1e-7, 2e-6, 1e-5)},
    # torch's multiplies the rate by the weights' own size: 0.01 in an adapter, 1 / sqrt(3 x 3072 inputs), and 0.02 in
    # FLUX. Computed from Adam's, not measured: the same steps at 100 and 50 times the rate.
    "Adafactor": {"lora": Rates(1e-3, 1e-2, 0.1), "full": Rates(2e-5, 5e-4, 5e-3)},
    # It finds the rate by itself and multiplies it by this.
    "Prodigy": {"lora": Rates(0.1, 1.0, 2.0), "full": Rates(0.1, 1.0, 2.0)},
    # Seen to work with stochastic rounding. A LoRA's rate in a full run is the common mistake.
    "Adam": {"lora": Rates(2e-5, 1e-4, 2e-3), "full": Rates(5e-7, 1e-5, 5e-5)},
}


def family_of(optimizer: object) -> str | None:
    """Of a known optimizer; None of one given by its import path, which has a scale of its own."""
    known = isinstance(optimizer, str) and "." not in optimizer
    return next((name for name in _BY_FAMILY if name in str(optimizer)), None) if known else None


def rates_of(optimizer: object, method: str) -> Rates | None:
    family = family_of(optimizer)
    return _BY_FAMILY[family][method] if family else None
