"""``python -m trainer.merge LORA... --base MODEL --to FILE``: LoRAs put into a full checkpoint; started by ``fluxpod
merge``.

Tensor by tensor: memory holds the LoRAs and one tensor of the model, in float32; what is added is rounded once, to the
format of the file.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from bootstrap.flux_shape import FluxShape
from bootstrap.lora_file import Adapter, LoraFileError, check_fits, left_out, read_lora
from bootstrap.outcome import DONE, JOB_WRONG
from bootstrap.tensor_files import TensorFileError, read_header
from jobs.problem import JobError
from trainer.tensor_output import DTYPES, ExportError, Progress, cast, refuse_existing
from trainer.whole_model import MODEL_LAYOUTS, ModelLayout, open_model, write_model


@dataclass(frozen=True)
class Ingredient:
    """A LoRA that goes in, and how much of it."""

    path: Path
    strength: float
    adapter: Adapter
    metadata: Mapping[str, str]


def read_ingredient(path: Path, strength: float, shape: FluxShape, any_base: bool) -> Ingredient:
    """A LoRA that fits a model of that shape. Raises LoraFileError, TensorFileError."""
    found = Ingredient(path, strength, read_lora(path), read_header(path).metadata)
    check_fits(found.adapter, shape, f"{path}")
    if not any_base and (told := another_base(found.metadata, shape)):
        raise LoraFileError(f"{path} was {told}. Give that base, or --any-base to merge it all the same")
    return found


def another_base(metadata: Mapping[str, str], shape: FluxShape) -> str:
    """In what the file says that it was trained on something else than a model of this shape; "" where it does not."""
    kind = metadata.get("modelspec.architecture", "").lower()
    this = "dev, with guidance" if shape.guidance else "schnell, without guidance"
    if ("schnell" in kind and shape.guidance) or ("flux-1-dev" in kind and not shape.guidance):
        return f"trained on {kind.partition('/')[0]}, and the base is of the kind of FLUX.1-{this}"
    blocks, here = metadata.get("fluxpod.blocks"), f"{shape.double_blocks}+{shape.single_blocks}"
    if blocks and blocks != here:
        return f"trained on a FLUX of {blocks} blocks, and the base has {here}"
    return ""


def merge(
    base: Path,
    loras: Sequence[tuple[Path, float]],
    target: Path,
    layout: ModelLayout,
    dtype: str | None,
    saturate: bool = False,
    any_base: bool = False,
) -> str:
    """Writes ``target``; gives a line that says what changed. Raises ExportError, LoraFileError, JobError, and OSError.

    Several LoRAs go in one after the other. Without a ``dtype`` each tensor keeps that of the base.
    """
    refuse_existing(target)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with open_model(base) as model:
        ingredients = [read_ingredient(path, strength, model.shape, any_base) for path, strength in loras]
        chosen = DTYPES[dtype] if dtype else None
        changed: dict[str, Change] = {}

        @torch.no_grad()
        def read(name: str) -> torch.Tensor:
            weight = model.read(name)
            module, kind = name.rsplit(".", 1)
            using = [each for each in ingredients if module in each.adapter] if kind == "weight" else []
            if using:
                before = after = weight.to(device).float()
                for each in using:  # not in one go: a DoRA takes the length of what is there
                    after = each.adapter[module].on(device).applied_to(after, each.strength)
                if not bool(torch.isfinite(after).all()):
                    raise ExportError(f"{name} would hold NaN or infinity: nothing was written")
                changed[module] = Change.of(before, after, chosen or model.dtypes[name])
                weight = after.cpu()
            progress.add(weight.numel())
            return weight

        with Progress("merging", model.shape.parameters()) as progress:
            told = _metadata(model.metadata, base, model.shape, ingredients, layout)
            write_model(target, layout, model, chosen, told, saturate, read)
    return f"{len(changed)} layers changed, {_told(changed.values())}"


@dataclass(frozen=True)
class Change:
    """What a LoRA did to one weight: sums of squares of the weight, of the change, and of what its format rounds."""

    weight: float
    change: float
    rounding: float

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> Change:
        rounded = cast(after, dtype)[0].float() - after
        return cls(*(float(each.square().sum()) for each in (before, after - before, rounded)))


def _told(changes: Iterable[Change]) -> str:
    """A weak LoRA in a coarse format may drown in its rounding: that should not be found out from pictures."""
    weight, change, rounding = (sum(each) for each in zip(*map(astuple, changes), strict=True))
    if not change:
        return "by nothing: the LoRA adds 0"
    share = 100 * (rounding / change) ** 0.5
    moved = 100 * (change / weight) ** 0.5
    return f"their weights by {moved:.2g} % in all; what the format rounds is {share:.2g} % of that"


def _metadata(
    of_base: Mapping[str, str], base: Path, shape: FluxShape, loras: Sequence[Ingredient], layout: str
) -> dict[str, str]:
    names = [each.metadata.get("modelspec.title") or each.path.stem for each in loras]
    triggers = dict.fromkeys(each.metadata.get("modelspec.trigger_phrase", "") for each in loras)
    mixed = [f"{name} ({each.strength:g})" for name, each in zip(names, loras, strict=True)]
    told = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"flux-1-{'dev' if shape.guidance else 'schnell'}",
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": " + ".join([of_base.get("modelspec.title") or base.stem, *names]),
        "modelspec.merged_from": ", ".join([base.stem, *mixed]),
        "modelspec.trigger_phrase": ", ".join(filter(None, triggers)),
        "fluxpod.layout": layout,
    }
    kept = {"modelspec.resolution", "modelspec.license", "fluxpod.base", "fluxpod.blocks"}
    return {k: v for k, v in of_base.items() if k in kept} | {k: v for k, v in told.items() if v}


def strength_of(text: str) -> tuple[Path, float]:
    """``FILE`` or ``FILE@0.8``: strength 1 where none is told."""
    path, at, number = text.rpartition("@")
    try:
        strength = float(number) if at else math.nan
    except ValueError:
        return Path(text), 1.0  # an @ of the file's name
    if at and not math.isfinite(strength):
        raise ExportError(f"{number} is no strength: write for example {path}@0.8")
    return (Path(path), strength) if at else (Path(text), 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fluxpod merge")
    parser.add_argument("loras", nargs="+", metavar="LORA", help="a file, or FILE@STRENGTH")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--layout", choices=MODEL_LAYOUTS, default="bfl")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--saturate", action="store_true")
    parser.add_argument("--any-base", action="store_true")
    chosen = parser.parse_args(arguments)
    try:
        loras = [strength_of(text) for text in chosen.loras]
        told = merge(chosen.base, loras, chosen.to, chosen.layout, chosen.dtype, chosen.saturate, chosen.any_base)
        notes = filter(None, (left_out(path) for path, _ in loras))
    except (ExportError, LoraFileError, TensorFileError, JobError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return JOB_WRONG
    print("\n".join([*notes, f"wrote {chosen.to}: {told}"]))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
