"""Two GPUs gather and sum past NCCL: to the bit what NCCL gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from trainer.peer_copies import Gather, Signs, Sum, _unreachable
from trainer.world import World

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(180),
]

ROUNDS = 40
LARGEST = 3_000_000


def test_gathered_and_summed_as_by_nccl(tmp_path: Path) -> None:
    processes.spawn(_compare, args=(2, tmp_path / "store"), nprocs=2)  # raises what a process raises


def _compare(rank: int, size: int, store: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device)
    world = World(rank, size, device, dist.new_group(backend="gloo"))
    assert not _unreachable(world)
    signs = Signs(world)
    gather, total = Gather(2 * LARGEST, signs, world), Sum(2 * LARGEST, signs, world)
    torch.cuda.synchronize()
    world.meet()
    group = dist.group.WORLD
    assert group is not None
    chance = torch.Generator(device).manual_seed(rank)
    for number in range(ROUNDS):  # sizes that change, without a pause: buffers are used again at once
        part = LARGEST // size if number % 3 == 0 else 1000 + 777 * number
        whole = torch.randn(part * size, generator=chance, device=device).bfloat16()
        summed = total.allocate((part,), dtype=whole.dtype, device=device)
        total(summed, whole, group, dist.ReduceOp.SUM)
        expected = torch.empty_like(summed)
        dist.reduce_scatter_tensor(expected, whole)
        assert torch.equal(summed, expected), number

        gathered = gather.allocate((part * size,), dtype=whole.dtype, device=device)
        gathered[rank * part : (rank + 1) * part].copy_(summed)
        gather(gathered, gathered[rank * part : (rank + 1) * part], group)
        all_parts = torch.empty_like(whole)
        dist.all_gather_into_tensor(all_parts, summed)
        assert torch.equal(gathered, all_parts), number
    world.meet()
    dist.destroy_process_group()
