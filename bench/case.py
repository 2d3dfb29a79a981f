"""One benchmark case: the product's own trainer on a real-size FLUX with random weights and random encoded data.

Started by ``bench.gpu`` and ``bench.gpus`` through the same launcher as every run:
``accelerate launch ... -m bench.case CASE FOLDER``. Writes ``FOLDER/CASE.json``. With ``--save`` it goes on to the end
as a run does: a state and the output on disk. Several cases, comma-separated, share one start and what was compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel

from bench.cases import Case, find_case
from bootstrap.cache import ShardWriter
from bootstrap.dataset import Item
from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import GIB
from bootstrap.plan import DataSummary, make_plan
from bootstrap.pod import Pod, read_pod
from bootstrap.run_file import RunFile
from bootstrap.validation import read_rounds
from bootstrap.volume import Volume, write_json
from bootstrap.wanted import Wanted
from bootstrap.weights import Weights
from jobs.schema import Job
from trainer.model import build_model
from trainer.quantised import QuantisedLinear
from trainer.self_check import choose_attention
from trainer.train import Training, train
from trainer.world import World, join_world

LEFT_BY_DRIVER = 0.99  # of the memory that nvidia-smi shows
WARM_UP = 3  # steps that are not counted: the first compiles
TEXT_TOKENS = 512
CEILING_SIZE = 8192


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=lambda text: [find_case(name) for name in text.split(",")])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    runs = [(case, prepare(case, Volume(options.folder / "volume"))) for case in options.cases]
    with join_world(runs[0][1]) as world:
        for case, run in runs:
            result = measure(case, run, world, options.save)
            if world.leads:
                write_json(options.folder / f"{case.name}.json", result)
            torch.compiler.reset()  # each case compiles for its own sizes
            gc.collect()
            torch.cuda.empty_cache()
            world.meet()


def prepare(case: Case, volume: Volume) -> RunFile:
    """A run as the entrypoint would prepare it, with random numbers where weights, latents and texts would be."""
    volume.create()
    text = {"name": case.name, "base": "random", "datasets": [{"path": "none"}], "steps": case.steps, **case.job}
    text["plan"] = {"processes": int(os.environ.get("WORLD_SIZE", "1"))} | case.job.get("plan", {})
    job = Job.model_validate(text)
    weights = stand_in(volume)
    bucket = (case.size, case.size)
    items = tuple(
        Item(f"{i}.png", f"{i}", f"image {i}", 1, *bucket, bucket) for i in range(max(8, job.images_per_step))
    )
    data = DataSummary(images=len(items), items_per_epoch=len(items), buckets=((*bucket, len(items)),))
    plan = make_plan(job, pod_of(case, volume), weights.shape, data)
    run = RunFile(job, plan, weights, volume.root)
    held_out = tuple(replace(items[0], path=f"held-out-{i}.png", digest=f"{i:064x}") for i in range(1, 17))
    write_cache(items, held_out, run)
    run.write(items, held_out)
    return run


def pod_of(case: Case, volume: Volume) -> Pod:
    """This pod, its GPUs no larger than the card that the case is about.

    What the case may fill is what that card's driver leaves. The plan fills less, as on the card itself: torch's
    allocator, which needs some of it, otherwise gives memory back and asks for it again in every step.
    """
    pod = replace(read_pod(volume.root), p2p=os.environ.get("NCCL_P2P_DISABLE", "0") == "0")
    if case.host_gib is not None:
        pod = replace(pod, memory=min(pod.memory, int(case.host_gib * GIB)))
    if case.card_gib is None:
        return pod
    memory = int(case.card_gib * GIB / LEFT_BY_DRIVER)
    return replace(pod, gpus=tuple(replace(gpu, memory=min(gpu.memory, memory)) for gpu in pod.gpus))


def outside_torch() -> int:
    """Bytes of this GPU in use beside torch's allocator: context, kernels, NCCL. Nothing else may run on it."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def become_smaller(gib: float) -> None:
    """Lets torch have no more of this card than one has of which ``gib`` may be filled."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((gib * GIB - outside_torch()) / total)


def stand_in(volume: Volume) -> Weights:
    vae = volume.models / "vae"
    write_json(vae / "config.json", {"shift_factor": 0.1159, "scaling_factor": 0.3611})
    nothing = volume.models / "none"
    return Weights(
        (), "bfl", nothing, FluxShape(), vae, nothing, nothing, nothing, nothing, nothing, TEXT_TOKENS, "", ""
    )


def write_cache(items: tuple[Item, ...], held_out: tuple[Item, ...], run: RunFile) -> None:
    """Latents and texts of the sizes and spreads of real ones."""
    generator = torch.Generator().manual_seed(0)
    shape = run.weights.shape
    wanted = Wanted.of(run.job, run.plan, items, run.weights, held_out)
    with ShardWriter(run.cache) as writer:
        for key, cropped in wanted.crops.items():
            width, height = cropped.item.bucket
            mean = torch.randn(16, height // 8, width // 8, generator=generator).mul(3).half()
            writer.add(key, {"mean": mean, "spread": torch.full_like(mean, 0.01)})
        for key in wanted.texts:
            embeds = torch.randn(TEXT_TOKENS, shape.text_size, generator=generator).mul(0.2).bfloat16()
            pooled = torch.randn(shape.pooled_size, generator=generator).bfloat16()
            mask = torch.ones(TEXT_TOKENS, dtype=torch.bool)
            writer.add(key, {"prompt_embeds": embeds, "mask": mask, "pooled": pooled})


def random_weights(model: FluxTransformer2DModel) -> None:
    """Weights at which activations and gradients stay in the range of a trained model's."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.dim() == 1:
                local.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:  # drawn on the GPU, wherever the weight lies
                local.copy_(torch.empty_like(local, device="cuda").normal_(0, 0.02, generator=generator))
        for layer in model.modules():
            if isinstance(layer, QuantisedLinear):
                weight = torch.empty((layer.out_features, layer.in_features), device="cuda", dtype=torch.bfloat16)
                layer.take(weight.normal_(0, 0.02, generator=generator))


def ceiling(device: torch.device) -> float:
    """What this card's matrix product reaches now, TFLOP/s: bf16, random data, the best of 5 times 10."""
    a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            a @ b
        end.record()
        torch.cuda.synchronize()
        best = max(best, 10 * 2 * CEILING_SIZE**3 / (start.elapsed_time(end) / 1000) / 1e12)
    return best


def measure(case: Case, run: RunFile, world: World, save: bool) -> dict[str, object]:
    top = ceiling(world.device)
    torch.cuda.empty_cache()
    if case.card_gib is not None:
        become_smaller(case.card_gib)
    begun = time.monotonic()
    attention = choose_attention(run, world, run.read_items())
    model = build_model(run.job, run.plan, run.weights.shape, world, random_weights)
    attention.switch_on(model)
    training = Training.assemble(run, world, model, None)
    built = time.monotonic() - begun
    torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    if save:
        train(training)
    else:
        training.validate(0)
        for done in training.steps():
            training.validate(done)
        training.metrics.flush()
    took = time.monotonic() - begun
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    images = run.job.images_per_step
    seconds = statistics.median(images / line["images_per_s"] for line in lines[WARM_UP:])
    backward = 2.0 if run.job.method == "full" else 1.0
    flops = images * (1 + backward) * run.weights.shape.forward_flops(case.size, case.size, TEXT_TOKENS)
    losses = [line["loss"] for line in lines]
    return {
        "case": case.name,
        "gpu": torch.cuda.get_device_name(),
        "processes": world.size,
        "torch": torch.__version__,
        "seconds_per_step": seconds,
        "images_per_second": images / seconds,
        "model_tflops": flops / seconds / 1e12 / world.size,
        "ceiling_tflops": top,
        "share_of_ceiling": flops / seconds / 1e12 / world.size / top,
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "outside_torch_gib": outside_torch() / GIB,
        "planned_gib": run.plan.memory_per_gpu / GIB,
        "first_step_seconds": images / lines[0]["images_per_s"],
        "setup_seconds": built,
        "total_seconds": took,
        "losses_finite": None not in losses,  # what was no number is null there
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "attention": attention.name,
        "base": run.plan.base_precision,
        "images_per_pass": run.plan.images_per_pass,
        "checkpointed_blocks": run.plan.checkpointed_blocks,
        "host_state_blocks": run.plan.host_state_blocks,
        "streamed_blocks": run.plan.streamed_blocks,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "kohya_seconds": case.kohya,
        "validation_seconds": [each.seconds for each in read_rounds(run.folder.validation)],
    }


if __name__ == "__main__":
    main()
