"""Numbers that are looked up: the same for ever, and another for every use, step and place."""

from __future__ import annotations

import numpy as np

from bootstrap.draws import Use, draw

SEED = 2**63 - 1  # the largest a job may have


def test_the_uses_are_part_of_every_runs_result() -> None:
    numbers = {use.name: use.value for use in Use}
    first = {"NOISE": 1, "NOISE_LEVEL": 2, "LATENT": 3, "CAPTION_DROPOUT": 4, "ADAPTER": 5}
    assert numbers == first | {"CAPTION": 6, "CROP": 7, "VALIDATION_LEVEL": 8, "ADAPTER_DROPOUT": 9}


def test_the_numbers_are_the_same_for_all_time() -> None:
    """Golden results and resumed runs hang on them; a numpy that draws others fails here first."""
    assert draw(42, Use.NOISE, 7, 3).bit_generator.random_raw(3).tolist() == GOLDEN_RAW
    normal = draw(42, Use.NOISE, 7, 3).standard_normal(4, dtype="float32")
    assert normal.tolist() == np.array(GOLDEN_NORMAL, dtype="float32").tolist()
    assert draw(42, Use.NOISE_LEVEL, 0, 0).standard_normal() == GOLDEN_LEVEL
    assert draw(42, Use.CAPTION_DROPOUT, 0, 0).random() == GOLDEN_UNIFORM


GOLDEN_RAW = [8157608210235588110, 15036441960944315336, 284242023543302853]
GOLDEN_NORMAL = [0.15943904221057892, -0.637334406375885, -0.06461545825004578, 0.9643517136573792]
GOLDEN_LEVEL = -0.47955986229462416
GOLDEN_UNIFORM = 0.7688415540906174


def test_looking_up_twice_gives_the_same() -> None:
    first = draw(SEED, Use.NOISE, 10**6, 10**4).standard_normal(1000)
    assert (first == draw(SEED, Use.NOISE, 10**6, 10**4).standard_normal(1000)).all()


def test_every_seed_use_step_and_place_has_numbers_of_its_own() -> None:
    seen = {
        draw(seed, use, step, place).random()
        for seed in (0, 1, SEED)
        for use in Use
        for step in (0, 1, 2, 1000)
        for place in (0, 1, 2, 63)
    }
    assert len(seen) == 3 * len(Use) * 4 * 4


def test_a_long_draw_never_runs_into_the_next_places() -> None:
    """A latent of 2048 px takes a million numbers; the counter of each place has 2**128 to itself."""
    one, other = (draw(1, Use.NOISE, 0, place).bit_generator.random_raw(2**18) for place in (0, 1))
    assert not set(one.tolist()) & set(other.tolist())


def test_noise_is_normal_and_not_alike_between_neighbours() -> None:
    noise = np.stack([draw(3, Use.NOISE, step, place).standard_normal(4096) for step in range(4) for place in range(4)])
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert np.abs(np.corrcoef(noise) - np.eye(16)).max() < 0.08
