"""LoRA by peft: which layers get an adapter, how it starts, and its tensors in the layout that ComfyUI and Forge load.

That layout (kohya's) has BFL's module names. Where BFL fuses matrices that diffusers, and so the adapter, keeps apart,
the adapters become one: their down matrices stacked, their up matrices on the diagonal of a larger one, alpha times as
many as there are. The product is the same number for number, and the parts can be cut out again.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from bootstrap.draws import Use, draw
from bootstrap.layout import module_in_bfl
from bootstrap.lora_targets import AdapterLayer, adapters_of, lora_problems
from jobs.problem import JobError
from jobs.schema import Lora
from trainer.randomness import name_key

_WEIGHT = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.default\.weight")


class AdapterError(ValueError):
    """A file that is not this job's adapter."""


def layers_of(model: FluxTransformer2DModel, lora: Lora) -> dict[str, AdapterLayer]:
    """The adapter of each of the model's layers that gets one. Raises JobError for what cannot be with it."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if problems := lora_problems(linear, lora):
        raise JobError(problems)
    return adapters_of(linear, lora)


def add_adapter(model: FluxTransformer2DModel, lora: Lora, seed: int) -> None:
    """Freezes the model and gives it an adapter in float32 that changes nothing yet.

    The start depends on the seed and each layer's name alone: uniform within 1/sqrt(inputs), as LoRA's authors do.
    """
    model.requires_grad_(False)
    attach(model, "default", layers_of(model, lora))
    for name, parameter in model.named_parameters():
        if match := _WEIGHT.fullmatch(name):
            if match["half"] == "A":
                numbers = draw(seed, Use.ADAPTER, 0, name_key(match["module"])).random(parameter.shape, dtype="float32")
                bound = 1 / math.sqrt(parameter.shape[1])
                parameter.data.copy_(torch.from_numpy(numbers).mul_(2 * bound).sub_(bound))
            else:
                parameter.data.zero_()


def attach(
    model: FluxTransformer2DModel, adapter: str, layers: Mapping[str, AdapterLayer], dtype: torch.dtype = torch.float32
) -> None:
    """Gives these layers an adapter of that name by peft, without values yet."""
    by_rank: dict[int, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        by_rank[layer.rank].append(re.escape(name))
    # As one pattern: of a list, peft takes "proj_out" for the end of every block's proj_out too; so with ranks.
    exactly = "|".join(re.escape(name) for name in layers)
    ranks = {f"^(?:{'|'.join(names)})": rank for rank, names in by_rank.items()}
    model.add_adapter(LoraConfig(target_modules=exactly, rank_pattern=ranks), adapter)
    for name, layer in layers.items():
        module = model.get_submodule(name)
        assert isinstance(module, LoraLayer)
        assert module.r[adapter] == layer.rank
        module.scaling[adapter] = layer.scale
        multiply_in_type_of_input(module, adapter, dtype)


class Half(nn.Linear):
    """One of an adapter's two matrices: kept in float32, multiplied in the type of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def multiply_in_type_of_input(module: LoraLayer, adapter: str, dtype: torch.dtype) -> None:
    """Left alone, peft turns the whole input of every adapted layer into float32 for its small matrices' sake."""
    module.cast_input_dtype_enabled = False
    for halves in (module.lora_A, module.lora_B):
        old = halves[adapter]
        with torch.device("meta"):
            half = Half(old.in_features, old.out_features, bias=False)
        half.weight = nn.Parameter(old.weight.data.to(dtype))
        halves[adapter] = half


def to_kohya(weights: Mapping[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """Adapter tensors by peft's names, in kohya's layout. A layer of rank r is scaled by alpha / r in both."""
    fused: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
    for name, down in weights.items():
        match = _WEIGHT.fullmatch(name)
        assert match, name
        if match["half"] == "A":
            bfl_name, part = module_in_bfl(match["module"])
            fused[bfl_name][part] = (down, weights[name.replace(".lora_A.", ".lora_B.")])
    tensors = {}
    for bfl_name, parts in sorted(fused.items()):
        key = f"lora_unet_{bfl_name.replace('.', '_')}"
        downs = [parts[part][0] for part in sorted(parts)]
        rows = _fused_rows(bfl_name, parts)
        up = downs[0].new_zeros((sum(rows.values()), sum(d.shape[0] for d in downs)))
        column = 0
        for part, (down, half) in sorted(parts.items()):
            row = sum(count for other, count in rows.items() if other < part)
            up[row : row + half.shape[0], column : column + down.shape[0]] = _swap_modulation(bfl_name, half)
            column += down.shape[0]
        tensors[f"{key}.alpha"] = torch.tensor(alpha * len(parts), dtype=torch.float32)
        tensors[f"{key}.lora_down.weight"] = torch.cat(downs).contiguous()
        tensors[f"{key}.lora_up.weight"] = up
    return tensors


def from_kohya(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], rank: int, alpha: float
) -> dict[str, torch.Tensor]:
    """The inverse of ``to_kohya`` for adapter tensors called ``names``, all of rank ``rank``.

    A file of another alpha comes out with weights that mean the same under this one. Raises AdapterError where the file
    lacks a layer or its rank differs.
    """
    modules = sorted({match["module"] for name in names if (match := _WEIGHT.fullmatch(name))})
    shared: dict[str, dict[int, str]] = defaultdict(dict)
    for module in modules:
        bfl_name, part = module_in_bfl(module)
        shared[bfl_name][part] = module
    weights = {}
    for bfl_name, parts in shared.items():
        key = f"lora_unet_{bfl_name.replace('.', '_')}"
        try:
            down, up = tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"]
        except KeyError as error:
            raise AdapterError(f"the adapter has no {error.args[0]}") from error
        if down.shape[0] != rank * len(parts):
            raise AdapterError(f"{key} has rank {down.shape[0] // len(parts)}, not {rank}")
        told = float(tensors.get(f"{key}.alpha", torch.tensor(down.shape[0]))) / len(parts)
        strength = 1.0 if told == alpha or not alpha else told / alpha
        width = up.shape[0] // _units(bfl_name)
        for i, (part, module) in enumerate(sorted(parts.items())):
            columns = slice(i * rank, (i + 1) * rank)
            rows = slice(part * width, up.shape[0] if _is_last(bfl_name, part) else (part + 1) * width)
            weights[f"{module}.lora_A.default.weight"] = down[columns].contiguous()
            half = _swap_modulation(bfl_name, up[rows, columns]).contiguous()
            weights[f"{module}.lora_B.default.weight"] = half if strength == 1 else half * strength
    return weights


def _swap_modulation(bfl_name: str, up: torch.Tensor) -> torch.Tensor:
    """The last modulation gives scale, shift in diffusers and shift, scale in BFL's layout."""
    return torch.cat(up.chunk(2)[::-1]) if bfl_name == "final_layer.adaLN_modulation.1" else up


def _units(bfl_name: str) -> int:
    """A fused matrix's rows in widths of the model: q k v, and in single blocks 4 more; 1 where not fused."""
    if bfl_name.endswith(".qkv"):
        return 3
    return 7 if bfl_name.endswith(".linear1") else 1


def _is_last(bfl_name: str, part: int) -> bool:
    return part == {1: 0, 3: 2, 7: 3}[_units(bfl_name)]


def _fused_rows(bfl_name: str, parts: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[int, int]:
    """The rows of each part of a fused matrix, those without an adapter included."""
    some, (_, up) = next(iter(parts.items()))
    if _units(bfl_name) == 1:
        return {0: up.shape[0]}
    width = up.shape[0] // (4 if _units(bfl_name) == 7 and some == 3 else 1)
    return {0: width, 1: width, 2: width} | ({3: 4 * width} if _units(bfl_name) == 7 else {})
