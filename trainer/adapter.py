"""LoRA by peft: which layers get an adapter, and how it starts."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from bootstrap.draws import Use, draw
from bootstrap.estimate import linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import AdapterLayer, adapters_of, lora_problems
from jobs.problem import JobError
from jobs.schema import Job, Lora
from trainer.dora import add_lengths
from trainer.dropout import Dropout, new_keys
from trainer.randomness import name_key

ADAPTER = "default"
_WEIGHT = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.default\.weight")


def layers_of(model: FluxTransformer2DModel, lora: Lora) -> dict[str, AdapterLayer]:
    """The adapter of each of the model's layers that gets one. Raises JobError for what cannot be with it."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if problems := lora_problems(linear, lora):
        raise JobError(problems)
    return adapters_of(linear, lora)


def paces(job: Job, shape: FluxShape) -> dict[str, float]:
    """The learning rates of adapted layers as multiples of the run's, where the job gives them one of their own."""
    layers = adapters_of(linear_layers(shape), job.lora) if job.lora else {}
    return {name: layer.learning_rate / job.learning_rate for name, layer in layers.items() if layer.learning_rate}


def add_adapter(model: FluxTransformer2DModel, lora: Lora, seed: int, images: int = 1) -> None:
    """Freezes the model, which has its weights, and gives it an adapter in float32 that changes nothing yet.

    The start depends on the seed and each layer's name alone: uniform within 1/sqrt(inputs), as LoRA's authors do.
    ``images``: the most that a pass has.
    """
    model.requires_grad_(False)
    layers = layers_of(model, lora)
    attach(model, ADAPTER, layers)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert modules.keys() == layers.keys()
    if lora.dora:
        for module in modules.values():
            add_lengths(module, ADAPTER)
    if lora.dropout:
        keys = new_keys(model, images, model.x_embedder.bias.device)
        for name, module in modules.items():
            module.lora_A[ADAPTER] = DroppingHalf(module.lora_A[ADAPTER].weight, Dropout(lora.dropout, keys, name))
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

    def __init__(self, weight: torch.Tensor):
        nn.Module.__init__(self)  # nn.Linear's own would make another weight
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.data)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class DroppingHalf(Half):
    """The first of the two where values between them are left out."""

    def __init__(self, weight: torch.Tensor, dropout: Dropout):
        super().__init__(weight)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


def multiply_in_type_of_input(module: LoraLayer, adapter: str, dtype: torch.dtype) -> None:
    """Left alone, peft turns the whole input of every adapted layer into float32 for its small matrices' sake."""
    module.cast_input_dtype_enabled = False
    for halves in (module.lora_A, module.lora_B):
        halves[adapter] = Half(halves[adapter].weight.data.to(dtype))
