"""What a pod was measured to do, against what its GPUs should: plain values, the verdict, and words for both.

Measured by ``entrypoint/probe.py`` (and, on the GPUs, ``trainer/probe.py``), kept in ``runs/<name>/pod.json``, and used
again while it is the same GPUs of the same boot: two pods of one name and price were seen to differ by a factor of
four, but one pod does not change from one start to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bootstrap.gpus import GpuModel, find_gpu
from bootstrap.nvidia_smi import Gpu, Health
from bootstrap.processes import boot_id
from bootstrap.volume import write_atomically

# What is measured on each card, in this order, and the seconds it may take before it is cut off.
CARD_PARTS = {
    "device": 20.0,
    "8-bit step": 15.0,
    "matrix product": 10.0,
    "attention": 8.0,
    "memory": 6.0,
    "from host": 6.0,
    "to host": 6.0,
}
UNITS = {"matrix product": "TFLOP/s", "attention": "TFLOP/s"}  # the others GB/s
DECISIVE = ("matrix product", "attention", "memory")  # what a step consists of
P2P_GAIN = 1.3  # without P2P this much faster than with it: then it goes without


@dataclass(frozen=True)
class Measure:
    name: str
    where: str  # "GPU 0", "GPUs 0-3", "volume", ...
    value: float | None  # None: not measured, and ``note`` says why
    unit: str
    normal: float | None = None  # what it should reach; None where nobody has told
    note: str = ""

    @property
    def share(self) -> float | None:
        return self.value / self.normal if self.value is not None and self.normal else None


@dataclass(frozen=True)
class CardFacts:
    """One GPU as torch, the second witness, sees it."""

    index: int  # nvidia-smi's
    name: str
    memory: int  # bytes
    capability: tuple[int, int]
    torch: str  # its version
    cuda: str  # the version it is built for
    kernels: tuple[str, ...]  # the architectures it has kernels for: sm_80, ..., compute_120


@dataclass(frozen=True)
class Probe:
    """Everything that was found on a pod."""

    hardware: str
    seconds: float
    measures: tuple[Measure, ...]
    cards: tuple[CardFacts, ...] = ()
    health: tuple[tuple[int, Health], ...] = ()  # of each GPU, at work
    faults: tuple[tuple[int, str], ...] = ()  # GPUs that cannot train, and why
    p2p: bool = True
    apart: bool = False  # the GPUs do not reach each other, with P2P or without
    notes: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        write_atomically(path, _PROBE.dump_json(self, indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Probe | None:
        """None where there is none, or another version's."""
        try:
            return _PROBE.validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


_PROBE = TypeAdapter(Probe)


def hardware(gpus: Iterable[Gpu]) -> str:
    """What a probe holds for: these GPUs, on this host, since it was booted."""
    return " ".join([boot_id(), *(f"{gpu.index}:{gpu.uuid or gpu.name}" for gpu in gpus)])


def known_probe(runs: Path, gpus: Iterable[Gpu], least: float | None) -> Probe | None:
    """The newest probe of this hardware by any run of the volume, if nothing was wrong with it. A pod that was found
    too slow or ill is measured again: what slowed it may have gone."""
    here = hardware(gpus)
    found = []
    for path in runs.glob("*/pod.json"):
        probe = Probe.read(path)
        if probe and probe.hardware == here and not (probe.faults or probe.apart or too_slow(probe, least)):
            found.append((path.stat().st_mtime, probe))
    return max(found, key=lambda pair: pair[0])[1] if found else None


# ---------------------------------------------------------------- the verdict


def normal_of(part: str, model: GpuModel | None) -> float | None:
    """What a healthy card of this model reaches in one part, in the part's unit."""
    if model is None:
        return None
    return {
        "matrix product": model.normal_tflops,
        "attention": model.normal_attention,
        "memory": model.normal_bandwidth,
        "from host": model.normal_host_link,
        "to host": model.normal_host_link,
    }.get(part)


def slowest(probe: Probe) -> Measure | None:
    """The decisive measure that is furthest below normal; training waits for it. None on a pod without known GPUs."""
    judged = [each for each in probe.measures if each.name in DECISIVE and each.share is not None]
    return min(judged, key=lambda each: each.share or 0.0, default=None)


def too_slow(probe: Probe, least: float | None) -> str:
    """Why a job that asks for ``least`` of the normal speed does not run here; "" where it does."""
    worst = slowest(probe)
    if least is None or worst is None or worst.share is None or worst.share >= least:
        return ""
    reasons = "".join(f" {line}." for line in health_lines(probe))
    return (
        f"{verdict(probe)}. The job asks for {least:.0%} at least (least_speed).{reasons} Delete this pod and deploy "
        "another: hosts of one name and price differ. Or lower least_speed, to run here all the same."
    )


def verdict(probe: Probe) -> str:
    """The pod's speed in one sentence."""
    worst = slowest(probe)
    if worst is None or worst.share is None:
        why = "its GPUs are not in the table" if probe.cards else "no GPU of it was measured"
        return f"How fast this pod should be is not known: {why}"
    gpu = next((card for card in probe.cards if f"GPU {card.index}" == worst.where), None)
    model = find_gpu(gpu.name) if gpu else None
    name = model.name if model else worst.where
    said = f"This pod runs at {worst.share:.0%} of a normal {name} ({worst.where}, {worst.name})"
    return said if worst.share >= 0.7 else f"{said}: change it"


def kernels_for(capability: tuple[int, int], kernels: Iterable[str]) -> bool:
    """Whether a torch built for these architectures runs on a card: machine code (sm_86) runs on the same major version
    from its minor one on, intermediate code (compute_90) on everything newer. CUDA's programming guide, 'binary
    compatibility'. A suffix (sm_90a) ties code to the one architecture."""
    for name in kernels:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if digits != number and built != capability:
            continue
        if kind == "compute" and built <= capability:
            return True
        if kind == "sm" and built[0] == capability[0] and built <= capability:
            return True
    return False


def no_kernels(card: CardFacts) -> str:
    """Why torch has nothing to run on a card, "" where it has."""
    if not card.kernels or kernels_for(card.capability, card.kernels):
        return ""
    major, minor = card.capability
    return (
        f"GPU {card.index} ({card.name}) has compute capability {major}.{minor}; this image's torch {card.torch} (CUDA "
        f"{card.cuda}) has kernels for {', '.join(card.kernels)} only. Choose another GPU, or an image of fluxpod that "
        "is built for this one (Blackwell needs CUDA 12.8 or newer; CUDA 13 dropped what is older than 7.5)"
    )


# ---------------------------------------------------------------- words


def render(probe: Probe) -> str:
    """A table of everything measured, and the verdict."""
    rows = [(each.where, each.name, *_cells(each)) for each in probe.measures]
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(3)]
    lines = [f"This pod, measured in {probe.seconds:.0f} s"]
    before = ""
    for where, name, value, told in rows:
        shown = "" if where == before else where
        before = where
        lines.append(f"  {shown:<{widths[0]}}  {name:<{widths[1]}}  {value:>{widths[2]}}  {told}".rstrip())
    lines += [f"  {line}" for line in health_lines(probe, quiet=False)]
    lines += [f"! {note}" for note in (*(fault for _, fault in probe.faults), *probe.notes)]
    return "\n".join([*lines, *([verdict(probe)] if probe.cards else [])])


def _cells(measure: Measure) -> tuple[str, str]:
    if measure.value is None:
        return "-", measure.note or "not measured"
    number = f"{measure.value:.0f}" if measure.value >= 20 else f"{measure.value:.1f}"
    if measure.share is None or measure.normal is None:
        return f"{number} {measure.unit}", measure.note
    told = f"{measure.share:4.0%} of the {measure.normal:.0f} that is normal"
    return f"{number} {measure.unit}", f"{told}; {measure.note}" if measure.note else told


def health_lines(probe: Probe, quiet: bool = True) -> list[str]:
    """What the driver says of each card at work; ``quiet``: only what is wrong."""
    lines = []
    for index, health in probe.health:
        told = [*([] if quiet else _state_of(health)), *health.slowed]
        if health.ecc_errors:
            told.append(f"{health.ecc_errors} uncorrected memory errors (ECC)")
        if health.page_retirement_pending:
            told.append("bad memory pages wait for a reset of the card")
        if told:
            lines.append(f"GPU {index} at work: {', '.join(told)}")
    return lines


def _state_of(health: Health) -> list[str]:
    told = []
    if health.clock and health.most_clock:
        told.append(f"{health.clock:.0f} of {health.most_clock:.0f} MHz")
    if health.temperature is not None:
        told.append(f"{health.temperature:.0f} °C")
    if health.power and health.power_limit:
        told.append(f"{health.power:.0f} of {health.power_limit:.0f} W")
    if health.power_capped:
        told.append("held by its power limit")
    if health.ecc_errors == 0:
        told.append("no ECC errors")
    return told
