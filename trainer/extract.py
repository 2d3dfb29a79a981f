"""``python -m trainer.extract TUNED --base MODEL --rank R --to FILE``: the LoRA that comes nearest to what a full
fine-tune changed; started by ``fluxpod extract``.

Of each matrix the difference is taken in float32, and its largest singular vectors by a randomised decomposition
(Halko, Martinsson, Tropp 2011, https://arxiv.org/abs/0909.4061). One matrix of each model is in memory at a time; the
models may be of different layouts and number formats.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bootstrap.estimate import linear_layers
from bootstrap.lora_file import LAYOUTS, Adapter, Layout, LowRank, tensors_of
from bootstrap.lora_targets import target_layers, unmatched
from bootstrap.outcome import DONE, JOB_WRONG
from bootstrap.tensor_files import TensorFileError
from jobs.problem import JobError
from trainer.file_hashes import with_places
from trainer.randomness import name_key
from trainer.tensor_output import DTYPES, ExportError, Progress, held, refuse_existing, write
from trainer.whole_model import WholeModel, open_model

OVERSAMPLING = 16  # singular vectors beyond the rank, which make those that are kept better
SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}
POWER_ITERATIONS = 4  # a fine-tune's singular values fall slowly; 4 comes within 1 % of the exact error (tests)


@dataclass(frozen=True)
class Captured:
    """How much of a layer's change the LoRA holds. ``change``: its Frobenius norm; ``error``: that of the rest;
    ``rounding``: what the fine-tune's number format has rounded, about, which is no change that anybody made."""

    module: str
    change: float
    error: float
    rounding: float = 0.0

    @property
    def lost(self) -> float:
        return self.error / self.change if self.change else 0.0


@torch.no_grad()
def nearest(change: torch.Tensor, rank: int, seed: int) -> tuple[LowRank, float]:
    """The LoRA of that rank nearest to ``change`` [outputs, inputs], its two matrices alike in size, and the Frobenius
    norm of what it leaves out. The same on every call with that seed."""
    rank = min(rank, *change.shape)
    more = min(rank + OVERSAMPLING, *change.shape)
    with torch.random.fork_rng([change.device] if change.is_cuda else []):
        torch.manual_seed(seed)
        left, sizes, right = torch.svd_lowrank(change, q=more, niter=POWER_ITERATIONS)
    root = sizes[:rank].sqrt()
    up, down = left[:, :rank] * root, (right[:, :rank] * root).T
    error = float((change - up @ down).norm())
    return LowRank(down.contiguous().cpu(), up.contiguous().cpu(), 1.0), error


def extract(
    tuned: WholeModel, base: WholeModel, rank: int, targets: str | Sequence[str] = "all-linear"
) -> tuple[Adapter, list[Captured], float]:
    """The adapter, how near it is for each layer that changed, and the norm of the change that no LoRA of these targets
    holds: other layers, biases, norms. Raises ExportError."""
    refuse_unlike(tuned, base)
    linear = linear_layers(base.shape)
    if strange := unmatched(linear, targets):
        raise ExportError(f"no layer is called {', '.join(strange)}; layers are called like {next(iter(linear))}")
    chosen = {f"{module}.weight" for module in target_layers(linear, targets)}
    adapter: Adapter = {}
    captured: list[Captured] = []
    outside = 0.0
    for name, change, rounding in _changes(tuned, base):
        size = float(change.norm())
        if size != size or size == float("inf"):
            raise ExportError(f"{name} holds NaN or infinity in one of the two models")
        if name not in chosen:
            outside += size**2
        elif size:
            module = name.removesuffix(".weight")
            adapter[module], error = nearest(change, rank, name_key(module) % 2**31)
            captured.append(Captured(module, size, error, rounding))
    return adapter, captured, outside**0.5


def _changes(tuned: WholeModel, base: WholeModel) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Each tensor's difference, float32, on a GPU where there is one, and what its number format rounds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Progress("extracting", base.shape.parameters()) as progress:
        for name in base.shape.tensors():
            weight = tuned.read(name).to(device)
            rounding = rounding_of(weight)
            change = weight.float() - base.read(name).to(device).float()
            yield name, change, rounding
            progress.add(change.numel())


def rounding_of(weight: torch.Tensor) -> float:
    """The norm of what was rounded in a tensor: errors spread evenly over the steps between neighbouring numbers."""
    bits = SIGNIFICANT_BITS.get(weight.dtype)
    if bits is None:
        return 0.0
    _, exponents = torch.frexp(weight[weight != 0].float())
    steps = torch.exp2((exponents - bits).float())
    return float((steps.square().sum(dtype=torch.float64) / 12).sqrt())


def refuse_unlike(tuned: WholeModel, base: WholeModel) -> None:
    """Raises ExportError where the two are not of one kind."""
    if tuned.shape == base.shape:
        return
    kinds = [
        f"{model.path}: {s.double_blocks} + {s.single_blocks} blocks of width {s.width}, "
        f"{'with' if s.guidance else 'without'} guidance"
        for model, s in ((tuned, tuned.shape), (base, base.shape))
    ]
    raise ExportError(f"the models are not of one kind: {'; '.join(kinds)}. Give the base that the tune was made from")


# ---------------------------------------------------------------- telling it


def summary(captured: Iterable[Captured], outside: float) -> list[str]:
    """A line for each kind of layer, all blocks together, the worst first, and one for the whole."""
    kinds: dict[str, list[Captured]] = defaultdict(list)
    for each in captured:
        kinds[re.sub(r"\.\d+\.", ".*.", each.module, count=1)].append(each)
    rows = sorted(((_lost(group), kind, len(group)) for kind, group in kinds.items()), reverse=True)
    lines = [f"{kind:48} {count:4} layers  {100 * lost:5.1f} % of the change is lost" for lost, kind, count in rows]
    every = [each for group in kinds.values() for each in group]
    change = (sum(each.change**2 for each in every) + outside**2) ** 0.5
    error = (sum(each.error**2 for each in every) + outside**2) ** 0.5
    beside = f", {100 * outside / change:.1f} % being in layers, biases and norms that it has not" if outside else ""
    lines.append(f"in all {100 * error / change:.1f} % of the change is lost{beside}")
    rounding = sum(each.rounding**2 for each in every) ** 0.5
    if rounding > 0.1 * change:
        share = min(100, 100 * rounding / change)
        lines.append(
            f"about {share:.0f} % of it is what the fine-tune's number format rounded: nothing that it learned"
        )
    return lines


def _lost(group: Sequence[Captured]) -> float:
    return float((sum(each.error**2 for each in group) / sum(each.change**2 for each in group)) ** 0.5)


def write_report(path: Path, captured: Iterable[Captured]) -> None:
    """Every layer's figures, as a table that spreadsheets read."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("layer", "change", "error", "lost"))
        rows.writerows(
            (each.module, f"{each.change:.6g}", f"{each.error:.6g}", f"{each.lost:.4f}") for each in captured
        )


def _metadata(tuned: WholeModel, base: WholeModel, rank: int, layout: Layout, name: str) -> dict[str, str]:
    kept: Mapping[str, str] = tuned.metadata
    told = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"flux-1-{'dev' if base.shape.guidance else 'schnell'}/lora",
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": kept.get("modelspec.title") or name,
        "modelspec.resolution": kept.get("modelspec.resolution", ""),
        "modelspec.license": kept.get("modelspec.license", ""),
        "modelspec.trigger_phrase": kept.get("modelspec.trigger_phrase", ""),
        "modelspec.description": f"extracted from {tuned.path.stem}, of rank {rank}",
        "ss_output_name": name,
        "ss_base_model_version": "flux1",
        "ss_sd_model_name": base.path.name,
        "ss_network_module": "networks.lora_flux",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(rank),
        "fluxpod.blocks": f"{base.shape.double_blocks}+{base.shape.single_blocks}",
        "fluxpod.layout": layout,
    }
    return with_places({key: text for key, text in told.items() if text})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fluxpod extract")
    parser.add_argument("tuned", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--targets", default="all-linear", help="names and patterns of lora.targets, with + between")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="kohya")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--saturate", action="store_true")
    chosen = parser.parse_args(arguments)
    targets = chosen.targets.replace(",", "+")
    try:
        report = chosen.to.with_name(f"{chosen.to.stem}-layers.csv")
        for target in (chosen.to, report):
            refuse_existing(target)
        if not 1 <= chosen.rank <= 1024:
            raise ExportError(f"--rank {chosen.rank} is not from 1 to 1024")
        with open_model(chosen.tuned) as tuned, open_model(chosen.base) as base:
            adapter, captured, outside = extract(tuned, base, chosen.rank, targets)
            if not adapter:
                raise ExportError(f"{chosen.tuned} and {chosen.base} do not differ in {chosen.targets}")
            metadata = _metadata(tuned, base, chosen.rank, chosen.layout, chosen.to.stem)
        write(chosen.to, held(tensors_of(adapter, chosen.layout)), DTYPES[chosen.dtype], metadata, chosen.saturate)
        write_report(report, captured)
    except (ExportError, TensorFileError, JobError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return JOB_WRONG
    print("\n".join(summary(captured, outside)))
    print(f"wrote {chosen.to}; each layer by itself: {report}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
