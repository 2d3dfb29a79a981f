"""What merging a LoRA into FLUX.1-dev, extracting one, and a save's check of its file take here, without reading or
writing the models: ``python -m bench.lora_files``.

One matrix of each common size is worked on, and the time taken for all matrices in proportion to their numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bootstrap.estimate import linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.lora_file import LowRank, tensors_of
from bootstrap.lora_targets import target_layers
from bootstrap.tensor_files import write_tensors
from jobs.schema import Lora
from trainer.adapter_files import Expected, products
from trainer.extract import nearest, rounding_of
from trainer.file_hashes import fill_places, with_places
from trainer.merge import Change

SIZES = ((3072, 3072), (12288, 3072), (3072, 15360))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def merge_one(weight: torch.Tensor, lora: LowRank) -> torch.Tensor:
    after = lora.applied_to(weight.float())
    Change.of(weight.float(), after, torch.bfloat16)
    assert bool(torch.isfinite(after).all())
    return after.bfloat16().cpu()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=64, help="of what is extracted (64)")
    rank = parser.parse_args().rank
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{device.type}, {torch.get_num_threads()} threads")
    everything = sum(out * size for out, size in linear_layers(FluxShape()).values())
    merging = extracting = 0.0
    for size in SIZES:
        weight = (torch.randn(size) / 50).bfloat16().to(device)
        lora = LowRank(torch.randn(16, size[1], device=device), torch.randn(size[0], 16, device=device) / 500, 1.0)
        change = lora.product() + torch.randn(size, device=device) / 5000
        for _ in range(2 if device.type == "cuda" else 1):  # a GPU's first one loads its libraries
            merged = seconds(lambda weight=weight, lora=lora: merge_one(weight, lora), device)  # type: ignore[misc]
            extracted = seconds(lambda c=change, w=weight: (nearest(c, rank, 1), rounding_of(w)), device)  # type: ignore[misc]
        merging, extracting = merging + merged, extracting + extracted
    share = everything / sum(out * size for out, size in SIZES)
    print(f"merge a LoRA of rank 16: {share * merging / 60:.1f} min")
    print(f"extract one of rank {rank}: {share * extracting / 60:.1f} min")
    print(f"write, hash and check a LoRA's file of rank 16: {save_once(device):.1f} s")


def save_once(device: torch.device) -> float:
    sizes = linear_layers(FluxShape())
    adapter = {
        name: LowRank(
            torch.randn(16, sizes[name][1], device=device), torch.randn(sizes[name][0], 16, device=device), 1.0
        )
        for name in target_layers(list(sizes), Lora().targets)
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"

        def save() -> None:
            expected = Expected(products(adapter), {name: each.rank for name, each in adapter.items()})
            write_tensors(file, tensors_of(adapter, "kohya"), with_places({}))
            fill_places(file)
            expected.check(file)

        return seconds(save, device)


if __name__ == "__main__":
    main()
