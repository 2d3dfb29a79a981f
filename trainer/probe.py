"""What this pod's GPUs do, measured with torch: started by ``entrypoint/probe.py``, which knows the time limits.

``python -m trainer.probe card PART ...`` measures the first GPU that CUDA shows, ``... cards`` lists all of them, and
``... links`` is one process of several, a GPU each, that measure the ways between them. Each finding is a line of JSON
on standard output, written at once: what hangs afterwards takes nothing with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bootstrap.processes import end_with_parent

WARM_UP = 0.3  # seconds before the clock runs: first calls load kernels, and clocks rise
LASTING = 1.5  # seconds a matrix product is measured: long enough for heat and power to speak
SHORT = 0.4  # seconds for the others
MATRIX = 8192  # as in bench/, so that figures can be compared
HEADS, TOKENS, HEAD_SIZE = 24, 4608, 128  # FLUX at 1024 px, one image
MOST_COPIED = 1 << 30  # bytes
HOST_BYTES = 1 << 28  # pinned, a power of two: torch's allocator would round anything else up to one
REDUCED = 1 << 28  # bytes of an all-reduce: about a block's gradients in float32


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.probe", description=__doc__)
    parser.add_argument("what", choices=("card", "cards", "links"))
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args(arguments)
    end_with_parent()
    if options.what == "cards":
        tell("cards", value=[facts(index) for index in range(torch.cuda.device_count())])
    elif options.what == "links":
        measure_links()
    else:
        for part in options.parts:
            tell(part, begun=True)
            try:
                tell(part, value=CARD[part](first_device()))
            except Exception as error:  # whatever a card can do: it is told, and the next part is tried
                tell(part, error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return 0


def tell(part: str, **found: Any) -> None:
    print(json.dumps({"part": part, **found}), flush=True)


def first_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() or _expected() else torch.device("cpu")


def _expected() -> bool:
    """Whether there should be a GPU: then torch's own error, not a measured CPU, says why there is none."""
    return bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


# ---------------------------------------------------------------- one card


def facts(index: int = 0) -> dict[str, Any]:
    """The card as torch sees it."""
    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "memory": found.total_memory,
        "capability": [found.major, found.minor],
        "uuid": f"GPU-{found.uuid}" if hasattr(found, "uuid") else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "kernels": torch.cuda.get_arch_list(),
    }


def device(device: torch.device) -> dict[str, Any]:
    """The card's facts, after it has added up numbers right: CUDA may be "available" and still run nothing."""
    if device.type == "cuda":
        torch.cuda.init()  # says what is wrong in words where is_available only says no
        found = facts()
    else:
        found = {"name": "CPU", "memory": 0, "capability": [0, 0], "uuid": "", "cuda": "none", "kernels": []}
        found["torch"] = torch.__version__
    try:
        total = int(torch.arange(1000, device=device).sum().item())
    except RuntimeError as error:
        return found | {"fault": f"it runs nothing: {str(error).partition(chr(10))[0]}"}
    return found if total == 499500 else found | {"fault": f"it adds the numbers up to 999 to {total}, not 499500"}


def eight_bit_step(device: torch.device) -> float:
    """One AdamW step with 8-bit states by bitsandbytes, compared with float32's; gives the relative error."""
    from bitsandbytes import functional as kernels

    weights = torch.zeros(4, 256, device=device)
    gradient = torch.linspace(-1, 1, 1024, device=device).reshape(4, 256)
    states = [torch.zeros(4, 256, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [torch.zeros(4, device=device) for _ in range(2)]
    maps = [kernels.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
    kernels.optimizer_update_8bit_blockwise(
        "adam", gradient, weights, *states, 0.9, 0.999, 0.0, 0.0, 1e-8, 1, 1e-3, *maps, *scales, 0.0
    )
    expected = -1e-3 * gradient.sign()  # Adam's first step is the learning rate against the gradient's sign
    error = float((weights - expected).norm() / expected.norm())
    if not error < 0.05:
        raise RuntimeError(f"a step of bitsandbytes' 8-bit AdamW is off by {error:.1e}")
    return error


def matrix_product(device: torch.device, size: int = MATRIX, seconds: float = LASTING) -> float:
    """TFLOP/s of a bf16 product of square matrices of random numbers (zeros draw less power and are faster)."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / per_call(lambda: torch.mm(a, b, out=out), device, seconds) / 1e12


def attention(device: torch.device, tokens: int = TOKENS, seconds: float = SHORT) -> float:
    """TFLOP/s of FlashAttention-2, forward and backward, by torch; the backward pass counts as two and a half."""
    shape = (1, HEADS, tokens, HEAD_SIZE)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    onto = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def both() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(query, key, value)
        torch.autograd.grad(out, (query, key, value), onto)

    return 3.5 * 4 * HEADS * HEAD_SIZE * tokens**2 / per_call(both, device, seconds) / 1e12


def memory(device: torch.device, most: int = MOST_COPIED, seconds: float = SHORT) -> float:
    """GB/s of a copy within the card, read and written."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else most * 4
    size = min(most, free // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / per_call(lambda: target.copy_(source), device, seconds) / 1e9


def from_host(device: torch.device, size: int = HOST_BYTES, seconds: float = SHORT) -> float:
    """GB/s from pinned memory to the card."""
    host, card = _host_and_card(device, size)
    return size / per_call(lambda: card.copy_(host, non_blocking=True), device, seconds) / 1e9


def to_host(device: torch.device, size: int = HOST_BYTES, seconds: float = SHORT) -> float:
    """GB/s from the card to pinned memory."""
    host, card = _host_and_card(device, size)
    return size / per_call(lambda: host.copy_(card, non_blocking=True), device, seconds) / 1e9


def _host_and_card(device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return host, torch.empty(size, dtype=torch.uint8, device=device)


def per_call(work: Callable[[], object], device: torch.device, seconds: float, warm_up: float = WARM_UP) -> float:
    """Seconds that one call takes, in a row of them that lasts about ``seconds`` (one call at least)."""

    def timed(calls: int) -> float:
        _wait_for(device)
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        _wait_for(device)
        return time.perf_counter() - begun

    timed(1)
    once = max(timed(1), 1e-6)
    timed(max(1, int(min(warm_up, seconds) / once)))
    calls = max(1, int(seconds / once))
    return timed(calls) / calls


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


CARD: dict[str, Callable[[torch.device], Any]] = {
    "device": device,
    "8-bit step": eight_bit_step,
    "matrix product": matrix_product,
    "attention": attention,
    "memory": memory,
    "from host": from_host,
    "to host": to_host,
}


# ---------------------------------------------------------------- between cards


def measure_links(reduced: int = REDUCED) -> None:
    """One of WORLD_SIZE processes, as their environment says: sums a tensor over all of them and sends one from the
    first to the second. A wrong sum, as hosts with a wrongly set up IOMMU give, is an error."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tell("links", begun=True)  # from here on time is limited
    on_card = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_card else "gloo")

    def found(part: str, value: float) -> None:
        if rank == 0:
            tell(part, value=value)

    pattern = torch.arange(reduced // 4, device=device, dtype=torch.float32) % 1000
    summed = pattern + rank
    dist.all_reduce(summed)
    if not torch.equal(summed, size * pattern + size * (size - 1) / 2):
        tell("all-reduce", error="the sum over the GPUs is wrong: what one sent, another did not receive")
        return
    buffer = torch.zeros_like(pattern)
    seconds = _together(lambda: dist.all_reduce(buffer), device)
    found("all-reduce", 2 * (size - 1) / size * reduced / seconds / 1e9)

    def send() -> None:
        if rank == 0:
            dist.send(buffer, 1)
        elif rank == 1:
            dist.recv(buffer, 0)

    found("GPU to GPU", reduced / _together(send, device) / 1e9)
    dist.barrier()
    dist.destroy_process_group()


def _together(work: Callable[[], object], device: torch.device) -> float:
    """Seconds a call takes, in a row of equally many on all processes: one more on one of them would hang."""
    timed = per_call(work, device, 0.0)
    calls = torch.tensor([max(1, int(SHORT / max(timed, 1e-6)))], device=device)
    dist.broadcast(calls, 0)
    _wait_for(device)
    begun = time.perf_counter()
    for _ in range(int(calls.item())):
        work()
    _wait_for(device)
    return (time.perf_counter() - begun) / int(calls.item())


if __name__ == "__main__":
    sys.exit(main())
