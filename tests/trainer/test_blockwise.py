"""Adam and Lion with bitsandbytes' arithmetic, held against its own classes, on any number of GPUs."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from bootstrap.estimate import FUSED
from jobs.problem import JobError
from tests.runs import PLAN, equal, make_job, make_trained, rate, saved, shards_of, weights_in
from trainer.blockwise import Blockwise
from trainer.make_optimizer import BLOCKWISE, make_optimizer
from trainer.optimizer import OptimizerStateError, Piece
from trainer.trained import Trained

SHAPES = {
    "blocks.0.to_q.weight": (6, 512),
    "blocks.0.to_q.bias": (6,),
    "blocks.0.norm.weight": (128,),
    "x_embedder.weight": (16, 64),  # its rows are no whole blocks
    "long.bias": (1024,),  # large enough for 8 bits by bitsandbytes' rule, were it a matrix
}
STEPS = 6


def start(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * len(name) + step)
    return torch.randn(SHAPES[name], generator=generator) * 10.0 ** (-step)


def make(tensors: list[Trained], name: str, **keys: Any) -> Blockwise:
    job = make_job(optimizer=name, **{"weight_decay": 0.02} | keys)
    optimizer = make_optimizer(tensors, job, PLAN, world=None)  # type: ignore[arg-type]  # needs nobody
    assert isinstance(optimizer, Blockwise)
    return optimizer


def train(optimizer: Blockwise, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        optimizer.begin_step(step, rate(step), torch.ones(()))
        for tensor in optimizer.tensors:
            rows = slice(tensor.first_row, tensor.first_row + tensor.weight.shape[0])
            tensor.parameter.grad = gradient(tensor.name, step)[rows].to(tensor.weight.dtype)
        optimizer.finish_step()


# ---------------------------------------------------------------- the arithmetic is bitsandbytes'

SMALL = {"min_8bit_size": 0}
CLASSES = {
    "AdamW8bit": (bnb.optim.AdamW8bit, SMALL),
    "PagedAdamW8bit": (bnb.optim.AdamW8bit, SMALL),
    "PagedAdamW32bit": (bnb.optim.AdamW, {}),
    "Lion8bit": (bnb.optim.Lion8bit, SMALL),
    "PagedLion8bit": (bnb.optim.Lion8bit, SMALL),
}
WHOLE_BLOCKS = ("blocks.0.to_q.weight",)


@pytest.mark.parametrize("name", CLASSES)
def test_every_step_is_the_one_of_bitsandbytes_class(name: str) -> None:
    kind, arguments = CLASSES[name]
    ours = make(make_trained(start()), name)
    for tensor_name, begun in start().items():
        theirs = torch.nn.Parameter(begun.clone())
        eight_bits = name.endswith("8bit") and tensor_name in WHOLE_BLOCKS
        chosen = (
            kind
            if eight_bits or name == "PagedAdamW32bit"
            else {"A": bnb.optim.AdamW, "L": bnb.optim.Lion}[kind.__name__[0]]
        )
        optimizer = chosen([theirs], lr=1.0, weight_decay=0.02, **(arguments if eight_bits else {}))
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = rate(step)
            theirs.grad = gradient(tensor_name, step)
            optimizer.step()
        train_one(ours, tensor_name)
        (tensor,) = [t for t in ours.tensors if t.name == tensor_name]
        assert torch.equal(tensor.weight, theirs.detach()), tensor_name


def train_one(optimizer: Blockwise, name: str) -> None:
    (tensor,) = [t for t in optimizer.tensors if t.name == name]
    for step in range(STEPS):
        optimizer.begin_step(step, rate(step), torch.ones(()))
        tensor.parameter.grad = gradient(name, step)
        optimizer.update(tensor)


def test_arguments_reach_the_kernel() -> None:
    arguments = {"betas": [0.5, 0.6], "eps": 1e-3}
    ours = make(make_trained(start()), "PagedAdamW32bit", optimizer_args=arguments, weight_decay=0.3)
    name = "x_embedder.weight"
    train_one(ours, name)
    theirs = torch.nn.Parameter(start()[name])
    optimizer = bnb.optim.AdamW([theirs], betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        theirs.grad = gradient(name, step)
        optimizer.step()
    assert torch.equal(weights_in(ours)[name], theirs.detach())


def test_unknown_arguments_are_told() -> None:
    job = make_job(optimizer="AdamW8bit").model_copy(update={"optimizer_args": {"beta1": 0.9, "betas": (0.9, 0.99)}})
    with pytest.raises(JobError, match=r"optimizer_args: AdamW8bit does not take beta1\. It takes betas and eps"):
        make_optimizer(make_trained(start()), job, PLAN, world=None)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is 8-bit


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_state_is_8_bit_where_the_logical_rows_are_whole_blocks(name: str) -> None:
    kept = {piece.name: piece.tensor.dtype for piece in make(make_trained(start()), name).pieces()}
    small = torch.uint8 if name.endswith("8bit") else torch.float32
    states = ("state1",) if "Lion" in name else ("state1", "state2")
    expected = {
        f"{tensor}.{s}": small if tensor in WHOLE_BLOCKS else torch.float32 for tensor in SHAPES for s in states
    }
    if name.endswith("8bit"):
        expected |= {f"{tensor}.{s}.absmax": torch.float32 for tensor in WHOLE_BLOCKS for s in states}
    assert kept == expected


def test_the_same_states_are_8_bit_on_any_number_of_processes() -> None:
    """bitsandbytes' own rule looks at the local size, and flips between GPU counts."""
    dtypes = [
        {
            piece.name: (piece.tensor.dtype, piece.shape)
            for piece in make(shards_of(start(), 0, size), "AdamW8bit").pieces()
        }
        for size in (1, 2, 3, 6, 8)
    ]
    assert all(found == dtypes[0] for found in dtypes)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_rows_of_all_processes_are_the_whole_to_the_bit(name: str, dtype: torch.dtype, size: int) -> None:
    whole = make(make_trained(start(dtype)), name)
    train(whole)
    parts = [make(shards_of(start(dtype), rank, size), name) for rank in range(size)]
    for part in parts:
        train(part)
    joined = {n: torch.cat([weights_in(part)[n] for part in parts]) for n in SHAPES}
    assert equal(joined, weights_in(whole))
    one, many = saved(whole), saved(*parts)
    assert one.shapes == many.shapes
    assert all(torch.equal(one.read(n, 0, None), many.read(n, 0, None)) for n in one.shapes)


def test_bf16_weights_move_by_less_than_they_can_show() -> None:
    tensors = make_trained({"x": torch.ones(64, 256, dtype=torch.bfloat16)})
    optimizer = make(tensors, "AdamW8bit", weight_decay=0)
    for step in range(20):
        optimizer.begin_step(step, 1e-4, torch.ones(()))
        tensors[0].parameter.grad = torch.ones(64, 256, dtype=torch.bfloat16)
        optimizer.finish_step()
    assert tensors[0].weight.float().mean().item() == pytest.approx(1 - 20 * 1e-4, abs=2e-4)


def test_a_tensor_without_a_gradient_stays() -> None:
    tensors = make_trained(start())
    optimizer = make(tensors, "AdamW8bit")
    optimizer.begin_step(0, 1.0, torch.ones(()))
    optimizer.finish_step()
    assert equal(weights_in(optimizer), start())
    assert not any(piece.tensor.any() for piece in optimizer.pieces())


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW32bit", "Lion8bit"])
def test_what_is_no_number_moves_nothing(name: str) -> None:
    optimizer = make(make_trained(start()), name)
    train(optimizer, 0, 2)
    before, states = weights_in(optimizer), [piece.tensor.clone() for piece in optimizer.pieces()]
    spoiled = optimizer.tensors[0]
    for go in (0.0, 1.0):  # the loss is no number; one gradient is none
        optimizer.begin_step(2, 1e-2, torch.tensor(go))
        spoiled.parameter.grad = gradient(spoiled.name, 2).to(spoiled.weight.dtype)
        if go:
            spoiled.parameter.grad.view(-1)[5] = torch.nan
        optimizer.finish_step()
        assert equal(weights_in(optimizer), before)
        assert all(torch.equal(a.tensor, b) for a, b in zip(optimizer.pieces(), states, strict=True))
        assert optimizer.skipped.item() == go


def test_a_gradient_is_used_up() -> None:
    optimizer = make(make_trained(start()), "AdamW8bit")
    train(optimizer, 0, 1)
    assert all(tensor.parameter.grad is None for tensor in optimizer.tensors)


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_going_on_from_a_state_on_any_number_of_processes_is_not_noticed(name: str, before: int, after: int) -> None:
    straight = make(make_trained(start(torch.bfloat16)), name)
    train(straight)
    first = [make(shards_of(start(torch.bfloat16), rank, before), name) for rank in range(before)]
    for part in first:
        train(part, 0, 3)
    middle = {n: torch.cat([weights_in(part)[n] for part in first]) for n in SHAPES}
    kept = saved(*first)
    second = [make(shards_of(middle, rank, after), name) for rank in range(after)]
    for part in second:
        part.load(kept)
        train(part, 3, STEPS)
    assert equal({n: torch.cat([weights_in(part)[n] for part in second]) for n in SHAPES}, weights_in(straight))


@pytest.mark.parametrize(("was", "now"), [("Lion8bit", "AdamW8bit"), ("PagedAdamW32bit", "AdamW8bit")])
def test_a_state_of_another_optimizer_is_told(was: str, now: str) -> None:
    with pytest.raises(OptimizerStateError, match=r"the state (has no|keeps) .*state"):
        make(make_trained(start()), now).load(saved(make(make_trained(start()), was)))


def test_a_state_of_another_model_is_told() -> None:
    other = {name: torch.zeros(2 * w.shape[0], *w.shape[1:]) for name, w in start().items()}
    with pytest.raises(OptimizerStateError, match="the state has no blocks"):
        make(make_trained(start()), "AdamW8bit").load(saved(make(make_trained(other), "AdamW8bit")))


def test_pieces_share_the_states_memory() -> None:
    optimizer = make(make_trained(start()), "AdamW8bit")
    pieces: list[Piece] = optimizer.pieces()
    train(optimizer, 0, 1)
    assert all(piece.tensor.any() for piece in pieces)


def test_states_are_streamed_only_between_a_host_and_a_gpu() -> None:
    job = make_job(optimizer="PagedAdamW8bit")
    on_cpu = Blockwise(make_trained(start()), job, kernel="adam", bits=8, host=3)
    assert on_cpu.streamed is None


def test_the_plan_knows_which_optimizers_these_are() -> None:
    assert sorted(BLOCKWISE) == sorted(FUSED)
