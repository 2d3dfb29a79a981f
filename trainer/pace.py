"""How fast this process is where it waits for no other: what tells a slow GPU among several.

Processes that train together take every step in the same time, that of the slowest, so a step's time tells nothing.
Replicas do their forward passes without a word to each other: those are timed, up to the step's first message, the
wait for data included. The processes of a sharded model wait for each other in every block; there each times, now and
then between two steps, a matrix product of a fixed size on its card, as warm and as busy as training makes it. It shows
a card that is throttled or slow, and not a slow host.

On a GPU events on its stream are the clock; they are read when they have passed, and nothing waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from trainer.data import Batch
from trainer.world import World

PRODUCT_EVERY = 15.0  # seconds
PRODUCT = 2048  # rows and columns, in bf16: 24 MB; on a CPU a quarter of that, in float32
PRODUCTS = 16  # timed as one: 0.4 ms on an H200
FORWARD, WITH_BACKWARD = 1.0, 3.0  # the work of a pass


@dataclass(frozen=True)
class _Timed:
    """Some work between two moments, which on a GPU may be still to come."""

    work: float
    begun: torch.cuda.Event | float
    ended: torch.cuda.Event | float

    @property
    def over(self) -> bool:
        return not isinstance(self.ended, torch.cuda.Event) or self.ended.query()

    @property
    def seconds(self) -> float:
        if isinstance(self.begun, float) or isinstance(self.ended, float):
            assert isinstance(self.begun, float)
            assert isinstance(self.ended, float)
            return self.ended - self.begun
        return self.begun.elapsed_time(self.ended) / 1e3


class Pace:
    """Measures, and tells it at this process's place."""

    def __init__(self, world: World, width: int, *, sharded: bool):
        """``width``: of the model's hidden states."""
        self.world, self.width, self.sharded = world, width, sharded
        self.on_gpu = world.device.type == "cuda"
        self.timed: deque[_Timed] = deque()
        self.begun: torch.cuda.Event | float = 0.0
        self.work = 0.0
        self.product_at = 0.0

    def begin(self) -> float:
        """Before a step's data are waited for; the time, in seconds."""
        self.begun, self.work = self._now(), 0.0
        return time.monotonic()

    def enter_pass(self, batch: Batch, last: bool) -> None:
        images, tokens = batch.noisy.shape[0], batch.noisy.shape[1] + batch.text.shape[1]
        self.work += work_of(images, tokens, self.width) * (FORWARD if last else WITH_BACKWARD)

    def meet(self) -> None:
        """Before the step's first message between replicas."""
        if not self.sharded:
            self.timed.append(_Timed(self.work, self.begun, self._now()))

    def end(self, waited: float) -> None:
        """After a step, for whose data this process waited so many seconds."""
        if self.sharded and time.monotonic() - self.product_at > PRODUCT_EVERY:
            self.product_at = time.monotonic()
            self._multiply()
        work = seconds = 0.0
        while self.timed and self.timed[0].over:
            timed = self.timed.popleft()
            work, seconds = work + timed.work, seconds + timed.seconds
        self.world.place.did(work, seconds, waited)

    def _multiply(self) -> None:
        size, dtype = (PRODUCT, torch.bfloat16) if self.on_gpu else (PRODUCT // 4, torch.float32)
        matrix = torch.zeros((size, size), device=self.world.device, dtype=dtype)
        torch.mm(matrix, matrix)  # loads what a first one loads
        begun = self._now()
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        self.timed.append(_Timed(1.0, begun, self._now()))

    def _now(self) -> torch.cuda.Event | float:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def work_of(images: int, tokens: int, width: int) -> float:
    """The arithmetic of a forward pass, in a unit of its own: matrix products take 24 width^2 a token and block, and
    attention 4 tokens x width."""
    return images * tokens * (1 + tokens / (6 * width))
