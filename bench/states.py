"""``python -m bench.states --folder DISK``: saving and loading a state of real-size tensors, beside dd on that disk.

It starts its processes as every run does. The whole model is 48 GB on the disk: one state at a time, and before it dd's
file of --dd gigabytes. A state that is written while training waits shows the parallel writes, which must reach 85 % of
dd. One in the background is copied first, on memory that nobody has touched and once more; then training would go on.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bench.case import stand_in
from bootstrap.flux_shape import FluxShape
from bootstrap.plan import DataSummary, make_plan
from bootstrap.pod import read_free_memory, read_pod
from bootstrap.run_file import RunFile
from bootstrap.state import State, verify
from bootstrap.volume import Volume
from entrypoint.launch import launcher_command
from jobs.schema import Job
from trainer.checkpoint import Saver, load_optimizer
from trainer.make_optimizer import make_optimizer
from trainer.model import build_model, fill, sources
from trainer.optimizer import Optimizer
from trainer.trained import Trained, local, trained_tensors
from trainer.world import World, join_world

DD = (["oflag=direct", "conv=fsync"], ["conv=fsync"])  # past the page cache, which not every disk takes, and not
LEAST = 0.85  # of dd: parallel writes


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.states", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; its volume/ is removed")
    parser.add_argument("--blocks", default="19,38", help="double and single blocks: 19,38 is FLUX.1, 1,1 about 2 GB")
    parser.add_argument("--optimizer", default="AdamW8bit")
    parser.add_argument("--dd", type=int, default=8, metavar="GB", help="of dd's file")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [*launcher_command(options.processes), "-m", "bench.states", *sys.argv[1:]]
        on_cpu = {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "1"}
        sys.exit(subprocess.run(command, env=os.environ | on_cpu, check=False).returncode)
    double, single = (int(number) for number in options.blocks.split(","))
    run = prepare(Volume(options.folder / "volume"), FluxShape(double_blocks=double, single_blocks=single), options)
    with join_world(run) as world:
        bare = dd(options.folder, options.dd) if world.leads else 0.0
        measure(run, world, bare)
        world.meet()
        if world.leads:
            shutil.rmtree(run.volume, ignore_errors=True)


def prepare(volume: Volume, shape: FluxShape, options: argparse.Namespace) -> RunFile:
    shutil.rmtree(volume.root, ignore_errors=True)
    volume.create()
    text = {"name": "states", "base": "random", "method": "full", "datasets": [{"path": "none"}]}
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    job = Job.model_validate(text | {"optimizer": options.optimizer, "plan": {"processes": processes}})
    pod = read_pod(volume.root)
    small = FluxShape(double_blocks=1, single_blocks=1, heads=2)  # a CPU is planned for toys alone
    plan = make_plan(job, pod, shape if pod.gpus else small, DataSummary(8, 8, ((512, 512, 8),)))
    return RunFile(job, replace(plan, compile=False), replace(stand_in(volume), shape=shape), volume.root)


def dd(folder: Path, gigabytes: int) -> float:
    """Bytes per second that dd gets to the disk, in the faster of two ways."""
    path, speeds = folder / "dd", []
    for how in DD:
        command = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={gigabytes * 60}", *how]
        begun = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
        seconds = time.monotonic() - begun
        path.unlink(missing_ok=True)
        if done.returncode:
            print(f"dd {' '.join(how)}: {done.stderr.strip() or done.returncode}", flush=True)
            continue
        size = int(re.search(r"^(\d+) bytes", done.stderr, re.MULTILINE)[1])  # type: ignore[index]
        print(f"dd {' '.join(how)}: {size / seconds / 1e9:.2f} GB/s", flush=True)
        speeds.append(size / seconds)
    return max(speeds)


def measure(run: RunFile, world: World, bare: float) -> None:
    model = build_model(run.job, run.plan, run.weights.shape, world, lambda model: _fill(model, world))
    tensors = trained_tensors(model, world.rank, world.size)
    optimizer = make_optimizer(tensors, run.job, run.plan, world)
    for piece in optimizer.pieces():
        _randomize(piece.tensor)
    say = _speaker(world)
    say(f"host memory free: {read_free_memory() / 1e9:.0f} GB")
    state = None
    for background in (True, True, False):
        if state and world.leads:
            shutil.rmtree(state.path)
        world.meet()
        state = _save(run, world, tensors, optimizer, background, bare)
    assert state is not None
    if world.leads:
        _timed(say, "verify every hash", state.bytes, lambda: verify(state))
    world.meet()
    places = sources(run.weights.shape, [state.model], "bfl")
    before = [(t, t.weight[:1].clone()) for t in tensors[:3]]
    _timed(say, "load the weights", state.manifest.files[state.model.name], lambda: fill(model, places, world))
    _timed(
        say, "load the optimizer", state.manifest.files[state.optimizer.name], lambda: load_optimizer(state, optimizer)
    )
    assert all(torch.equal(t.weight[:1], row) for t, row in before)
    if world.device.type == "cuda":
        say(f"peak on the GPU: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def _save(
    run: RunFile, world: World, tensors: list[Trained], optimizer: Optimizer, background: bool, bare: float
) -> State:
    memory = read_free_memory if background else lambda: 0  # as on a host without room for a copy
    saver, begun = Saver(run, world, memory), time.monotonic()
    saver.begin(1, tensors, optimizer, {})
    still = time.monotonic() - begun
    copying = saver.writing.copying if saver.writing else 0.0
    state = saver.publish()
    took, size = time.monotonic() - begun, state.bytes
    say, speed = _speaker(world), f"{size / 1e9:.1f} GB in {took:.1f} s, {size / took / 1e9:.2f} GB/s"
    if copying:
        copied = f"copied in {copying:.1f} s, {size / copying / 1e9:.2f} GB/s"
        say(f"save in the background: {speed}; {copied}; training stood still for {still:.1f} s")
    else:
        share = f"{size / took / bare:.0%} of dd, {LEAST:.0%} is asked for" if bare else ""
        say(f"save while training waits: {speed}, {share}; training stood still for {still:.1f} s")
    return state


def _timed(say: Callable[[str], None], what: str, size: int, work: Callable[[], object]) -> None:
    begun = time.monotonic()
    work()
    took = time.monotonic() - begun
    say(f"{what}: {size / 1e9:.1f} GB in {took:.1f} s, {size / took / 1e9:.2f} GB/s")


def _fill(model: torch.nn.Module, world: World) -> None:
    for parameter in model.parameters():
        _randomize(local(parameter))


@torch.no_grad()
def _randomize(tensor: torch.Tensor) -> None:
    """Nothing that a file system could compress away."""
    if tensor.is_floating_point():
        tensor.normal_()
    else:
        tensor.random_(0, 255)


def _speaker(world: World) -> Callable[[str], None]:
    return lambda text: print(text, flush=True) if world.leads else None


if __name__ == "__main__":
    main()
