"""What goes round: every block is itself whenever it is asked for, and what was changed stays so. On the CPU; tests/gpu
has the same with streams."""

from __future__ import annotations

import random

import pytest
import torch

from trainer.ring import SLOTS, Layout, Ring

CPU = torch.device("cpu")
SIZES = (100, 300, 200, 50, 250)


def filled(order: list[int]) -> Ring:
    ring = Ring(SIZES, order, CPU)
    for number, block in enumerate(ring.blocks):
        block.host.fill_(number)
    return ring


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 4, 3, 2, 1, 0], [0]])
def test_in_turn(order: list[int]) -> None:
    ring, seen = filled(order), [0] * 5
    for _ in range(3):
        for number in order:
            memory = ring.need(number)[: SIZES[number]]
            assert (memory == number + seen[number]).all()
            seen[number] += 1
            memory += 1
            ring.release(number, changed=True)
    ring.settle()
    for number, block in enumerate(ring.blocks):
        assert (block.host == number + 3 * order.count(number)).all()


def test_out_of_turn() -> None:
    ring, expected, draw = filled([0, 1, 2, 3, 4]), list(range(5)), random.Random(0)
    for _ in range(300):
        number = draw.randrange(5)
        changed = draw.random() < 0.5
        memory = ring.need(number)[: SIZES[number]]
        assert (memory == expected[number] % 256).all()
        if changed:
            memory += 1
            expected[number] += 1
        ring.release(number, changed=changed)
        if draw.random() < 0.1:
            ring.settle()
    ring.settle()
    assert [int(block.host[0]) for block in ring.blocks] == [value % 256 for value in expected]


def test_the_next_are_there_before_they_are_asked_for() -> None:
    ring = filled([0, 1, 2, 3, 4])
    ring.need(0)
    ring.release(0, changed=True)
    assert {slot.tenant for slot in ring.slots} == {1, 2, 3}
    assert len(ring.slots) == SLOTS


def test_what_is_needed_again_at_once_stays() -> None:
    """At the turn from the forward to the backward pass."""
    ring = filled([0, 1, 2, 3, 4, 4, 3, 2, 1, 0])
    for number in range(5):
        ring.need(number)
        ring.release(number, changed=False)
    assert {slot.tenant for slot in ring.slots} == {4, 3, 2}


def test_a_block_may_be_asked_for_again_while_it_is_used() -> None:
    ring = filled([0, 1, 2, 3, 4])
    assert ring.need(1) is ring.need(1)


def test_a_turn_that_never_ends_keeps_nobody_waiting() -> None:
    ring = filled([0, 1, 2, 3, 4])
    for number in range(5):
        ring.need(number)[: SIZES[number]] += 100
    ring.settle()
    assert [int(block.host[0]) for block in ring.blocks] == [100, 101, 102, 103, 104]


def test_tensors_side_by_side() -> None:
    tensors = {
        "a": torch.empty(3, 5, dtype=torch.bfloat16),
        "b": torch.empty(7, dtype=torch.uint8),
        "c": torch.empty(2),
    }
    layout = Layout.of(tensors)
    views = layout.views(torch.zeros(layout.size, dtype=torch.uint8))
    for number, (name, view) in enumerate(views.items(), start=1):
        assert (view.shape, view.dtype) == (tensors[name].shape, tensors[name].dtype)
        view.fill_(number)
    assert [float(view.float().mean()) for view in views.values()] == [1, 2, 3]
