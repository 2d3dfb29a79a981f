"""Rounds of validation in whole trainings of flux-tiny: the same on any number of processes, and not noticed by
training."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.dataset import Item
from bootstrap.run_file import RunFile
from bootstrap.state import best_of
from bootstrap.validation import BANDS, Round, read_rounds
from bootstrap.volume import Volume
from tests.training import Trained, fill_volume, prepared, shared_folder, train, trained
from tiny.drawn import draw_dataset
from trainer.validation import Validator, View, turns

pytestmark = pytest.mark.timeout(600)

DRIFT = 1e-2  # of a loss whose passes have other heights; see test_train.py
APART = {"path": "datasets/others", "every": 2, "images": 5}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Volume:
    def fill(root: Path) -> None:
        volume = fill_volume(root, flux_tiny)
        draw_dataset(volume.datasets / "others", 6, seed=2)

    return Volume(shared_folder(tmp_path_factory, "validation", fill))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, volume: Volume) -> dict[str, Trained]:
    """Trained once, also for several workers."""
    keys: dict[str, Any] = {"steps": 4, "save": {"every": 2, "states": 2}}

    def make(_: Path) -> None:
        trained(volume, name="plain", **keys)
        trained(volume, name="tried", validation=APART, **keys)

    shared_folder(tmp_path_factory, "validation-runs", make)
    return {name: Trained(RunFile.read(volume.run(name).run_file), [0]) for name in ("plain", "tried")}


@pytest.fixture(scope="module")
def plain(runs: dict[str, Trained]) -> Trained:
    return runs["plain"]


@pytest.fixture(scope="module")
def tried(runs: dict[str, Trained]) -> Trained:
    return runs["tried"]


def rounds_of(each: Trained) -> list[Round]:
    return read_rounds(each.run.folder.validation)


def test_training_does_not_notice(plain: Trained, tried: Trained) -> None:
    assert tried.values("loss") == plain.values("loss")
    assert tried.values("loss_by_level") == plain.values("loss_by_level")
    assert all(torch.equal(tried.weights[name], plain.weights[name]) for name in plain.weights)


def test_a_round_before_the_first_step_then_every_few_and_at_the_end(tried: Trained) -> None:
    found = rounds_of(tried)
    assert [each.step for each in found] == [0, 2, 4]
    assert len({each.loss for each in found}) == 3
    assert all(each.loss and each.loss > 0 and None not in each.by_level for each in found)
    assert [sum(each.train_images) for each in found] == [0, 6, 8]  # steps of 4, 2, 4 and 4 images
    assert len(re.findall(r" validation \d", tried.log)) == 3


def test_losses_of_training_are_told_by_the_level_of_noise(tried: Trained) -> None:
    for line in tried.metrics:
        losses: Any = line["loss_by_level"]
        images: Any = line["images_by_level"]
        assert len(losses) == len(images) == BANDS
        assert [loss is None for loss in losses] == [count == 0 for count in images]
        total = sum(loss * count for loss, count in zip(losses, images, strict=True) if loss is not None)
        assert total / sum(images) == pytest.approx(line["loss"])


def test_the_losses_are_the_same_on_any_number_of_processes(tried: Trained, volume: Volume) -> None:
    """Sharded, in passes of two images, the last of which is filled up."""
    plan = {"processes": 2, "images_per_pass": 2}
    two = trained(volume, name="tried-2", steps=2, validation=APART, plan=plan)
    for first, second in zip(rounds_of(tried)[:2], rounds_of(two), strict=True):
        assert second.loss == pytest.approx(first.loss, rel=DRIFT)
        assert second.by_level == pytest.approx(first.by_level, rel=DRIFT)
        for one, other in zip(first.train, second.train, strict=True):
            assert other == (one if one is None else pytest.approx(one, rel=DRIFT))
        assert (second.train_images, second.pictures) == (first.train_images, first.pictures)


def test_a_run_that_goes_on_makes_the_same_rounds(tried: Trained, volume: Volume) -> None:
    middle = tried.states[0]
    assert middle.step == 2
    run = prepared(volume, middle, name="tried-again", steps=4, validation=APART)
    shutil.copy(tried.run.folder.validation, run.folder.validation)
    metrics = tried.run.folder.metrics.read_text().splitlines(keepends=True)
    run.folder.metrics.write_text("".join(metrics[:3]) + metrics[3][:20])  # killed after the third step
    again = train(run)
    assert again.outcome.code == 0, again.log
    timed = [(each.step, each.loss, each.by_level, each.train, each.train_images) for each in rounds_of(again)]
    assert timed == [(r.step, r.loss, r.by_level, r.train, r.train_images) for r in rounds_of(tried)]


def test_the_best_state_is_kept_and_made_the_output(volume: Volume) -> None:
    """A rate so high that every step makes the model worse: the first state is the best."""
    keys: dict[str, Any] = {"steps": 3, "learning_rate": 0.01, "warmup": 1}
    save = {"every": 1, "states": 1, "weights": 1}
    each = trained(volume, name="best", save=save, validation=APART | {"every": 9, "best": "output"}, **keys)
    found = rounds_of(each)
    assert [r.step for r in found] == [0, 1, 2, 3]  # before every save
    assert [state.step for state in each.states] == [1, 3]
    kept = best_of(each.states)
    assert kept is not None
    assert kept.manifest.validation is not None
    assert (kept.step, kept.manifest.validation.loss) == (1, found[1].loss)
    assert not kept.resumable  # of its weights, not of the optimizer
    assert each.output.samefile(kept.model)
    told = "the output is step 1, of the lowest validation loss of those saved"
    assert each.outcome.reason == f"all 3 steps are done; {told}"


def test_a_fraction_is_never_trained_on(volume: Volume) -> None:
    run = prepared(volume, name="fraction", steps=1, validation={"fraction": 0.3})
    held = {item.digest for item in run.read_held_out()}
    seen = {item.digest for item in run.read_items()}
    assert held
    assert not held & seen
    assert len(held) + len(seen) == 10


# ---------------------------------------------------------------- who does what


def view(number: int, bucket: tuple[int, int]) -> View:
    return View(Item(str(number), str(number), "", 1, *bucket, bucket), 0)


@given(
    st.lists(st.sampled_from([(64, 64), (80, 48), (48, 80)]), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_every_view_is_taken_and_all_processes_make_as_many_passes(
    buckets: list[tuple[int, int]], size: int, processes: int
) -> None:
    views = [view(number, bucket) for number, bucket in enumerate(sorted(buckets))]
    passes = turns(views, size, processes)
    assert all(len(each) == processes for each in passes)
    taken = {turn.first + place: v for each in passes for turn in each for place, v in enumerate(turn.views)}
    assert [taken[number] for number in range(len(views))] == views
    for each in passes:
        for turn in each:
            assert 1 <= len(turn.views) <= size
            assert len({v.item.bucket for v in turn.views}) == 1


def test_a_volume_that_fails_costs_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    validator: Any = object.__new__(Validator)
    validator.path, validator.pictures = tmp_path, "some"  # a folder: it can neither be read nor written
    scalars: dict[str, float] = {}
    metrics: Any = SimpleNamespace(curve=lambda name, number, step: scalars.update({name: number}))
    validator._write(3, 0.5, (None,) * BANDS, 0.1, metrics)
    assert "cannot be read" in caplog.text
    assert "was not written down" in caplog.text
    assert scalars == {"validation/loss": 0.5}
