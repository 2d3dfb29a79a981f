"""The processes that train together: who this one is, and how they agree on anything that is not a gradient.

Gradients go through the default group (NCCL on GPUs, gloo on CPUs). Everything else, stop flags, save verdicts, errors,
goes through a second group on the CPU with its own time limits, so that a slow save never looks like a lost GPU.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

from bootstrap.processes import record_process
from bootstrap.run_file import RunFile
from bootstrap.whereabouts import End, Phase, Place
from trainer.processor import use_processor

log = logging.getLogger(__name__)
T = TypeVar("T")

# The last resort, where nobody watches (entrypoint/watch.py is sooner, and knows the phase).
# A collective of gradients waits at most this long: longer than a compile of every block on a slow host (about 5 min).
STEP_LIMIT = timedelta(minutes=20)
# A control message waits this long: longer than a full state on a volume of 50 MB/s (45 GiB in 15 min).
CONTROL_LIMIT = timedelta(minutes=60)
NCCL_SETTINGS = ("NCCL_", "TORCH_NCCL_")  # begin the names of its environment


@dataclass
class World:
    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    place: Place = field(default_factory=Place.unwatched)  # where this process is, for who watches
    stop_requested: bool = field(default=False, init=False)

    @property
    def leads(self) -> bool:
        """Rank 0 decides, writes and speaks; all follow."""
        return self.rank == 0

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is up on any rank: one message for all of them. Every rank must call it."""
        values = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control)
        return [bool(value) for value in values.tolist()]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_lead(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def agree(self, error: BaseException | None) -> None:
        """Raises on every rank when ``error`` is set on any: nobody goes on alone, nobody waits for ever.

        The others raise an error of the same type, so that all of them answer it alike.
        """
        errors = self.gather(None if error is None else (type(error), str(error)))
        if error is not None:
            raise error
        for rank, told in enumerate(errors):
            if told is not None:
                kind, text = told
                raise kind(f"process {rank}: {text}")

    def meet(self, limit: timedelta = CONTROL_LIMIT) -> None:
        """Waits until all are here. Raises RuntimeError, which names who is missing (on rank 0), after ``limit``."""
        dist.monitored_barrier(group=self.control, timeout=limit)


@contextmanager
def join_world(run: RunFile, place: Place | None = None) -> Iterator[World]:
    """Joins the group that the launcher started, and leaves it in order.

    Raises RuntimeError where the launcher started another number of processes than planned (a launcher that starts one
    instead of two trains without a word, at half the speed).
    """
    place = place or Place.unwatched()
    place.enter(Phase.MEETING)
    on_cpu = run.plan.device == "cpu"
    # Streams wait for other processes (trainer/peer_copies.py): each needs a queue of its own, or one that waits holds
    # up what another one waits for. Eight is the default; it is read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    state = PartialState(cpu=on_cpu, timeout=STEP_LIMIT)
    rank, size = state.process_index, state.num_processes
    record_process(run.folder.processes, f"trainer-{rank}")
    if size != run.plan.processes:
        raise RuntimeError(f"the plan asks for {run.plan.processes} processes, the launcher started {size}")
    if on_cpu:
        device = use_processor(run.plan.threads)
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    world = World(rank, size, device, dist.new_group(backend="gloo", timeout=CONTROL_LIMIT), place)
    answer_signals(world)
    tell_devices(world, run.plan.gpus)
    yield world
    place.enter(Phase.LEAVING)
    world.meet()
    # The launcher sends TERM to the others as soon as one leaves; all are done here, so it must not matter.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Not after an error: NCCL's end waits for the other processes, which may wait in a collective for this one.
    dist.destroy_process_group()
    place.ends(End.LEFT)


def tell_devices(world: World, gpus: Sequence[int]) -> None:
    """Each process's device, and how NCCL was told to connect them, into the log. ``gpus``: nvidia-smi's indices.

    Raises RuntimeError where two processes have the same card.
    """
    on_gpu = world.device.type == "cuda"
    cards = world.gather(_card(world.device) if on_gpu else (f"{world.rank}", "CPU"))
    if len({uuid for uuid, _ in cards}) < world.size:
        raise RuntimeError(f"several processes were given the same GPU: {', '.join(name for _, name in cards)}")
    if not world.leads:
        return
    for rank, (_, name) in enumerate(cards):
        log.info("process %d of %d: %s", rank, world.size, f"GPU {gpus[rank]}, {name}" if gpus else name)
    if on_gpu and world.size > 1:
        settings = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(NCCL_SETTINGS)]
        version = ".".join(map(str, torch.cuda.nccl.version()))
        log.info("NCCL %s, %s", version, ", ".join(settings) or "with nothing set in the environment")


def _card(device: torch.device) -> tuple[str, str]:
    """What tells a GPU from all others, and what it is."""
    found = torch.cuda.get_device_properties(device)
    return f"{found.uuid}", f"{found.name}, {found.total_memory / 2**30:.1f} GiB"


def answer_signals(world: World) -> None:
    """TERM or INT asks the loop to stop at the end of its step; a second one leaves at once."""

    def asked(number: int, _frame: object) -> None:
        if world.stop_requested:
            os._exit(128 + number)
        world.stop_requested = True

    signal.signal(signal.SIGTERM, asked)
    signal.signal(signal.SIGINT, asked)
