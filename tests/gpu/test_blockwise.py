"""The fused kernel steps as bitsandbytes' kernels do on the CPU, wherever the states lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runs import PLAN, make_job, make_trained
from trainer.blockwise import Blockwise
from trainer.make_optimizer import BLOCKWISE, make_optimizer
from trainer.trained import Trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCKS = 7  # more than there are slots for streamed states
SHAPES = {"x_embedder.weight": (96, 64)} | {
    f"single_transformer_blocks.{block}.{name}": shape
    for block in range(BLOCKS)
    for name, shape in {"proj.weight": (1537, 512), "proj.bias": (1537,), "norm.weight": (128,)}.items()
}
STEPS = 5


def start(device: str, dtype: torch.dtype) -> list[Trained]:
    generator = torch.Generator().manual_seed(1)
    return make_trained({n: torch.randn(s, generator=generator).to(dtype).to(device) for n, s in SHAPES.items()})


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(SHAPES[name], generator=generator) * 10.0 ** -(step % 3)


def train(optimizer: Blockwise, steps: range = range(STEPS), go: float = 1.0) -> None:
    for step in steps:
        device = optimizer.tensors[0].weight.device
        optimizer.begin_step(step, 1e-2, torch.tensor(go, device=device))
        for tensor in reversed(optimizer.tensors):
            tensor.parameter.grad = gradient(tensor.name, step).to(tensor.weight)
            optimizer.update(tensor)


def make(tensors: list[Trained], name: str, host: int = 0) -> Blockwise:
    optimizer = make_optimizer(tensors, make_job(optimizer=name), replace(PLAN, host_state_blocks=host), world=None)  # type: ignore[arg-type]
    assert isinstance(optimizer, Blockwise)
    return optimizer


def weights(optimizer: Blockwise) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.weight.cpu() for tensor in optimizer.tensors}


def states(optimizer: Blockwise) -> dict[str, torch.Tensor]:
    return {piece.name: piece.tensor.cpu().clone() for piece in optimizer.pieces()}


@pytest.mark.parametrize("name", BLOCKWISE)
def test_the_gpu_steps_as_the_cpu(name: str) -> None:
    here, there = make(start("cpu", torch.float32), name), make(start("cuda", torch.float32), name)
    train(here)
    train(there)
    begun = {tensor.name: tensor.weight for tensor in start("cpu", torch.float32)}
    for tensor, weight in weights(here).items():
        off = (weights(there)[tensor] - weight).norm() / (weight - begun[tensor]).norm()
        assert off < (2e-2 if "8bit" in name else 1e-4), (tensor, off)
    expected, found = states(here), states(there)
    assert {n: (s.shape, s.dtype) for n, s in found.items()} == {n: (s.shape, s.dtype) for n, s in expected.items()}
    for state, values in expected.items():
        if values.dtype == torch.uint8:  # codes may be the neighbour where a value lies between two
            apart = (found[state].int() - values.int()).abs()
            assert (apart > 1).float().mean() < 3e-3, state
        else:
            torch.testing.assert_close(found[state], values, rtol=2e-2 if "8bit" in name else 1e-4, atol=1e-6)


@pytest.mark.parametrize("host", [2, BLOCKS])
@pytest.mark.parametrize("name", BLOCKWISE)
def test_streamed_states_change_nothing(name: str, host: int) -> None:
    resident, streamed = make(start("cuda", torch.bfloat16), name), make(start("cuda", torch.bfloat16), name, host)
    assert streamed.streamed is not None
    for optimizer in (resident, streamed):
        train(optimizer, range(3))
        states(optimizer)  # a save in between
        train(optimizer, range(3, STEPS))
    assert all(torch.equal(weights(streamed)[n], w) for n, w in weights(resident).items())
    found = states(streamed)
    assert all(torch.equal(found[n], s) for n, s in states(resident).items())


def test_going_on_from_states_that_were_brought_back() -> None:
    straight, second = (make(start("cuda", torch.bfloat16), "AdamW8bit", BLOCKS) for _ in range(2))
    train(straight, range(3))
    for piece, other in zip(second.pieces(), straight.pieces(), strict=True):
        piece.tensor.copy_(other.tensor)
    for mine, other in zip(second.tensors, straight.tensors, strict=True):
        mine.weight.copy_(other.weight)
    train(straight, range(3, STEPS))
    train(second, range(3, STEPS))
    assert all(torch.equal(weights(second)[n], w) for n, w in weights(straight).items())


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW32bit", "Lion8bit"])
def test_what_is_no_number_moves_nothing(name: str) -> None:
    optimizer = make(start("cuda", torch.bfloat16), name)
    train(optimizer, range(2))
    before, kept = weights(optimizer), states(optimizer)
    train(optimizer, range(2, 3), go=0.0)
    assert all(torch.equal(weights(optimizer)[n], w) for n, w in before.items())
    spoiled = next(tensor for tensor in optimizer.tensors if tensor.name.endswith("proj.weight"))
    optimizer.begin_step(2, 1e-2, torch.ones((), device="cuda"))
    spoiled.parameter.grad = torch.full_like(spoiled.weight, torch.nan)
    optimizer.update(spoiled)
    assert optimizer.skipped.item() > 0
    assert all(torch.equal(weights(optimizer)[n], w) for n, w in before.items())
    assert all(torch.equal(states(optimizer)[n], s) for n, s in kept.items())


def test_small_steps_arrive_in_bf16() -> None:
    """Round-to-nearest would leave a weight of 1 where it is."""
    tensors = make_trained({"x": torch.ones(256, 256, dtype=torch.bfloat16, device="cuda")})
    optimizer = make(tensors, "AdamW8bit")
    for step in range(20):
        optimizer.begin_step(step, 1e-4, torch.ones((), device="cuda"))
        tensors[0].parameter.grad = torch.ones_like(tensors[0].weight)
        optimizer.update(tensors[0])
    assert tensors[0].weight.float().mean().item() == pytest.approx(1 - 20 * 1e-4, abs=2e-4)
