"""LoRA files in every layout that FLUX tools write, as what they mean: a pair of small matrices for each linear layer.

Two layouts are written. kohya's, which ComfyUI and Forge load, has BFL's modules: where BFL fuses matrices that
diffusers keeps apart, the parts' down matrices are stacked and their up matrices lie on the diagonal of a larger one,
so q, k and v of rank r become one of rank 3r, and a single block's linear1 one of 4r. diffusers' (PEFT's) has its own
modules and no alpha: the scale is multiplied into the up matrices.

Read are both of them, fused matrices whose parts share one down matrix (kohya's trainer), and any spelling of either's
modules: with dots or underscores, under the usual prefixes. What is not understood is an error, never passed over; a
LoRA of the text encoders beside that of the transformer is left out, which ``left_out`` tells.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from bootstrap.estimate import linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.layout import module_in_bfl
from bootstrap.lora_targets import adapters_of
from bootstrap.tensor_files import read_header, read_tensors
from jobs.schema import Lora

Layout = Literal["kohya", "diffusers"]
LAYOUTS: tuple[Layout, ...] = ("kohya", "diffusers")

# The longest first: what stands before a module's name. Underscores for dots follow the first three.
_PREFIXES = (
    *("lora_transformer_", "lora_unet_", "lycoris_"),
    *("base_model.model.transformer.", "base_model.model.", "model.diffusion_model.", "diffusion_model."),
    *("transformer.", ""),
)
_ENDINGS = {
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_A.default.weight": "down",
    ".lora_B.default.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".alpha": "alpha",
    ".dora_scale": "magnitude",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_magnitude_vector.default.weight": "magnitude",
}
_BLOCK_NUMBER = re.compile(r"blocks[._](\d+)[._]")
_MOST_BLOCKS = 200  # FLUX.1-dev has 57
_OTHER_KINDS = {  # what a name holds that is no LoRA of the transformer
    "lokr_": "a LoKr, which is no LoRA",
    "hada_": "a LoHa, which is no LoRA",
    "oft_": "an OFT, which is no LoRA",
    "glora": "a GLoRA, which is no LoRA",
    ".processor.": "XLabs' own layout",
    ".diff": "whole differences beside the LoRA",
    ".bias": "changed biases beside the LoRA",
    "norm": "changed norms beside the LoRA",
    "lora_mid": "a LoRA of convolutions",
}
# What other tools train along with the transformer, in whatever layout: the encoders stay as they are here.
_OF_TEXT_ENCODERS = re.compile(r"(base_model\.model\.)?(lora_te\d?_|lycoris_te\d?_|text_encoders?(_\d)?\.)")
LISTED = 5  # names in a message; the rest is counted


class LoraFileError(ValueError):
    """A file that is no LoRA for this model, or whose meaning is not certain; the message says what and where."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """What a LoRA adds to one linear layer's weight: ``scale * up @ down``.

    ``down``: [rank, inputs]; ``up``: [outputs, rank]. With a ``magnitude`` (DoRA; [outputs]), each row of the sum of
    weight and product is then brought to that length.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of the layer."""
        return self.up.shape[0], self.down.shape[1]

    def on(self, device: torch.device) -> LowRank:
        magnitude = None if self.magnitude is None else self.magnitude.to(device)
        return replace(self, down=self.down.to(device), up=self.up.to(device), magnitude=magnitude)

    def product(self) -> torch.Tensor:
        """``scale * up @ down``, float32."""
        return self.scale * (self.up.float() @ self.down.float())

    def applied_to(self, weight: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
        """The layer's weight with so much of the LoRA in it, float32. DoRA: https://arxiv.org/abs/2402.09353."""
        weight = weight.float()
        if self.magnitude is None:
            return torch.addmm(weight, self.up.float(), self.down.float(), alpha=self.scale * strength)
        whole = weight + self.product()
        # A row of zeros has no direction, and stays.
        whole *= (self.magnitude.float() / whole.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny))[:, None]
        return torch.lerp(weight, whole, strength) if strength != 1 else whole


Adapter = dict[str, LowRank]  # by diffusers' name of the layer


@lru_cache(maxsize=8)
def _modules(blocks: int) -> tuple[dict[str, tuple[str, int]], dict[str, str], dict[str, str]]:
    """For a FLUX of so many blocks of each kind: BFL's module and part of each of diffusers' linear layers; and every
    spelling of diffusers' and of BFL's modules."""
    shape = FluxShape(double_blocks=blocks, single_blocks=blocks)
    places = {module: module_in_bfl(module) for module in linear_layers(shape)}
    fused = dict.fromkeys(name for name, _ in places.values())
    ours = {spelling: module for module in places for spelling in (module, module.replace(".", "_"))}
    theirs = {spelling: module for module in fused for spelling in (module, module.replace(".", "_"))}
    return places, ours, theirs


@lru_cache(maxsize=4096)
def _parts(bfl_name: str) -> tuple[str, ...]:
    """The modules of diffusers that a module of BFL's is made of, by their rows from the first on."""
    number = _BLOCK_NUMBER.search(bfl_name)
    alike = bfl_name.replace(number[0], "blocks.0.") if number else bfl_name  # all blocks of a kind are
    places, _, _ = _modules(1)
    found = sorted((part, module) for module, (name, part) in places.items() if name == alike)
    return tuple(m.replace("blocks.0.", number[0]) if number else m for _, m in found)


def _part_rows(bfl_name: str, rows: int) -> list[slice]:
    """Which rows of a fused matrix are whose: q, k and v have a third each, and in linear1, with the feed-forward's
    four parts behind them, a seventh."""
    count = len(_parts(bfl_name))
    width = rows // (7 if count == 4 else count)
    starts = [i * width for i in range(count)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], rows], strict=True)]


def swap_halves(bfl_name: str, rows: torch.Tensor) -> torch.Tensor:
    """The last modulation gives scale, shift in diffusers and shift, scale in BFL's layout."""
    return torch.cat(rows.chunk(2)[::-1]) if bfl_name == "final_layer.adaLN_modulation.1" else rows


# ---------------------------------------------------------------- writing


def tensors_of(adapter: Mapping[str, LowRank], layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA file, by name. Raises LoraFileError for a DoRA of a part of a fused matrix."""
    return _kohya(adapter) if layout == "kohya" else _diffusers(adapter)


def is_exact(adapter: Mapping[str, LowRank], layout: Layout) -> bool:
    """Whether ``tensors_of`` keeps every number to the bit; else some up matrices are multiplied, and rounded."""
    if layout == "diffusers":
        return all(each.scale == 0 or abs(math.frexp(each.scale)[0]) == 0.5 for each in adapter.values())
    scales = defaultdict(set)
    for module, each in adapter.items():
        scales[module_in_bfl(module)[0]].add(each.scale)
    return all(len(some) == 1 for some in scales.values())


def _kohya(adapter: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    fused: dict[str, dict[int, LowRank]] = defaultdict(dict)
    for module, each in adapter.items():
        bfl_name, part = module_in_bfl(module)
        fused[bfl_name][part] = each
    tensors = {}
    for bfl_name, parts in sorted(fused.items()):
        key = f"lora_unet_{bfl_name.replace('.', '_')}"
        whole = _joined(bfl_name, dict(sorted(parts.items())))
        tensors[f"{key}.alpha"] = torch.tensor(whole.scale * whole.rank, dtype=torch.float32)
        tensors[f"{key}.lora_down.weight"] = whole.down
        tensors[f"{key}.lora_up.weight"] = whole.up
        if whole.magnitude is not None:
            tensors[f"{key}.dora_scale"] = whole.magnitude[:, None].contiguous()
    return tensors


def _joined(bfl_name: str, parts: Mapping[int, LowRank]) -> LowRank:
    """The parts of a fused matrix as one; rows of those without an adapter stay zero."""
    some, one = next(iter(parts.items()))
    count = len(_parts(bfl_name))
    # A single block's feed-forward part has four of the seven widths that linear1 has.
    rows = one.up.shape[0] if count == 1 else one.up.shape[0] // (4 if some == 3 else 1) * (7 if count == 4 else 3)
    with_lengths = [number for number, part in parts.items() if part.magnitude is not None]
    if 0 < len(with_lengths) < count:
        absent = ", ".join(module for number, module in enumerate(_parts(bfl_name)) if number not in with_lengths)
        raise LoraFileError(
            f"kohya's layout has one length for each row of {bfl_name}, and this DoRA leaves out {absent}: "
            "target these too, or take the layout of diffusers"
        )
    scale = max((part.scale for part in parts.values()), key=abs)
    up = one.up.new_zeros((rows, sum(part.rank for part in parts.values())))
    column = 0
    for number, part in parts.items():
        half = part.up if part.scale == scale else part.up * (part.scale / scale)
        up[_part_rows(bfl_name, rows)[number], column : column + part.rank] = swap_halves(bfl_name, half)
        column += part.rank
    magnitudes = [part.magnitude for part in parts.values() if part.magnitude is not None]
    magnitude = swap_halves(bfl_name, torch.cat(magnitudes)) if magnitudes else None
    return LowRank(torch.cat([part.down for part in parts.values()]).contiguous(), up, scale, magnitude)


def _diffusers(adapter: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    tensors = {}
    for module, each in adapter.items():
        tensors[f"transformer.{module}.lora_A.weight"] = each.down.contiguous()
        tensors[f"transformer.{module}.lora_B.weight"] = (each.up * each.scale).contiguous()
        if each.magnitude is not None:
            tensors[f"transformer.{module}.lora_magnitude_vector"] = each.magnitude.contiguous()
    return tensors


# ---------------------------------------------------------------- reading


def is_lora(names: Iterable[str]) -> bool:
    """Whether a file with tensors of these names means to be one, whatever its layout."""
    return any(".lora_" in name or ".lora." in name or name.startswith("lora_") for name in names)


def left_out(path: Path) -> str:
    """What of a LoRA's file ``read_lora`` leaves out, in words; "" where that is nothing. Raises TensorFileError."""
    count = sum(bool(_OF_TEXT_ENCODERS.match(name)) for name in read_header(path).tensors)
    return f"{path} holds a LoRA of text encoders too ({count} tensors), which is left out" if count else ""


def read_lora(path: Path, ranks: Mapping[str, int] | None = None) -> Adapter:
    """The transformer's LoRA in a file; ``ranks`` of its layers, where known, tell how a fused matrix was made.

    Raises LoraFileError, with all that is wrong, and TensorFileError for what is no safetensors file.
    """
    header = read_header(path)
    if not is_lora(header.tensors):
        raise LoraFileError(f"{path} is no LoRA: its first tensors are {some(sorted(header.tensors)[:3])}")
    try:
        return adapter_of(read_tensors(path), _told_config(path, header.metadata), ranks)
    except LoraFileError as error:
        raise LoraFileError(f"{path}: {error}") from None


def adapter_of(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, ranks: Mapping[str, int] | None = None
) -> Adapter:
    """What a file's tensors mean. ``config``: PEFT's, where the file brings it. Raises LoraFileError."""
    problems = _Problems()
    layers = _layers(tensors, problems)
    adapter: Adapter = {}
    for name, found in sorted(layers.items()):
        whole = _low_rank(name, found, config, problems)
        if whole is None:
            continue
        for module, part in _cut(name, whole, ranks).items() if found.fused else [(name, whole)]:
            if module in adapter:
                problems.add("has two sets of weights for one layer", module)
            adapter[module] = part
    problems.raise_if_any()
    if not adapter:
        raise LoraFileError("it holds no LoRA weights of the transformer")
    return adapter


@dataclass
class _Problems:
    """What is wrong with a file, by kind, with the names that it concerns."""

    found: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, name: str) -> None:
        self.found[kind].append(name)

    def raise_if_any(self) -> None:
        told = [f"{kind}: {some(names)}" for kind, names in self.found.items()]
        if told:
            more = f"; and {len(told) - LISTED} things more" if len(told) > LISTED else ""
            raise LoraFileError("; ".join(told[:LISTED]) + more)


@dataclass
class _Layer:
    """The tensors of one module, by their role."""

    fused: bool  # named as BFL names it
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def _layers(tensors: Mapping[str, torch.Tensor], problems: _Problems) -> dict[str, _Layer]:
    numbers = [int(match[1]) for name in tensors if (match := _BLOCK_NUMBER.search(name))]
    _, ours, theirs = _modules(min(1 + max(numbers, default=0), _MOST_BLOCKS))
    layers: dict[str, _Layer] = {}
    for name, tensor in tensors.items():
        if _OF_TEXT_ENCODERS.match(name):
            continue
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        stem = name.removesuffix(ending) if ending else name
        plain = [stem.removeprefix(prefix) for prefix in _PREFIXES if stem.startswith(prefix)]
        module = next((names[each] for each in plain for names in (ours, theirs) if each in names), None)
        if ending is None or module is None:
            kind = next((told for part, told in _OTHER_KINDS.items() if part in name), "names that FLUX does not have")
            problems.add(f"it holds {kind}", name)
            continue
        layer = layers.setdefault(module, _Layer(fused=module in theirs))
        if layer.tensors.setdefault(_ENDINGS[ending], tensor) is not tensor:
            problems.add("has two sets of weights for one layer", name)
    return layers


def _low_rank(name: str, layer: _Layer, config: Mapping[str, Any] | None, problems: _Problems) -> LowRank | None:
    """The tensors of one module put together, or None, and a problem more."""
    down, up = layer.tensors.get("down"), layer.tensors.get("up")
    if down is None or up is None:
        problems.add("lacks one of the two matrices of", name)
        return None
    if down.shape[2:] == up.shape[2:] == (1, 1):  # some tools write matrices as 1 x 1 convolutions
        down, up = down[:, :, 0, 0], up[:, :, 0, 0]
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
        problems.add(f"has matrices that do not fit each other, {tuple(up.shape)} and {tuple(down.shape)}", name)
        return None
    if layer.fused and up.shape[0] % {1: 1, 3: 3, 4: 7}[len(_parts(name))]:
        problems.add(f"has {up.shape[0]} rows, which q, k and v cannot share", name)
        return None
    alpha, magnitude = layer.tensors.get("alpha"), layer.tensors.get("magnitude")
    if alpha is not None and alpha.numel() != 1:
        problems.add("has an alpha that is no number", name)
        return None
    if magnitude is not None and magnitude.shape[-1:] == (down.shape[1],) != (up.shape[0],):
        problems.add("is a DoRA over the inputs, which is not what the paper and PEFT do", name)
        return None
    if magnitude is not None and magnitude.numel() != up.shape[0]:
        problems.add(f"has {magnitude.numel()} lengths for {up.shape[0]} rows", name)
        return None
    used = [each for each in (down, up, alpha, magnitude) if each is not None]
    if not all(each.is_floating_point() and bool(torch.isfinite(each.float()).all()) for each in used):
        problems.add("holds NaN or infinity, or whole numbers", name)
        return None
    scale = float(alpha) / down.shape[0] if alpha is not None else _told_scale(name, down.shape[0], config)
    # 16 and 8 bits become 32 without a change, and what is computed with them later is not rounded to them again.
    return LowRank(down.float(), up.float(), scale, None if magnitude is None else magnitude.float().reshape(-1))


def _cut(bfl_name: str, fused: LowRank, ranks: Mapping[str, int] | None) -> Adapter:
    """A fused matrix as the layers of diffusers that it is made of."""
    modules = _parts(bfl_name)
    if len(modules) == 1:
        magnitude = None if fused.magnitude is None else swap_halves(bfl_name, fused.magnitude)
        return {modules[0]: replace(fused, up=swap_halves(bfl_name, fused.up), magnitude=magnitude)}
    rows = _part_rows(bfl_name, fused.up.shape[0])
    parts: Adapter = {}
    for module, own, columns in zip(modules, rows, _columns(fused.up, rows, modules, ranks), strict=True):
        magnitude = None if fused.magnitude is None else fused.magnitude[own]
        if magnitude is not None and not len(columns):
            columns = torch.arange(1)  # of zeros: its lengths count all the same
        if len(columns):
            up = fused.up[own][:, columns].contiguous()
            parts[module] = LowRank(fused.down[columns].contiguous(), up, fused.scale, magnitude)
    return parts


def _columns(
    up: torch.Tensor, rows: Sequence[slice], modules: Sequence[str], ranks: Mapping[str, int] | None
) -> list[torch.Tensor]:
    """Which columns of a fused up matrix each part uses.

    Its own run of them where all else is zero: by the known ranks, or the same for each. Otherwise those that are not
    zero in its rows: all of them where the parts share one down matrix. All choices have the same product.
    """
    rank = up.shape[1]
    known = [ranks.get(module, 0) for module in modules] if ranks is not None else []
    if known and all(each in (0, rank) for each in known) and sum(known) != rank:
        return [torch.arange(each) for each in known]
    for counts in (known, [rank // len(modules)] * len(modules)):
        runs = torch.arange(rank).split(counts) if sum(counts) == rank else ()
        if runs and not any(bool(up[own][:, _without(run, rank)].any()) for own, run in zip(rows, runs, strict=True)):
            return list(runs)
    return [up[own].any(dim=0).nonzero()[:, 0] for own in rows]


def _without(run: torch.Tensor, count: int) -> torch.Tensor:
    kept = torch.ones(count, dtype=torch.bool)
    kept[run] = False
    return kept


# ---------------------------------------------------------------- PEFT's own settings


def _told_config(path: Path, metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """PEFT's settings of the adapter: diffusers puts them into the header, PEFT into a file beside it."""
    try:
        if told := metadata.get("lora_adapter_metadata"):
            return {key.removeprefix("transformer."): value for key, value in json.loads(told).items()}
        beside = path.with_name("adapter_config.json")
        peft = path.name == "adapter_model.safetensors" and beside.is_file()
        found = json.loads(beside.read_text(encoding="utf-8")) if peft else None
        return found if isinstance(found, dict) else None
    except (OSError, ValueError, AttributeError) as error:
        raise LoraFileError(f"{path}: its PEFT settings cannot be read ({error})") from error


def _told_scale(module: str, rank: int, config: Mapping[str, Any] | None) -> float:
    """1, as everyone reads a file without an alpha, unless PEFT's settings say otherwise."""
    if config is None or "lora_alpha" not in config:
        return 1.0
    alpha = config["lora_alpha"]
    try:
        for pattern, special in (config.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):  # as PEFT matches them
                alpha = special
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise LoraFileError(f"PEFT's settings are not understood: {error}") from error


# ---------------------------------------------------------------- does it fit


def check_fits(adapter: Mapping[str, LowRank], shape: FluxShape, what: str) -> None:
    """That every layer is one of this FLUX, and of its size. Raises LoraFileError that begins with ``what``."""
    sizes = linear_layers(shape)
    strange = sorted(adapter.keys() - sizes.keys())
    problems = _Problems()
    for module in strange:
        guidance = "guidance_embedder" in module
        problems.add("the base has no guidance, as FLUX.1-schnell" if guidance else "the base lacks its layers", module)
    for module, each in adapter.items():
        if module in sizes and each.size != sizes[module]:
            problems.add(f"the base has {sizes[module]} where the LoRA has {each.size}", module)
    try:
        problems.raise_if_any()
    except LoraFileError as error:
        blocks = f"{shape.double_blocks} + {shape.single_blocks} blocks of width {shape.width}"
        raise LoraFileError(f"{what} was made for another FLUX than this one of {blocks}: {error}") from None


def check_alike(found: Mapping[str, LowRank], lora: Lora, sizes: Mapping[str, tuple[int, int]], what: str) -> None:
    """That a LoRA has just the layers and ranks that the job trains, on linear layers of these (outputs, inputs).
    Raises LoraFileError with all that differs, and what to write in the job."""
    wanted = adapters_of(sizes, lora)
    problems = []
    if absent := sorted(wanted.keys() - found.keys()):
        problems.append(f"it has nothing for {some(absent)}, which lora.targets names")
    if more := sorted(found.keys() - wanted.keys()):
        problems.append(f"it has {some(more)}, which lora.targets leaves out, or the base lacks")
    both = sorted(found.keys() & wanted.keys())
    if other := [name for name in both if found[name].rank != wanted[name].rank]:
        one = other[0]
        problems.append(
            f"its rank is {found[one].rank}, not {wanted[one].rank}, in {some(other)}: write that in the job"
        )
    if unlike := [name for name in both if (found[name].magnitude is not None) != lora.dora]:
        kind = "no DoRA: write dora: false" if lora.dora else "a DoRA: write dora: true"
        problems.append(f"it is {kind}" + (f" (in {some(unlike)} alone)" if len(unlike) < len(both) else ""))
    if sized := [name for name in both if found[name].size != sizes[name]]:
        one = sized[0]
        problems.append(f"it was made for another FLUX: {one} has {found[one].size}, and the base {sizes[one]}")
    if problems:
        raise LoraFileError(f"{what} is another adapter than the job's: {'; '.join(problems)}")


def some(names: Sequence[str]) -> str:
    """The first of some names, for a message, and how many more there are."""
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")
