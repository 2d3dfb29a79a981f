"""What a test of one part needs of the others: a job, a plan, weights, a run; anything in them set by keyword."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bootstrap.bases import FLUX_TINY
from bootstrap.plan import Plan
from bootstrap.run_file import RunFile
from bootstrap.tensor_files import Rows
from bootstrap.weights import Weights
from jobs.schema import Job
from trainer.optimizer import Optimizer, SavedOptimizer
from trainer.trained import Trained, held_rows
from trainer.world import World

PLAN = Plan(
    device="cpu",
    gpus=(),
    processes=1,
    split=(4,),
    images_per_pass=4,
    passes=1,
    sharding="none",
    reshard_after_forward=False,
    checkpointed_blocks=0,
    compile=False,
    optimizer_in_backward=False,
    host_state_blocks=0,
    streamed_blocks=0,
    base_precision="bf16",
    tiled_decoding=False,
    threads=1,
    workers=1,
    steps=10,
    steps_per_epoch=10,
    memory_per_gpu=0,
    state_bytes=0,
    weights_bytes=0,
    disk_bytes=0,
    choices=(),
    warnings=(),
)


def make_job(**keys: Any) -> Job:
    common = {"name": "test", "base": "flux-tiny", "method": "full", "datasets": [{"path": "datasets/test"}]}
    return Job.model_validate(common | keys)


def make_weights(folder: Path) -> Weights:
    """Those of a flux-tiny in ``folder``, or, for what never opens a file, of a folder that need not be."""
    return Weights(
        transformer=tuple(sorted((folder / "transformer").glob("*.safetensors"))),
        layout="diffusers",
        config=folder / "transformer" / "config.json",
        shape=FLUX_TINY,
        vae=folder / "vae",
        clip=folder / "text_encoder",
        t5=folder / "text_encoder_2",
        tokenizer=folder / "tokenizer",
        tokenizer_2=folder / "tokenizer_2",
        scheduler=folder / "scheduler",
        text_tokens=64,
        revision="test",
        digest="test",
    )


def make_run(volume: Path, job: Job | None = None, weights: Weights | None = None, **plan: Any) -> RunFile:
    return RunFile(job or make_job(), replace(PLAN, **plan), weights or make_weights(Path("/nowhere")), volume)


def make_trained(weights: dict[str, torch.Tensor]) -> list[Trained]:
    """Whole tensors, as one process has them."""
    return [Trained(name, nn.Parameter(w.clone()), tuple(w.shape), 0, sharded=False) for name, w in weights.items()]


def shards_of(weights: dict[str, torch.Tensor], rank: int, size: int) -> list[Trained]:
    """The rows that process ``rank`` of ``size`` has of each tensor under FSDP2."""
    found = []
    for name, weight in weights.items():
        first, count = held_rows(weight.shape[0], rank, size)
        rows = nn.Parameter(weight[first : first + count].clone())
        found.append(Trained(name, rows, tuple(weight.shape), first, sharded=True))
    return found


def make_world(control: dist.ProcessGroup, rank: int = 0, size: int = 1) -> World:
    return World(rank, size, torch.device("cpu"), control)


# ---------------------------------------------------------------- optimizers


def rate(step: int) -> float:
    return 1e-2 / (step + 1)


def weights_in(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.weight.clone() for tensor in optimizer.tensors}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def saved(*optimizers: Optimizer) -> SavedOptimizer:
    """What a state keeps of an optimizer spread over some processes: whole tensors, of which rows can be read, and
    JSON."""
    whole: dict[str, torch.Tensor] = {}
    for optimizer in optimizers:
        for piece in optimizer.pieces():
            target = whole.setdefault(piece.name, torch.full(piece.shape, 77, dtype=piece.tensor.dtype))
            if piece.shape:
                target[piece.first_row : piece.first_row + piece.tensor.shape[0]] = piece.tensor
            else:
                target.copy_(piece.tensor)
    scalars = json.loads(json.dumps(optimizers[0].scalars(), allow_nan=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}

    def read(name: str, first: int, last: int | None) -> torch.Tensor:
        return whole[name][first:last].clone() if shapes[name] else whole[name].clone()

    def fill(rows: Iterable[Rows]) -> None:
        for each in rows:
            each.target.copy_(whole[each.name][each.first : each.first + each.target.shape[0]])

    dtypes = {name: tensor.dtype for name, tensor in whole.items()}
    return SavedOptimizer(shapes, dtypes, read, fill, scalars)
