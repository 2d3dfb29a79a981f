"""Where each tensor of diffusers' FLUX model lies in the single-file layout of Black Forest Labs, which ComfyUI loads.

The two layouts hold the same numbers under other names. The BFL file fuses q, k and v (and, in single blocks, the
feed-forward's input) into one matrix by rows, and has the last modulation's scale and shift in the other order. So
every run of rows of a diffusers tensor is a run of rows of one BFL tensor: a rank that holds some rows can write, or
read, just those bytes of the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from bootstrap.flux_shape import MLP_RATIO, FluxShape


@dataclass(frozen=True)
class Rows:
    """``count`` rows from row ``first`` of a diffusers tensor are those from ``file_first`` of ``file_name``."""

    first: int
    count: int
    file_name: str
    file_first: int


Placement = tuple[Rows, ...]

_EMBEDDERS = {
    "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.guidance_embedder": "guidance_in",
    "time_text_embed.text_embedder": "vector_in",
}
_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_DOUBLE_FUSED = {  # part of a fused matrix: its name, and which block of `width` rows
    "attn.to_q": ("img_attn.qkv", 0),
    "attn.to_k": ("img_attn.qkv", 1),
    "attn.to_v": ("img_attn.qkv", 2),
    "attn.add_q_proj": ("txt_attn.qkv", 0),
    "attn.add_k_proj": ("txt_attn.qkv", 1),
    "attn.add_v_proj": ("txt_attn.qkv", 2),
}
_SINGLE = {
    "norm.linear": "modulation.lin",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
    "proj_out": "linear2",
}
_SINGLE_FUSED = {
    "attn.to_q": ("linear1", 0),
    "attn.to_k": ("linear1", 1),
    "attn.to_v": ("linear1", 2),
    "proj_mlp": ("linear1", 3),
}
_TOP = {"context_embedder": "txt_in", "x_embedder": "img_in", "proj_out": "final_layer.linear"}
_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")


def module_in_bfl(module: str) -> tuple[str, int]:
    """The BFL name of a diffusers *module*, and which block of ``width`` rows of it (0 where it is not fused).

    ``transformer_blocks.3.attn.to_k`` is block 1 of ``double_blocks.3.img_attn.qkv``. Raises KeyError for a module that
    FLUX does not have.
    """
    if block := _BLOCK.fullmatch(module):
        single, number, rest = block.groups()
        plain, fused = (_SINGLE, _SINGLE_FUSED) if single else (_DOUBLE, _DOUBLE_FUSED)
        name, part = fused[rest] if rest in fused else (plain[rest], 0)
        return f"{'single' if single else 'double'}_blocks.{number}.{name}", part
    for embedder, name in _EMBEDDERS.items():
        if module.startswith(embedder):
            return f"{name}.{ {'linear_1': 'in_layer', 'linear_2': 'out_layer'}[module.rsplit('.', 1)[1]] }", 0
    if module == "norm_out.linear":
        return "final_layer.adaLN_modulation.1", 0
    return _TOP[module], 0


@lru_cache(maxsize=8)
def placements(shape: FluxShape) -> dict[str, Placement]:
    """For each tensor of the diffusers model, where its rows lie in the BFL file."""
    return {name: _placement(name, size[0], shape.width) for name, size in shape.tensors().items()}


def _placement(name: str, rows: int, width: int) -> Placement:
    module, kind = name.rsplit(".", 1)
    file_module, part = module_in_bfl(module)
    norm = file_module.endswith(("query_norm", "key_norm"))
    file_name = f"{file_module}.{'scale' if norm else kind}"
    if module == "norm_out.linear":  # diffusers: scale, shift; BFL: shift, scale
        half = rows // 2
        return Rows(0, half, file_name, half), Rows(half, half, file_name, 0)
    return (Rows(0, rows, file_name, part * width),)


@lru_cache(maxsize=8)
def bfl_tensors(shape: FluxShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the BFL file with its shape, sorted by name. FLUX.1-dev: 780, schnell: 776."""
    rows: dict[str, int] = {}
    tails: dict[str, tuple[int, ...]] = {}
    for name, size in shape.tensors().items():
        for part in placements(shape)[name]:
            rows[part.file_name] = rows.get(part.file_name, 0) + part.count
            tails[part.file_name] = size[1:]
    return {name: (rows[name], *tails[name]) for name in sorted(rows)}


def shape_of_bfl(tensors: dict[str, tuple[int, ...]]) -> FluxShape:
    """The dimensions of a BFL file, told from its tensors' shapes. Raises KeyError where a needed one is absent."""

    def count(kind: str) -> int:
        return len({name.split(".")[1] for name in tensors if name.startswith(f"{kind}_blocks.")})

    width, text_size = tensors["txt_in.weight"]
    head_size = tensors["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return FluxShape(
        double_blocks=count("double"),
        single_blocks=count("single"),
        heads=width // head_size,
        head_size=head_size,
        text_size=text_size,
        pooled_size=tensors["vector_in.in_layer.weight"][1],
        channels=tensors["img_in.weight"][1],
        guidance="guidance_in.in_layer.weight" in tensors,
        rope_axes=rope_axes(head_size),
    )


def shape_of_diffusers(tensors: dict[str, tuple[int, ...]]) -> FluxShape:
    """The dimensions of a transformer in diffusers' names, told from its tensors' shapes. Raises KeyError."""

    def count(kind: str) -> int:
        return len({name.split(".")[1] for name in tensors if name.startswith(f"{kind}.")})

    width, text_size = tensors["context_embedder.weight"]
    (head_size,) = tensors["transformer_blocks.0.attn.norm_q.weight"]
    return FluxShape(
        double_blocks=count("transformer_blocks"),
        single_blocks=count("single_transformer_blocks"),
        heads=width // head_size,
        head_size=head_size,
        text_size=text_size,
        pooled_size=tensors["time_text_embed.text_embedder.linear_1.weight"][1],
        channels=tensors["x_embedder.weight"][1],
        guidance="time_text_embed.guidance_embedder.linear_1.weight" in tensors,
        rope_axes=rope_axes(head_size),
    )


def rope_axes(head_size: int) -> tuple[int, int, int]:
    """How FLUX shares a head among the index and the two image axes: 1/8, 7/16, 7/16 (128 gives 16, 56, 56)."""
    return head_size // 8, head_size * 7 // 16, head_size * 7 // 16


def clip_rows(placement: Placement, start: int, stop: int) -> list[Rows]:
    """The part of a placement that rows ``start`` to ``stop`` of the diffusers tensor take."""
    parts = []
    for part in placement:
        first, last = max(start, part.first), min(stop, part.first + part.count)
        if first < last:
            parts.append(Rows(first, last - first, part.file_name, part.file_first + first - part.first))
    return parts


assert MLP_RATIO == 4  # the fused rows of a single block, q k v and 4 x width, rest on it
