"""What rounds of validation say together."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.validation import BANDS, Round, band_name, in_words, lowest, parting, read_rounds


def rounds(losses: list[float | None], train: list[float] | None = None, pictures: str = "a") -> list[Round]:
    """Every 100 steps; ``train`` in the one band that has images, from the second round on."""
    found = []
    for place, loss in enumerate(losses):
        seen = place > 0
        of_train = (None, (train or losses)[place] if seen else None, None, None)
        images = (0.0, 50.0 if seen else 0.0, 0.0, 0.0)
        found.append(Round(100 * place, loss, (loss,) * BANDS, of_train, images, pictures, 1.0))
    return found


@pytest.mark.parametrize(
    ("losses", "train", "expected"),
    [
        ([1.0, 0.9, 0.8, 0.7], None, None),
        ([1.0, 0.5, 0.6, 0.7], [1, 0.9, 0.8, 0.7], None),  # two rounds are not enough
        ([1.0, 0.5, 0.6, 0.7, 0.8], [1, 0.9, 0.8, 0.7, 0.6], (100, True)),
        ([1.0, 0.5, 0.6, 0.7, 0.8], [1, 0.5, 0.6, 0.7, 0.8], (100, False)),  # training rises too
        ([1.0, 0.5, 0.6, 0.502, 0.8], [1, 0.9, 0.8, 0.7, 0.6], None),  # within a hundredth of the lowest again
        ([1.0, 0.5, 0.6, 0.7, 0.8, 0.4], [1, 0.9, 0.8, 0.7, 0.6, 0.5], None),  # it fell again
        ([0.5, 0.6, 0.7, 0.8, 0.9], [9, 0.9, 0.8, 0.7, 0.6], (0, True)),  # worse from the first step on
        ([1.0, 0.5, None, None, None], [1, 0.9, 0.8, 0.7, 0.6], (100, True)),
        ([None, None, None, None], [1, 1, 1, 1], None),
        ([1.0], None, None),
        ([], None, None),
    ],
)
def test_where_the_curves_part(
    losses: list[float | None], train: list[float] | None, expected: tuple[int, bool] | None
) -> None:
    found = parting(rounds(losses, train))
    assert (found and (found.lowest.step, found.overfits)) == expected


def test_a_band_counts_by_its_images() -> None:
    """A rare band of noise levels, of which a few images tell little, does not outvote the others."""
    found = rounds([1.0, 0.5, 0.6, 0.7, 0.8], [1, 0.9, 0.8, 0.7, 0.6])
    noisy = [
        Round(r.step, r.loss, r.by_level, (0.1 * place, *r.train[1:]), (1.0, *r.train_images[1:]), "a", 1.0)
        for place, r in enumerate(found)
    ]
    told = parting(noisy)
    assert told is not None
    assert told.overfits


def test_in_words() -> None:
    assert in_words([]) == ""
    assert in_words(rounds([1.0])) == "validation 1.0000 at step 0"
    assert in_words(rounds([1.0, 0.9])) == "validation 0.9000 at step 100"
    assert in_words(rounds([0.9, 1.0])) == "validation 1.0000 at step 100, lowest 0.9000 at step 0"
    assert in_words(rounds([0.9, None])) == "validation no number at step 100, lowest 0.9000 at step 0"
    parted = in_words(rounds([1.0, 0.5, 0.6, 0.7, 0.8], [1, 0.9, 0.8, 0.7, 0.6]))
    assert parted.startswith("validation 0.8000 at step 400, lowest 0.5000 at step 100; OVERFITTING since step 100: ")
    assert "WORSE since step 100" in in_words(rounds([1.0, 0.5, 0.6, 0.7, 0.8]))


def test_the_lowest_is_the_first_of_several() -> None:
    found = lowest(rounds([1.0, 0.5, 0.5]))
    assert found is not None
    assert found.step == 100


def test_rounds_are_read_as_written_and_those_of_other_pictures_left_out(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    assert read_rounds(path) == []
    old, new = rounds([0.1], pictures="old"), rounds([1.0, None])
    path.write_text("".join(each.line() for each in (*old, *new)) + '{"step": 3}\nnonsense\n{"step": 200, "lo')
    assert read_rounds(path) == new


def test_bands_have_names() -> None:
    assert [band_name(band) for band in range(BANDS)] == ["0.00-0.25", "0.25-0.50", "0.50-0.75", "0.75-1.00"]
