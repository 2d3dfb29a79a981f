from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from bootstrap.order import StepOrder, epoch_order
from tests.runs import make_job

BUCKETS = ((64, 64), (64, 128), (128, 64), (128, 128))


@dataclass(frozen=True)
class Thing:
    bucket: tuple[int, int]
    repeats: int


ITEMS = st.lists(st.builds(Thing, st.sampled_from(BUCKETS), st.integers(1, 4)), min_size=1, max_size=40)
STEP_SIZES = st.integers(1, 12)


@given(ITEMS, st.integers(0, 2**63 - 1), st.integers(0, 1000), STEP_SIZES)
def test_an_epoch_shows_everything_exactly_its_repeats(items: list[Thing], seed: int, epoch: int, size: int) -> None:
    steps = epoch_order(items, seed, epoch, size, mix=True)
    seen = Counter(index for step in steps for index in step)
    assert seen == {index: item.repeats for index, item in enumerate(items)}
    assert len(steps) == -(-sum(seen.values()) // size)
    assert all(len(step) == size for step in steps[:-1])
    assert 1 <= len(steps[-1]) <= size
    assert steps == epoch_order(items, seed, epoch, size, mix=True)


@given(ITEMS, STEP_SIZES)
def test_as_many_steps_as_can_be_are_of_one_bucket(items: list[Thing], size: int) -> None:
    count = Counter()
    for item in items:
        count[item.bucket] += item.repeats
    steps = epoch_order(items, 1, 0, size, mix=True)
    pure = sum(1 for step in steps if len(step) == size and len({items[index].bucket for index in step}) == 1)
    assert pure >= sum(number // size for number in count.values())


@given(ITEMS, st.integers(0, 1000), STEP_SIZES)
def test_without_mixing_every_step_is_of_one_bucket(items: list[Thing], epoch: int, size: int) -> None:
    steps = epoch_order(items, 5, epoch, size, mix=False)
    count = Counter()
    for item in items:
        count[item.bucket] += item.repeats
    assert Counter(index for step in steps for index in step) == {i: item.repeats for i, item in enumerate(items)}
    assert all(len({items[index].bucket for index in step}) == 1 for step in steps)
    assert len(steps) == sum(-(-number // size) for number in count.values())


def test_epochs_and_seeds_differ() -> None:
    items = [Thing(BUCKETS[0], 1)] * 50
    orders = {tuple(epoch_order(items, seed, epoch, 4, mix=True)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


def test_the_order_is_the_same_for_all_time() -> None:
    """States hang on it: a resumed run must see what an uninterrupted one would have seen."""
    items = [Thing(BUCKETS[index % 2], 1 + index % 3) for index in range(6)]
    assert epoch_order(items, 42, 3, 4, mix=True) == GOLDEN


GOLDEN = [(5, 1, 1, 5), (4, 4, 2, 2), (3, 5, 0, 2)]


def test_63_images_in_six_uneven_buckets() -> None:
    """Row P13: the plan's steps are the steps that are drawn."""
    buckets = [(64 * n, 64) for n in range(1, 7)]
    items = [
        Thing(bucket, 1) for bucket, count in zip(buckets, (30, 17, 9, 4, 2, 1), strict=True) for _ in range(count)
    ]
    for epoch in range(25):
        assert len(epoch_order(items, 7, epoch, 4, mix=True)) == 16


def test_steps_are_looked_up_over_the_epochs() -> None:
    items = [Thing(BUCKETS[index % 2], 1 + index % 3) for index in range(6)]
    order = StepOrder(items, make_job(method="lora", seed=42, images_per_step=4), steps_per_epoch=3)
    assert [order.step(index) for index in (9, 10, 11)] == GOLDEN
    assert order.step(3 * 1000) == epoch_order(items, 42, 1000, 4, mix=True)[0]
