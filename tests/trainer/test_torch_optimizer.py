"""Any torch optimizer over float32 stand-ins: its own arithmetic, and going on as if nothing had been."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prodigyopt import Prodigy

from jobs.problem import JobError
from tests.runs import PLAN, equal, make_job, make_trained, make_world, rate, saved, shards_of, weights_in
from trainer.make_optimizer import make_optimizer
from trainer.optimizer import OptimizerStateError
from trainer.rounding import round_stochastically
from trainer.torch_optimizer import TorchOptimizer
from trainer.trained import Trained
from trainer.world import World

SHAPES = {"a.weight": (6, 32), "a.bias": (6,), "b.weight": (16, 8), "zero.weight": (4, 4)}
STEPS = 6


@pytest.fixture
def world(control: dist.ProcessGroup) -> World:
    return make_world(control)


def start(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The last is zero, as the upper half of an adapter is: Prodigy keeps a scalar for such a one."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return tensors | {"zero.weight": torch.zeros(4, 4, dtype=dtype)}


def gradient(name: str, step: int) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * len(name) + step))


def make(tensors: list[Trained], world: World, name: str, **keys: Any) -> TorchOptimizer:
    job = make_job(optimizer=name, **{"weight_decay": 0.02} | keys)
    optimizer = make_optimizer(tensors, job, PLAN, world)
    assert isinstance(optimizer, TorchOptimizer)
    return optimizer


def train(optimizer: TorchOptimizer, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        optimizer.begin_step(step, rate(step), torch.ones(()))
        fill_gradients(optimizer, step)
        optimizer.finish_step()


def fill_gradients(optimizer: TorchOptimizer, step: int) -> None:
    for tensor in optimizer.tensors:
        rows = slice(tensor.first_row, tensor.first_row + tensor.weight.shape[0])
        tensor.parameter.grad = gradient(tensor.name, step)[rows].to(tensor.weight.dtype)


# ---------------------------------------------------------------- the arithmetic is torch's

CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
    "Prodigy": Prodigy,
    "torch.optim.SGD": torch.optim.SGD,
    "torch.optim.RAdam": torch.optim.RAdam,
}


def plain(name: str, first: int = 0, last: int = STEPS, **arguments: Any) -> dict[str, torch.Tensor]:
    """The class itself, as anybody uses it."""
    parameters = {n: torch.nn.Parameter(w) for n, w in start().items()}
    optimizer = CLASSES[name](list(parameters.values()), **{"lr": 1.0, "weight_decay": 0.02} | arguments)
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for n, parameter in parameters.items():
            parameter.grad = gradient(n, step)
        optimizer.step()
    return {n: parameter.detach() for n, parameter in parameters.items()}


@pytest.mark.parametrize("name", CLASSES)
def test_float32_weights_step_as_the_class_steps_them(name: str, world: World) -> None:
    optimizer = make(make_trained(start()), world, name)
    assert optimizer.together
    train(optimizer)
    assert equal(weights_in(optimizer), plain(name))


def test_the_jobs_arguments_reach_it(world: World) -> None:
    optimizer = make(make_trained(start()), world, "AdamW", optimizer_args={"betas": [0.5, 0.6]}, weight_decay=0.3)
    train(optimizer)
    assert equal(weights_in(optimizer), plain("AdamW", betas=(0.5, 0.6), weight_decay=0.3))


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "torch.optim.SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_optimizer_or_one_for_each_tensor_is_the_same(name: str, dtype: torch.dtype, world: World) -> None:
    def make_one(together: bool) -> torch.optim.Optimizer | Any:
        tensors = make_trained(start(dtype))
        kind = CLASSES[name]
        return TorchOptimizer(
            tensors, 42, lambda p: kind(p, lr=1.0), world, together=together, elementwise=name == "AdamW"
        )

    one, each = make_one(True), make_one(False)
    train(one)
    train(each)
    assert equal(weights_in(one), weights_in(each))


def test_a_bf16_weight_is_stepped_in_float32_and_rounded_back_stochastically(world: World) -> None:
    optimizer = make(make_trained(start(torch.bfloat16)), world, "AdamW")
    assert not optimizer.together
    train(optimizer, 0, 1)
    for name, begun in start(torch.bfloat16).items():
        parameter = torch.nn.Parameter(begun.float())
        parameter.grad = gradient(name, 0).bfloat16().float()
        torch.optim.AdamW([parameter], lr=rate(0), weight_decay=0.02).step()
        expected = round_stochastically(parameter.detach(), name, seed=42, step=0, first=0)
        assert torch.equal(weights_in(optimizer)[name], expected)


def test_weight_decay_is_only_given_to_those_that_know_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)

    module = types.ModuleType("my_optimizers")
    module.Plain = Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_optimizers", module)
    train(make(make_trained(start()), world, "my_optimizers.Plain"))


def test_unknown_arguments_are_told(world: World) -> None:
    with pytest.raises(JobError, match=r"optimizer_args: AdamW does not take these .*beta1"):
        make(make_trained(start()), world, "AdamW", optimizer_args={"beta1": 0.9})


def test_a_tensor_without_a_gradient_stays(world: World) -> None:
    for name in ("AdamW", "Prodigy"):
        optimizer = make(make_trained(start()), world, name)
        optimizer.begin_step(0, 1.0, torch.ones(()))
        optimizer.tensors[0].parameter.grad = gradient("a.weight", 0)
        optimizer.finish_step()
        changed = {name for name, weight in weights_in(optimizer).items() if not torch.equal(weight, start()[name])}
        assert changed == {"a.weight"}
        assert all(tensor.parameter.grad is None for tensor in optimizer.tensors)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "Prodigy", "Adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_moves_nothing(name: str, dtype: torch.dtype, fused: bool, world: World) -> None:
    if fused and name != "AdamW":
        return
    optimizer = make(make_trained(start(dtype)), world, name, optimizer_args={"fused": True} if fused else {})
    train(optimizer, 0, 2)
    before, kept = weights_in(optimizer), saved(optimizer)
    states = {name: kept.read(name, 0, None).clone() for name in kept.shapes}
    optimizer.begin_step(2, 1e-2, torch.zeros(()))  # a loss that is no number
    fill_gradients(optimizer, 2)
    optimizer.finish_step()
    assert equal(weights_in(optimizer), before)
    assert optimizer.skipped.item() == 0
    optimizer.begin_step(2, 1e-2, torch.ones(()))
    fill_gradients(optimizer, 2)
    optimizer.tensors[0].parameter.grad.view(-1)[3] = torch.inf  # type: ignore[union-attr]
    optimizer.finish_step()
    now, after = weights_in(optimizer), saved(optimizer)
    assert optimizer.skipped.item() == 1
    first = optimizer.tensors[0].name
    assert torch.equal(now[first], before[first])
    for key, state in states.items():
        if optimizer.together or key.startswith(first):
            assert torch.equal(after.read(key, 0, None), state), key
    moved = {key for key in now if not torch.equal(now[key], before[key])}
    assert moved == (set() if optimizer.together else set(now) - {first})


def test_between_steps_no_float32_copy_is_held(world: World) -> None:
    optimizer = make(make_trained(start(torch.bfloat16)), world, "Adafactor")
    train(optimizer)
    assert all(s.numel() == 0 and s.grad is None for s in optimizer.stand_ins.values())


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_rows_of_all_processes_are_the_whole_to_the_bit(size: int, world: World) -> None:
    whole = make(make_trained(start(torch.bfloat16)), world, "AdamW")
    train(whole)
    parts = [make(shards_of(start(torch.bfloat16), rank, size), world, "AdamW") for rank in range(size)]
    for part in parts:
        train(part)
    assert equal({n: torch.cat([weights_in(part)[n] for part in parts]) for n in SHAPES}, weights_in(whole))
    one, many = saved(whole), saved(*parts)
    assert one.shapes == many.shapes
    assert all(torch.equal(one.read(n, 0, None), many.read(n, 0, None)) for n in one.shapes)


def test_an_optimizer_that_needs_whole_tensors_gets_them(world: World) -> None:
    """Of one process, but by way of its peers: gathered, stepped by their owner, sent back."""
    whole = make(make_trained(start(torch.bfloat16)), world, "Adafactor")
    train(whole)
    sharded = make(shards_of(start(torch.bfloat16), 0, 1), world, "Adafactor")
    assert sharded.owners == dict.fromkeys(SHAPES, 0)
    train(sharded)
    assert equal(weights_in(sharded), weights_in(whole))
    assert saved(sharded).shapes == saved(whole).shapes
    again = make(shards_of(start(torch.bfloat16), 0, 1), world, "Adafactor")
    again.load(saved(sharded))
    assert equal(dict.fromkeys(saved(again).shapes, torch.ones(1)), dict.fromkeys(saved(whole).shapes, torch.ones(1)))


def test_every_tensor_has_one_owner(control: dist.ProcessGroup) -> None:
    held = [
        make(shards_of(start(torch.bfloat16), rank, 3), make_world(control, rank, 3), "Adafactor").stand_ins.keys()
        for rank in range(3)
    ]
    assert sorted(name for names in held for name in names) == sorted(SHAPES)
    assert all(held)


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_going_on_from_a_state_is_not_noticed(name: str, dtype: torch.dtype, world: World) -> None:
    """By way of JSON, which knows neither tuples nor infinity: Prodigy's own default holds one."""
    straight = make(make_trained(start(dtype)), world, name)
    train(straight)
    first = make(make_trained(start(dtype)), world, name)
    train(first, 0, 3)
    second = make(make_trained(weights_in(first)), world, name)
    second.load(saved(first))
    train(second, 3)
    assert equal(weights_in(second), weights_in(straight))


def test_prodigys_estimate_goes_on(world: World) -> None:
    """One rate for the whole model; it grows from 1e-6 and would begin anew."""
    optimizer = make(make_trained(start()), world, "Prodigy")
    for step in range(STEPS):
        optimizer.begin_step(step, 1.0, torch.ones(()))
        for tensor in optimizer.tensors:
            tensor.parameter.grad = tensor.weight.clone()  # downhill, always the same way
        optimizer.finish_step()
    (kept,) = optimizer.scalars()["groups"].values()
    assert kept["d"] > 1e-6
    assert kept["k"] == STEPS
    again = make(make_trained(weights_in(optimizer)), world, "Prodigy")
    again.load(saved(optimizer))
    assert again.parts[0][0].param_groups[0]["d"] == kept["d"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2)])
def test_going_on_with_another_number_of_processes(before: int, after: int, world: World) -> None:
    straight = make(make_trained(start(torch.bfloat16)), world, "AdamW")
    train(straight)
    first = [make(shards_of(start(torch.bfloat16), rank, before), world, "AdamW") for rank in range(before)]
    for part in first:
        train(part, 0, 3)
    middle = {n: torch.cat([weights_in(part)[n] for part in first]) for n in SHAPES}
    second = [make(shards_of(middle, rank, after), world, "AdamW") for rank in range(after)]
    for part in second:
        part.load(saved(*first))
        train(part, 3)
    assert equal({n: torch.cat([weights_in(part)[n] for part in second]) for n in SHAPES}, weights_in(straight))


def test_a_plan_that_steps_in_backward_goes_on_from_one_that_does_not(world: World) -> None:
    first = make(make_trained(start()), world, "AdamW")
    train(first)
    each = TorchOptimizer(
        make_trained(start()), 42, lambda p: torch.optim.AdamW(p, lr=1.0), world, together=False, elementwise=True
    )
    each.load(saved(first))
    assert {piece.name for piece in each.pieces()} == {piece.name for piece in first.pieces()}
    assert all(torch.equal(p.tensor, q.tensor) for p, q in zip(each.pieces(), first.pieces(), strict=True))


def test_the_jobs_new_settings_win_over_the_states(world: World) -> None:
    first = make(make_trained(start()), world, "AdamW", weight_decay=0.02)
    train(first)
    second = make(make_trained(start()), world, "AdamW", weight_decay=0.1, optimizer_args={"betas": [0.8, 0.9]})
    second.load(saved(first))
    (group,) = second.parts[0][0].param_groups
    assert (group["weight_decay"], tuple(group["betas"])) == (0.1, (0.8, 0.9))


def test_a_state_of_another_model_is_told(world: World) -> None:
    first = make(make_trained(start()), world, "AdamW")
    train(first, 0, 1)
    other = make(make_trained({"other.weight": torch.ones(2, 2)}), world, "AdamW")
    with pytest.raises(OptimizerStateError, match=r"nothing for other\.weight"):
        other.load(saved(first))


def test_an_optimizer_that_must_see_the_whole_model_does_so_by_its_import_path_too(world: World) -> None:
    """In a full model, whose weights are bf16: one rate for all tensors, as the plan has it in mind."""
    optimizer = make(make_trained(start(torch.bfloat16)), world, "prodigyopt.Prodigy")
    assert len(optimizer.parts) == 1
