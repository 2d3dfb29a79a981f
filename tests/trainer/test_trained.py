"""Tensors that know their place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.runs import make_trained, shards_of
from trainer.trained import by_block, held_rows, plain_name, trained_tensors


@given(st.integers(1, 100), st.integers(1, 9))
def test_rows_are_cut_as_fsdp2_cuts_them(rows: int, size: int) -> None:
    """Which is torch.chunk, with empty ones for those who get none."""
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(size)]
    chunks += [[]] * (size - len(chunks))
    for rank, chunk in enumerate(chunks):
        first, count = held_rows(rows, rank, size)
        assert list(range(first, first + count)) == chunk


def test_only_what_wants_a_gradient_is_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    found = trained_tensors(model, 0, 1)
    assert [(t.name, t.shape, t.first_row, t.sharded) for t in found] == [
        ("1.weight", (2, 5), 0, False),
        ("1.bias", (2,), 0, False),
    ]


def test_the_weight_is_the_parameters_memory() -> None:
    (tensor,) = make_trained({"x": torch.ones(2, 3)})
    tensor.weight.zero_()
    assert not tensor.parameter.any()
    assert not tensor.weight.requires_grad


def test_indices_are_those_of_the_logical_tensor() -> None:
    last = shards_of({"x": torch.zeros(10, 3, 4)}, rank=2, size=3)[0]
    assert (last.first_row, last.weight.shape, last.shape) == (8, (2, 3, 4), (10, 3, 4))
    assert (last.row_size, last.first_index) == (12, 96)
    bias = shards_of({"x": torch.zeros(10)}, rank=1, size=3)[0]
    assert (bias.row_size, bias.first_index) == (1, 4)


def test_a_gradient_is_taken_once_and_in_float32() -> None:
    (tensor,) = make_trained({"x": torch.ones(2, dtype=torch.bfloat16)})
    assert tensor.take_gradient() is None
    (tensor.parameter * 3).sum().backward()
    gradient = tensor.take_gradient()
    assert gradient is not None
    assert torch.equal(gradient, torch.tensor([3.0, 3.0]))
    assert tensor.parameter.grad is None
    assert tensor.take_gradient() is None


@pytest.mark.parametrize("name", ["blocks.0._orig_mod.linear.weight", "_orig_mod.blocks.0.linear.weight"])
def test_names_are_without_torch_compiles_own(name: str) -> None:
    assert plain_name(name) == "blocks.0.linear.weight"


def test_blocks_come_as_backward_comes_to_them() -> None:
    names = ["x_embedder.w", "transformer_blocks.0.a", "transformer_blocks.0.b", "transformer_blocks.1.a"]
    names += ["single_transformer_blocks.0.a", "single_transformer_blocks.10.a", "proj_out.w"]
    found = by_block(make_trained({name: torch.zeros(1) for name in names}))
    assert [[tensor.name for tensor in block] for block in found] == [
        ["single_transformer_blocks.10.a"],
        ["single_transformer_blocks.0.a"],
        ["transformer_blocks.1.a"],
        ["transformer_blocks.0.a", "transformer_blocks.0.b"],
    ]
