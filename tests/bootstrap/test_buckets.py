from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.buckets import MAX_STRETCH, bucket_of, crop_box, cropped_away, shifted_crop_box

SIDES = st.integers(1, 8000)
RESOLUTIONS = st.integers(4, 128).map(lambda n: 16 * n)
STEPS = st.sampled_from([16, 32, 64, 128])


@pytest.mark.parametrize(
    ("size", "resolution", "expected"),
    [
        ((2000, 2000), 512, (512, 512)),
        ((1920, 1080), 512, (640, 384)),  # 1.78: 1.67, with 704 x 320 (2.2) the next
        ((1080, 1920), 512, (384, 640)),
        ((1500, 1000), 1024, (1216, 832)),
        ((300, 200), 512, (256, 192)),  # not enlarged
        ((64, 64), 512, (64, 64)),
        ((9000, 300), 512, (1024, 256)),  # a panorama is cropped to 4:1
    ],
)
def test_known_buckets(size: tuple[int, int], resolution: int, expected: tuple[int, int]) -> None:
    assert bucket_of(*size, resolution, 64) == expected


def test_upscaling_is_a_choice() -> None:
    assert bucket_of(300, 300, 512, 64) == (256, 256)
    assert bucket_of(300, 300, 512, 64, upscale=True) == (512, 512)
    assert bucket_of(60, 300, 512, 64) is None
    assert bucket_of(60, 300, 512, 64, upscale=True) == (256, 1024)


@given(SIDES, SIDES, RESOLUTIONS, STEPS, st.booleans())
def test_every_bucket_keeps_the_rules(width: int, height: int, resolution: int, step: int, upscale: bool) -> None:
    bucket = bucket_of(width, height, resolution, step, upscale)
    if bucket is None:
        assert not upscale
        assert min(width, height) < step
        return
    step = min(step, resolution)
    assert all(side % step == 0 and step <= side <= MAX_STRETCH * resolution for side in bucket)
    assert bucket[0] * bucket[1] <= resolution**2
    if not upscale:
        assert bucket[0] <= width
        assert bucket[1] <= height


@given(SIDES, SIDES, RESOLUTIONS, STEPS)
def test_turning_the_image_turns_the_bucket(width: int, height: int, resolution: int, step: int) -> None:
    upright, turned = bucket_of(width, height, resolution, step), bucket_of(height, width, resolution, step)
    if upright is None or turned is None:
        assert upright is turned
    elif width != height:
        assert sorted(upright) == sorted(turned)


@given(SIDES, SIDES, RESOLUTIONS, STEPS)
def test_no_size_of_the_same_area_is_nearer(width: int, height: int, resolution: int, step: int) -> None:
    bucket = bucket_of(width, height, resolution, step, upscale=True)
    assert bucket is not None
    step = min(step, resolution)
    least = max(step, resolution // 2 // step * step)
    aspect = math.log(width / height)
    off = abs(math.log(bucket[0] / bucket[1]) - aspect)
    for w in range(least, MAX_STRETCH * resolution + 1, step):
        h = min(resolution**2 // w, MAX_STRETCH * resolution) // step * step
        assert h < least or abs(math.log(w / h) - aspect) >= off - 1e-6


@given(SIDES, SIDES, st.tuples(st.integers(1, 64), st.integers(1, 64)).map(lambda s: (16 * s[0], 16 * s[1])))
def test_the_crop_is_central_and_of_the_buckets_shape(width: int, height: int, bucket: tuple[int, int]) -> None:
    left, top, right, bottom = crop_box(width, height, bucket)
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height
    assert math.isclose(left, width - right, abs_tol=1e-6)
    assert math.isclose(top, height - bottom, abs_tol=1e-6)
    assert math.isclose((right - left) * bucket[1], (bottom - top) * bucket[0], rel_tol=1e-9)
    assert math.isclose(right - left, width, rel_tol=1e-9) or math.isclose(bottom - top, height, rel_tol=1e-9)
    assert -1e-9 <= cropped_away(width, height, bucket) < 1


BUCKETS = st.tuples(st.integers(1, 64), st.integers(1, 64)).map(lambda sides: (16 * sides[0], 16 * sides[1]))
SHARES = st.floats(0, 1)


@given(SIDES, SIDES, BUCKETS, SHARES, SHARES)
def test_a_crop_is_as_near_to_its_focus_as_the_edges_let_it_be(
    width: int, height: int, bucket: tuple[int, int], x: float, y: float
) -> None:
    left, top, right, bottom = crop_box(width, height, bucket, (x, y))
    centre = crop_box(width, height, bucket)
    assert math.isclose(right - left, centre[2] - centre[0], abs_tol=1e-6)
    assert math.isclose(bottom - top, centre[3] - centre[1], abs_tol=1e-6)
    for near, far, size, share in ((left, right, width, x), (top, bottom, height, y)):
        assert 0 <= near <= far <= size, "Pillow refuses a box that is a rounding too large"
        middle = (near + far) / 2
        if middle < share * size - 1e-6:
            assert math.isclose(far, size, abs_tol=1e-6)
        elif middle > share * size + 1e-6:
            assert math.isclose(near, 0, abs_tol=1e-6)


@given(SIDES, SIDES, BUCKETS, SHARES, SHARES)
def test_a_shifted_crop_stays_inside(width: int, height: int, bucket: tuple[int, int], x: float, y: float) -> None:
    left, top, right, bottom = shifted_crop_box(width, height, bucket, x, y)
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height
    assert math.isclose((right - left) * bucket[1], (bottom - top) * bucket[0], rel_tol=1e-9, abs_tol=1e-6)
    assert shifted_crop_box(width, height, bucket, 0.5, 0.5) == pytest.approx(crop_box(width, height, bucket), abs=1e-6)
