"""Between the adapter that is trained, by peft's names, and LoRA files (bootstrap/lora_file.py).

A saved file is read back before its state is published, and every layer's effective weight compared with the trainer's.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bootstrap.lora_file import Adapter, LoraFileError, LowRank, check_alike, is_exact, read_lora, some
from bootstrap.lora_targets import adapters_of
from bootstrap.state import State
from bootstrap.tensor_files import TensorFileError, open_tensors
from jobs.schema import Lora
from trainer.optimizer import Piece
from trainer.trained import Trained

_WEIGHT = re.compile(r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector)\.default\.weight")
KEPT = "adapter."  # before the names of what an optimizer's file keeps of the adapter itself
SAME_SCALE = 1e-6  # relative: a file's alpha is float32, and is divided again
PROBES = 2  # random inputs that the products are compared on
MOST_ERROR = 1e-5  # of a product's largest number: what float32 files may round


def adapter_in(weights: Mapping[str, torch.Tensor], lora: Lora) -> Adapter:
    """The trained tensors as a LoRA, sharing their memory."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in weights.items():
        match = _WEIGHT.fullmatch(name)
        assert match, name
        halves.setdefault(match["module"], {})[match["kind"]] = weight
    layers = adapters_of(halves, lora)
    return {
        module: LowRank(found["lora_A"], found["lora_B"], layers[module].scale, found.get("lora_magnitude_vector"))
        for module, found in halves.items()
    }


def kept_pieces(tensors: Iterable[Trained], lora: Lora) -> list[Piece]:
    """What a state's optimizer file keeps beside the optimizer: the adapter itself, where the layout of its own file
    does not hold every number to the bit. So a run goes on as if it had never stopped, whatever its file looks like."""
    tensors = list(tensors)
    if is_exact(adapter_in({tensor.name: tensor.weight for tensor in tensors}, lora), lora.layout):
        return []
    return [Piece(KEPT + tensor.name, tensor.weight, tensor.shape) for tensor in tensors]


# ---------------------------------------------------------------- going on from one


@torch.no_grad()
def load_adapter(file: Path, tensors: list[Trained], lora: Lora) -> None:
    """Fills the adapter from a LoRA file of any layout. Raises LoraFileError where it has other layers or ranks, and
    TensorFileError where it is no such file."""
    wanted = adapter_in({tensor.name: tensor.weight for tensor in tensors}, lora)
    found = read_lora(file, {module: each.rank for module, each in wanted.items()})
    check_alike(found, lora, {module: each.size for module, each in wanted.items()}, f"{file}")
    for tensor in tensors:
        match = _WEIGHT.fullmatch(tensor.name)
        assert match
        each = found[match["module"]]
        if match["kind"] == "lora_A":
            tensor.weight.copy_(each.down)
        elif match["kind"] == "lora_B":
            tensor.weight.copy_(each.up)
            scale = wanted[match["module"]].scale
            if scale and not math.isclose(each.scale, scale, rel_tol=SAME_SCALE):
                tensor.weight.mul_(each.scale / scale)
        else:
            assert each.magnitude is not None
            tensor.weight.copy_(each.magnitude)


@torch.no_grad()
def resume_adapter(state: State, tensors: list[Trained], lora: Lora) -> None:
    """Fills the adapter from a state, to the bit. Raises as ``load_adapter`` does."""
    with open_tensors(state.optimizer) as reader:
        names = {tensor.name: KEPT + tensor.name for tensor in tensors}
        if not any(name in reader.header.tensors for name in names.values()):
            load_adapter(state.model, tensors, lora)
            return
        for tensor in tensors:
            entry = reader.header.tensors.get(names[tensor.name])
            if entry is None or entry.shape != tensor.shape:
                raise TensorFileError(f"{state.optimizer} keeps another adapter: {tensor.name} is not in it")
            tensor.weight.copy_(reader.read(names[tensor.name]))


# ---------------------------------------------------------------- is the file what was trained


@torch.no_grad()
def products(adapter: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """Each layer's effective weight times the same random inputs, [outputs, PROBES], float64 on the CPU; with a DoRA's
    lengths beside them.

    Two matrices that agree on a random vector are the same with probability 1 (Freivalds), so a fraction of a second
    stands for the products themselves, 10 GB for FLUX.1-dev.
    """
    found = {}
    for module, each in sorted(adapter.items()):
        generator = torch.Generator().manual_seed(each.down.shape[1])
        probes = torch.randn((each.down.shape[1], PROBES), generator=generator, dtype=torch.float64)
        told = each.scale * (each.up.double() @ (each.down.double() @ probes.to(each.down.device)))
        if each.magnitude is not None:
            told = torch.cat([told, each.magnitude.double()[:, None]], dim=1)
        found[module] = told.cpu()
    return found


@dataclass(frozen=True)
class Expected:
    """What a state's LoRA file must hold."""

    products: dict[str, torch.Tensor]
    ranks: dict[str, int]

    @classmethod
    def of(cls, tensors: Iterable[Trained], lora: Lora) -> Expected:
        adapter = adapter_in({tensor.name: tensor.weight for tensor in tensors}, lora)
        return cls(products(adapter), {module: each.rank for module, each in adapter.items()})

    def check(self, file: Path) -> None:
        """Reads the file as any tool would, and compares. Raises OSError: what lies on the volume is not what was
        trained."""
        try:
            found = products(read_lora(file, self.ranks))
        except (LoraFileError, TensorFileError) as error:
            raise OSError(errno.EIO, f"the LoRA that was just written cannot be read back: {error}") from error
        off = [_difference(module, found.get(module), told) for module, told in self.products.items()]
        off += [f"{module}, which was not trained" for module in sorted(found.keys() - self.products.keys())]
        if wrong := [difference for difference in off if difference]:
            raise OSError(errno.EIO, f"{file.name} does not hold what was trained: {some(wrong)}")


def _difference(module: str, found: torch.Tensor | None, expected: torch.Tensor) -> str:
    """How far a layer is off, in words; "" where it is right. One that adds nothing yet may be left out."""
    if found is None:
        return f"{module} is not there" if expected.any() else ""
    if found.shape != expected.shape:
        return f"{module} has other lengths or another size"
    # Each column by its own size: a DoRA's lengths are thousands of times what little was learned so far.
    most, error = expected.abs().amax(dim=0), (found - expected).abs().amax(dim=0)
    off = ~(error <= MOST_ERROR * most)
    return f"{module} is off by {error[off][0]:.3g} where {most[off][0]:.3g} is the most" if off.any() else ""
