from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.order import Pass, share_out

BUCKETS = ((64, 64), (64, 128), (128, 64), (128, 128))


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
