from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.order import Pass, epoch_order, share_out

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


@given(
    st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=24),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_a_step_is_shared_out_whole(buckets: list[tuple[int, int]], processes: int, at_once: int) -> None:
    step = tuple(range(100, 100 + len(buckets)))
    of_item = dict(zip(step, buckets, strict=True))
    passes = share_out(step, of_item, processes, at_once)  # type: ignore[arg-type]
    shares = [share for row in passes for share in row if share]
    assert sorted(place for share in shares for place in share.places) == list(range(len(step)))
    for share in shares:
        assert 1 <= len(share.places) <= at_once
        assert share.items == tuple(step[place] for place in share.places)
        assert {of_item[item] for item in share.items} == {share.bucket}
    assert all(len(row) == processes and any(row) for row in passes)
    fewest = sum(-(-number // at_once) for number in Counter(buckets).values())
    assert len(passes) == -(-fewest // processes)
    assert passes == share_out(step, of_item, processes, at_once)  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 8))
def test_one_bucket_is_shared_evenly(images: int, processes: int, at_once: int) -> None:
    passes = share_out(tuple(range(images)), [BUCKETS[0]] * images, processes, at_once)
    totals = [sum(len(row[process].places) for row in passes if row[process]) for process in range(processes)]
    assert max(totals) - min(totals) <= 1
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("images", "processes", "at_once", "expected"),
    [
        (4, 1, 4, [[4]]),
        (4, 2, 4, [[2, 2]]),
        (4, 3, 4, [[2, 1, 1]]),
        (4, 3, 1, [[1, 1, 1], [1, 0, 0]]),
        (5, 2, 2, [[2, 1], [1, 1]]),
        (2, 4, 4, [[1, 1, 0, 0]]),
    ],
)
def test_known_shares(images: int, processes: int, at_once: int, expected: list[list[int]]) -> None:
    passes = share_out(tuple(range(images)), [BUCKETS[0]] * images, processes, at_once)
    assert [[len(share.places) if share else 0 for share in row] for row in passes] == expected


def test_a_mixed_step_keeps_passes_alike() -> None:
    """Three large pictures and one small on two processes: the large ones go first, side by side."""
    buckets = [BUCKETS[3], BUCKETS[0], BUCKETS[3], BUCKETS[3]]
    passes = share_out((0, 1, 2, 3), buckets, 2, 1)
    assert passes == [
        [Pass(BUCKETS[3], (0,), (0,)), Pass(BUCKETS[3], (2,), (2,))],
        [Pass(BUCKETS[3], (3,), (3,)), Pass(BUCKETS[0], (1,), (1,))],
    ]
