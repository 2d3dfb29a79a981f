"""Which pictures are held out hangs on their own bytes alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from bootstrap.held_out import chance, held_out, tried


@dataclass(frozen=True)
class Picture:
    path: str
    digest: str
    bucket: tuple[int, int] = (64, 64)


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


digests = st.sets(st.integers(0, 10_000), min_size=1, max_size=60).map(lambda numbers: {digest(n) for n in numbers})


@given(digests, digests, st.floats(0.01, 0.5))
def test_what_was_trained_on_is_never_held_out_when_pictures_come_and_go(
    before: set[str], added: set[str], fraction: float
) -> None:
    trained = before - held_out(before, fraction)
    assert held_out(before, fraction)
    assert not held_out(before | added, fraction) & trained


@given(digests, st.floats(0.01, 0.5))
def test_a_larger_fraction_holds_out_more(every: set[str], fraction: float) -> None:
    assert held_out(every, fraction) <= held_out(every, min(0.5, fraction * 1.5))


def test_about_the_fraction_is_held_out() -> None:
    every = [digest(number) for number in range(10_000)]
    assert 900 < len(held_out(every, 0.1)) < 1100
    assert all(0 <= chance(each) < 1 for each in every)


def test_each_bucket_is_tried_by_its_share() -> None:
    buckets = {(64, 64): 40, (96, 48): 20, (48, 96): 2}
    items = [Picture(f"{b}-{i}", digest(1000 * b[0] + i), b) for b, count in buckets.items() for i in range(count)]
    assert Counter(item.bucket for item in tried(items, 16)) == {(64, 64): 10, (96, 48): 5, (48, 96): 1}
    assert Counter(item.bucket for item in tried(items, 3)) == dict.fromkeys(buckets, 1)
    assert [item.bucket for item in tried(items, 16)] == sorted(item.bucket for item in tried(items, 16))
    assert set(tried(items, 16)) <= set(tried(items[::-1], 30))
    assert len(tried(items, 1000)) == 62


def test_the_same_picture_twice_is_tried_once() -> None:
    twice = [Picture("a", digest(1)), Picture("b", digest(1)), Picture("a", digest(1), (96, 48))]
    assert [item.bucket for item in tried(twice, 16)] == [(64, 64), (96, 48)]


@given(digests, st.integers(1, 20))
def test_an_added_picture_moves_no_other_from_its_place(every: set[str], most: int) -> None:
    items = [Picture(each, each) for each in sorted(every)]
    fewer = set(tried(items[1:], most))
    assert len(fewer - set(tried(items, most))) <= 1
