"""What one adapted layer costs as LoRA, as DoRA here, and as DoRA by peft: ``.venv/bin/python -m bench.dora``.

On a GPU a feed-forward layer of FLUX.1 at 1024 px; on a CPU, one thread, a small one. Milliseconds of CPU or GPU time,
the least of ten.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer
from torch import nn

from trainer.adapter import ADAPTER, multiply_in_type_of_input
from trainer.dora import add_lengths

RANK = 16
TURNS = 10


def layer(kind: str, inputs: int, outputs: int, device: torch.device) -> nn.Module:
    """An adapted linear layer over a frozen one in bf16."""
    torch.manual_seed(0)
    with device:
        base = nn.Linear(inputs, outputs).bfloat16().requires_grad_(False)
        config = LoraConfig(r=RANK, lora_alpha=RANK, use_dora=kind == "DoRA by peft")
        made = Linear(base, ADAPTER, config, r=RANK, lora_alpha=RANK)
    assert isinstance(made, LoraLayer)
    if kind == "DoRA by peft":
        return made.to(device)
    multiply_in_type_of_input(made, ADAPTER, torch.float32)
    if kind == "DoRA":
        add_lengths(made, ADAPTER)
    return made.to(device)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.process_time()
        work()
        return 1000 * (time.process_time() - begun)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[float, float]:
    """Forward and backward, the least of some turns after two to warm up."""
    forward, backward = [], []
    for _ in range(TURNS + 2):
        out: list[torch.Tensor] = []
        forward.append(milliseconds(lambda out=out: out.append(model(x)), x.device))  # type: ignore[misc]
        backward.append(milliseconds(lambda out=out: out[0].backward(torch.ones_like(out[0])), x.device))  # type: ignore[misc]
    return min(forward[2:]), min(backward[2:])


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    tokens, inputs, outputs = (4608, 3072, 12288) if gpu else (1024, 512, 2048)
    torch.set_num_threads(1)
    print(f"{device.type}: {tokens} tokens, {inputs} to {outputs}, rank {RANK}")
    print("| | eager: forward, backward | compiled: forward, backward |\n|---|---|---|")
    for kind in ("LoRA", "DoRA", "DoRA by peft"):
        x = torch.randn(1, tokens, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
        made = layer(kind, inputs, outputs, device).train()
        cells = ["{:.2f}, {:.2f} ms".format(*measure(made, x))]
        try:
            cells.append("{:.2f}, {:.2f} ms".format(*measure(torch.compile(made, fullgraph=True), x)))
        except torch._dynamo.exc.Unsupported as error:
            cells.append(f"not possible: {str(error).splitlines()[0]}")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
