"""Processes that drift apart are stopped, by name of process, tensor and step; those that agree train on untouched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bootstrap.volume import Volume
from tests.runs import make_trained, make_world
from tests.training import fill_volume, prepared, shared_folder, train
from trainer.agreement import EVERY, Agreement, checksum, describe


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, flux_tiny_schnell: Path) -> Volume:
    """The one of test_train.py: the cache fills once."""
    bases = (flux_tiny, flux_tiny_schnell)
    return Volume(shared_folder(tmp_path_factory, "training", lambda root: fill_volume(root, *bases)))


NAMES = ("the step", "the pictures of the step", "the learning rate", "a.weight", "b.weight", "c.weight", "d.weight")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(8, dtype=torch.bfloat16),
        torch.randn(4, 4).to(torch.float8_e4m3fn),
        torch.arange(9, dtype=torch.int8),
        torch.tensor(1.0),
    ],
    ids=["float32", "bfloat16", "fp8", "int8", "scalar"],
)
def test_any_changed_bit_changes_the_sum(tensor: torch.Tensor) -> None:
    before = checksum(tensor)
    assert torch.equal(checksum(tensor.clone()), before)
    bits = tensor.clone().reshape(-1).view(torch.uint8)
    for bit in (0, 3, 7):
        changed = bits.clone()
        changed[-1] ^= 1 << bit
        assert not torch.equal(checksum(changed.view(tensor.dtype)), before)


def test_zeros_of_both_signs_differ() -> None:
    assert not torch.equal(checksum(torch.tensor([0.0])), checksum(torch.tensor([-0.0])))


def told(*rows: list[int]) -> str:
    return describe(42, NAMES, torch.tensor(rows, dtype=torch.int64), {"d.weight": 7})


def test_of_two_nobody_can_tell_who_is_wrong() -> None:
    line = told([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 6, 7])
    assert line.startswith("after step 42 process 0 and process 1 differ in b.weight. That must be the same everywhere")
    assert "another pod is the cure" in line


def test_of_more_the_odd_ones_are_named() -> None:
    line = told([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7])
    assert "after step 42 process 1 differs from the others in a.weight, b.weight, c.weight and 1 more." in line


def test_what_is_gathered_must_be_what_was_sent() -> None:
    assert told([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]) == ""
    assert "process 1 differs from the others in d.weight" in told([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8])
    assert "process 0 and process 1 differ in d.weight" in told([1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 8])


def test_another_order_of_pictures_is_our_own_fault() -> None:
    line = told([1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 4, 5, 6, 7])
    assert "process 0 and process 1 differ in the pictures of the step" in line
    assert "this program is at fault" in line


def test_alone_nothing_is_asked() -> None:
    weights = {"a": torch.ones(2)}
    model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2))})
    agreement = Agreement(model, make_trained(weights), 0, make_world(None))  # type: ignore[arg-type]
    agreement.ask(1, (0,), 1e-4)
    agreement.ask(EVERY, (0,), 1e-4)
    assert agreement.asked is None
    agreement.answer()


class Strays(torch.optim.SGD):
    """Writes something else into one tensor on the last process, in its second step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2 and os.environ["RANK"] == "2":
            self.param_groups[0]["params"][5].data[0] += 1e-6


@pytest.mark.slow
def test_a_replica_that_strays_ends_the_run(volume: Volume) -> None:
    """The state of the step before stands; that step's own is not saved."""
    keys: dict[str, Any] = {"optimizer": "tests.trainer.test_agreement.Strays", "save": {"every": 1, "states": 9}}
    run = prepared(volume, name="strays", method="lora", steps=5, plan={"processes": 3}, images_per_step=3, **keys)
    each = train(run)
    assert each.outcome.code == 1
    assert each.outcome.reason.startswith("DisagreementError: after step 2 process 2 differs from the others in ")
    assert ".lora_" in each.outcome.reason
    assert [state.step for state in each.states] == [1]


def train_with_a_bad_way(run_file: Path) -> int:
    """What process 0 receives of a tensor, of the third group, is not what was sent."""
    from trainer.train import main

    receive, count = Agreement._received, 0

    def bad(self: Agreement, group: FSDPModule) -> dict[str, torch.Tensor]:
        nonlocal count
        count += 1
        name, first = next(iter((received := receive(self, group)).items()))
        return received | {name: first + (count == 3 and self.world.leads)}

    Agreement._received = bad  # type: ignore[method-assign]
    return main(run_file)


@pytest.mark.slow
def test_what_comes_otherwise_than_it_was_sent_ends_the_run(volume: Volume) -> None:
    run = prepared(volume, name="bad-way", steps=3, plan={"processes": 2})
    each = train(run, work=train_with_a_bad_way)
    assert each.outcome.code == 1
    assert "after step 1 process 0 differs from the others in " in each.outcome.reason
    assert each.states == []


def test_it_is_asked_after_the_first_steps_and_at_intervals(control: dist.ProcessGroup) -> None:
    world = make_world(control, size=2)
    agreement = Agreement(torch.nn.Module(), [], 250, world)
    assert [step for step in range(251, 601) if agreement.due(step)] == [251, 252, 253, 300, 400, 500, 600]
