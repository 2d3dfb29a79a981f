"""Whole runs by a clock that is only counted: what is told of the time left, against what it then takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bootstrap.estimate import VOLUME_SPEED
from tests.runs import make_job, make_run
from trainer.time_left import TimeLeft, multiples

SIZES = {512: 1.0, 768: 2.6, 1024: 5.0}  # seconds of an image, not quite by its pixels
PAUSES = {"samples": 40.0, "validation": 9.0, "save": 6.0, "last save": 60.0}
WRITTEN = int(60 * VOLUME_SPEED)
PROMPTS = {"sample": {"prompts": ["a", "b"], "every": 100, "steps": 20}}


def sizes_of(run: Any) -> list[list[int]]:
    chance = random.Random(7)
    return [chance.choices(list(SIZES), k=run.job.images_per_step) for _ in range(run.plan.steps)]


def made(run: Any, save: float) -> TimeLeft:
    return TimeLeft(run, (sum(size * size for size in sizes) for sizes in sizes_of(run)), tried=64, save=save)


def simulated(run: Any, left: TimeLeft, start: int = 0) -> None:
    """Runs the job's steps and pauses; asserts after a twentieth of it that what is told is right within a tenth."""
    job, last = run.job, run.plan.steps
    chance, now = random.Random(7), 0.0
    told: list[tuple[int, float, float | None]] = []

    def pause(kind: Any) -> None:
        nonlocal now
        now += PAUSES[kind]
        left.pause(kind, PAUSES[kind])

    if start == 0 and job.sample.prompts:
        pause("samples")
    if start == 0 and job.validation:
        pause("validation")
    for step, sizes in list(enumerate(sizes_of(run), start=1))[start:]:
        took = sum(SIZES[size] for size in sizes) * chance.uniform(0.97, 1.03)
        if step < start + 4:
            took *= 1 + 20 / (step - start)  # choosing kernels and the like, which is not told as compiling
        now += took
        left.step(took, sum(size * size for size in sizes))
        told.append((step, now, left.after(step)))
        saving = step % int(job.save.every) == 0 and step < last
        if job.validation and (
            step % job.validation.every == 0 or step == last or (saving and job.validation.keeps_best)
        ):
            pause("validation")
        if saving:
            pause("save")
        if step == last:
            pause("last save")
        if job.sample.prompts and (step % job.sample.every == 0 or step == last):
            pause("samples")
            if step == last:  # drawn while the state is written, but for what training stands still for
                now -= min(PAUSES["samples"], PAUSES["last save"] - PAUSES["save"])
    for step, then, seconds_left in told:
        if step - start >= 0.05 * (last - start):
            assert seconds_left == pytest.approx(now - then, rel=0.1), f"step {step} of {last}"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        PROMPTS,
        {"validation": {"path": "a", "every": 60}},
        PROMPTS | {"validation": {"path": "a", "every": 60, "best": "keep"}},
        {"save": {"every": 40, "weights": "all"}},
    ],
)
def test_it_is_right_within_a_tenth_after_a_twentieth_of_the_run(keys: dict[str, Any], tmp_path: Path) -> None:
    """Samples, validation and saves that are still to come count, also before the first save."""
    run = make_run(tmp_path, make_job(steps=1000, **keys), steps=1000, state_bytes=WRITTEN)
    simulated(run, made(run, PAUSES["save"]))


def test_a_run_that_goes_on_guesses_what_it_has_not_seen_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round and a drawing take, by their forward passes; nothing was drawn by this process yet."""
    run = make_run(tmp_path, make_job(steps=1000, **PROMPTS), steps=1000, state_bytes=WRITTEN)
    monkeypatch.setitem(PAUSES, "samples", 2 * 20 * SIZES[1024] / 3)
    simulated(run, made(run, PAUSES["save"]), start=400)
    assert made(run, 0).after(400) is None


def test_a_step_costs_something_whatever_it_holds(tmp_path: Path) -> None:
    """Updates and captions do: a step of small pictures is no hiccup, and one of large ones no four small ones."""
    run = make_run(tmp_path, make_job(), steps=1000)
    chance = random.Random(7)
    pixels = [chance.choice((512, 512, 1024)) ** 2 for _ in range(1000)]
    took = [1.0 + 1e-7 * each * chance.uniform(0.9, 1.1) for each in pixels]
    left = TimeLeft(run, pixels, tried=0, save=0)
    for step in range(1, 1000):
        left.step(took[step - 1], pixels[step - 1])
        if step >= 50:
            assert left.after(step) == pytest.approx(sum(took[step:]), rel=0.02)


def test_a_hiccup_is_not_expected_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_job(), steps=100)
    left = TimeLeft(run, [100] * 100, tried=0, save=0)
    for step in range(1, 11):
        left.step(60.0 if step == 5 else 1.0, 100)
    assert left.after(10) == 90  # the last save takes no time


def test_saves_by_the_clock_and_by_epochs(tmp_path: Path) -> None:
    for every, count in (("1m", 3), ("2 epochs", 4)):
        run = make_run(tmp_path, make_job(save={"every": every}), steps=100, steps_per_epoch=10)
        left = TimeLeft(run, [1] * 100, tried=0, save=1000)
        left.pause("last save", 500)
        for _ in range(3):
            left.step(2.0, 1)
        assert left.after(1) == 198 + 500 + count * 1000
        assert left.after(100) == 500


def test_multiples_in_between() -> None:
    assert [multiples(10, first, 100) for first in (0, 9, 10, 11, 89, 90, 100)] == [9, 9, 8, 8, 1, 0, 0]
