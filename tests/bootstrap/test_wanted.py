"""What a run looks at is known beforehand, and is exactly what it asks of the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.bases import FLUX_TINY
from bootstrap.dataset import Dataset, Item
from bootstrap.order import StepOrder
from bootstrap.plan import Plan, run_length
from bootstrap.wanted import (
    Crop,
    Wanted,
    crop_at,
    crop_tried,
    crops_of,
    latent_key,
    mask_key,
    text_at,
    text_key,
    text_tried,
)
from bootstrap.weights import Weights
from jobs.schema import DatasetEntry, Job
from tests.runs import PLAN, make_job, make_weights

CENTRE = Crop((0.0, 0.0, 128.0, 128.0), mirrored=False)


def weights(digest: str = "w", text_tokens: int = 64) -> Weights:
    return replace(make_weights(Path("/nowhere")), digest=digest, text_tokens=text_tokens)


def item(
    path: str = "a.png", digest: str = "d", caption: str = "c", bucket: tuple[int, int] = (128, 128), **rest: Any
) -> Item:
    return Item(path, digest, caption, **{"repeats": 1, "width": 128, "height": 128} | rest, bucket=bucket)


def plan_of(job: Job, items: tuple[Item, ...]) -> Plan:
    steps, per_epoch, _ = run_length(job, Dataset(items, len(items), 0, (), ()).summary())
    return replace(PLAN, steps=steps, steps_per_epoch=per_epoch)


# ---------------------------------------------------------------- keys


def test_keys_hang_on_everything_that_the_tensors_hang_on() -> None:
    base = weights()
    keys = [
        latent_key(item(), CENTRE, base),
        latent_key(item(digest="e"), CENTRE, base),
        latent_key(item(bucket=(128, 64)), CENTRE, base),
        latent_key(item(bucket=(64, 128)), CENTRE, base),
        latent_key(item(), replace(CENTRE, mirrored=True), base),
        latent_key(item(), replace(CENTRE, box=(0.0, 1.0, 128.0, 128.0)), base),
        latent_key(item(), CENTRE, weights("x")),
        text_key("d", base, False),
        text_key("d", base, True),
        text_key("d ", base, False),
        text_key("d", weights(text_tokens=512), False),
        text_key("d", weights("x"), False),
    ]
    assert len(set(keys)) == len(keys)


def test_a_name_a_caption_or_a_repeat_changes_no_latent() -> None:
    same = (item(), item(path="b.png"), item(caption="x"), item(repeats=3), item(dataset=1))
    assert len({latent_key(each, CENTRE, weights()) for each in same}) == 1


def test_same_names_share_nothing_and_same_pictures_share_all() -> None:
    items = (item("a.jpg", "1"), item("a.png", "2"), item("s1/a.jpg", "3"), item("s2/a.jpg", "3"))
    assert [each.item.path for each in Wanted.of(make_job(), PLAN, items, weights()).crops.values()] == [
        "a.jpg",
        "a.png",
        "s1/a.jpg",
    ]


# ---------------------------------------------------------------- crops


def crops(width: int, height: int, digest: str = "0" * 64, **keys: Any) -> tuple[Crop, ...]:
    entry = DatasetEntry.model_validate({"path": "d"} | keys)
    return crops_of(item(digest=digest, width=width, height=height), entry)


@pytest.mark.parametrize(
    ("crop", "left"),
    [("center", 50), ("left", 0), ("right", 100), ("top", 50), ([0.1, 0.5], 0), ([0.6, 0], 70), ([0.75, 1], 100)],
)
def test_the_crop_is_where_the_job_says(crop: Any, left: float) -> None:
    assert crops(200, 100, crop=crop) == (Crop((left, 0, left + 100, 100), False),)


def test_flipping_doubles_the_crops() -> None:
    (one, other) = crops(128, 128, flip=True)
    assert (one, other) == (CENTRE, replace(CENTRE, mirrored=True))


def test_random_crops_are_spread_over_the_picture_and_the_same_for_every_run() -> None:
    found = [crop for number in range(1, 61) for crop in crops(300, 100, f"{number:x}".ljust(64, "0"), random_crops=4)]
    lefts = [crop.box[0] for crop in found]
    assert min(lefts) < 5
    assert max(lefts) > 195
    assert sum(lefts) / len(lefts) == pytest.approx(100, abs=12)
    assert all(crop.box[1::2] == (0, 100) for crop in found)
    assert crops(300, 100, random_crops=2) == crops(300, 100, random_crops=4)[:2]
    assert len(crops(300, 100, random_crops=3, flip=True)) == 6


def test_each_crop_is_seen_as_often_as_the_others() -> None:
    job = make_job(datasets=[{"path": "d", "flip": True, "random_crops": 2}])
    one = item(width=300)
    one = replace(one, digest="f" * 64)
    seen = Counter(crop_at(job, one, step, 0) for step in range(2000))
    assert len(seen) == 4
    assert all(abs(number / 2000 - 0.25) < 0.04 for number in seen.values())


# ---------------------------------------------------------------- texts


def test_what_is_wanted() -> None:
    w = weights()
    items = (item("b", "1", "x"), item("c", "2", "x"), item("d", "1", "y"), item("a", "3", "x", (64, 64)))
    job = make_job(t5_mask=True, caption_dropout=0.1, sample={"prompts": ["x"]})
    texts = Wanted.of(job, PLAN, items, w).texts
    assert [(text.text, text.t5_mask) for text in texts.values()] == [
        ("x", True),
        ("y", True),
        ("", True),
        ("x", False),
    ]
    assert texts.keys() >= {text_key("", w, True), text_key("x", w, False)}
    assert [each.item.path for each in Wanted.of(job, PLAN, items, w).crops.values()] == ["a", "b", "c"]
    assert "" not in {text.text for text in Wanted.of(make_job(), PLAN, items, w).texts.values()}


def test_a_change_of_one_caption_wants_one_text_more() -> None:
    before = Wanted.of(make_job(), PLAN, (item("a", "1", "x"), item("b", "2", "y")), weights()).texts
    after = Wanted.of(make_job(), PLAN, (item("a", "1", "x"), item("b", "2", "z")), weights()).texts
    assert [text.text for key, text in after.items() if key not in before] == ["z"]


CAPTIONS = ["{a|b|c} {d|e} {f|g|h|i}", "one\n{two|three}\n", "t1, t2, t3, t4, t5", "plain", "{x|}"]


@settings(max_examples=30, deadline=None)
@given(
    captions=st.lists(st.sampled_from(CAPTIONS), min_size=1, max_size=4),
    switches=st.fixed_dictionaries(
        {name: st.booleans() for name in ("wildcards", "multiline", "shuffle_tags", "flip")}
    ),
    dropout=st.sampled_from([0.0, 0.3, 1.0]),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
)
def test_all_that_a_run_looks_at_is_wanted(
    captions: list[str], switches: dict[str, bool], dropout: float, steps: int, seed: int
) -> None:
    dataset = {"path": "d", "trigger": "sks", "caption_dropout": dropout} | switches
    job = make_job(method="lora", datasets=[dataset], steps=steps, seed=seed, images_per_step=3)
    items = tuple(item(f"{i}", f"{i:064x}", caption, repeats=1 + i) for i, caption in enumerate(captions))
    plan = plan_of(job, items)
    wanted = Wanted.of(job, plan, items, weights())
    order = StepOrder(items, job, plan.steps_per_epoch)
    shown = [(step, place, items[i]) for step in range(steps) for place, i in enumerate(order.step(step))]
    for step, place, one in shown:
        assert text_key(text_at(job, one, step, place), weights(), False) in wanted.texts
        assert latent_key(one, crop_at(job, one, step, place), weights()) in wanted.crops
    assert len(wanted.texts) <= max(len(items), 3 * steps) + 1  # and the empty caption


def test_where_there_are_more_texts_than_images_shown_only_those_drawn_are_wanted() -> None:
    job = make_job(datasets=[{"path": "d", "wildcards": True}], steps=10, images_per_step=2)
    items = tuple(item(f"{i}", f"{i}", f"{i} " + "{a|b|c|d}" * 6) for i in range(4))
    wanted = Wanted.of(job, plan_of(job, items), items, weights())
    assert wanted.drawn
    assert 10 < len(wanted.texts) <= 20
    few = make_job(datasets=[{"path": "d", "wildcards": True}], steps=1000, images_per_step=2)
    items = tuple(replace(each, caption="{a|b}{c|d}" + each.path) for each in items)
    wanted = Wanted.of(few, plan_of(few, items), items, weights())
    assert not wanted.drawn
    assert len(wanted.texts) == 16


def test_the_texts_of_a_run_come_with_the_probabilities_of_line_first_then_wildcard() -> None:
    dataset = {"path": "d", "wildcards": True, "multiline": True}
    job = make_job(datasets=[dataset], method="lora", caption_dropout=0.2, steps=1500, images_per_step=4)
    items = (item("0", "0", "a {red|blue} car\na bike", repeats=3), item("1", "1", "plain"))
    order = StepOrder(items, job, plan_of(job, items).steps_per_epoch)
    seen = Counter(
        text_at(job, items[index], step, place) for step in range(1500) for place, index in enumerate(order.step(step))
    )
    shares = {text: number / 6000 for text, number in seen.items()}
    expected = {"": 0.2, "plain": 0.2, "a bike": 0.3, "a red car": 0.15, "a blue car": 0.15}
    assert shares == pytest.approx(expected, abs=0.02)


def test_a_text_hangs_on_seed_step_and_place_alone() -> None:
    job = make_job(datasets=[{"path": "d", "wildcards": True}])
    one, other = item("0", "0", "{a|b|c|d}{e|f|g|h}"), item("9", "9", "{a|b|c|d}{e|f|g|h}")
    texts = [text_at(job, one, step, place) for step in range(6) for place in range(4)]
    assert texts == [text_at(job, other, step, place) for step in range(6) for place in range(4)]
    assert len(set(texts)) > 8
    assert texts != [text_at(job.model_copy(update={"seed": 7}), one, s, p) for s in range(6) for p in range(4)]


def test_what_is_missing_and_the_room_it_takes() -> None:
    w = weights()
    job = make_job(datasets=[{"path": "d", "flip": True}])
    masked = item("m", "2", "y", mask="alpha")
    wanted = Wanted.of(job, PLAN, (item("a", "1", "x"), masked), w)
    assert str(wanted) == "4 pictures, 2 captions, 2 masks"
    there = {*list(wanted.texts)[:1], *wanted.crops}
    missing = wanted.beyond(there)
    assert str(missing) == "1 captions, 2 masks"
    assert list(missing.masks) == [mask_key(masked, crop) for crop in crops_of(masked, job.datasets[0])]
    assert missing.bytes(w) == 64 * (2 * FLUX_TINY.text_size + 1) + 2 * FLUX_TINY.pooled_size + 2 * 16 * 16
    assert wanted.bytes(w) > 4 * 16 * 16 * 16 * 4
    assert not wanted.beyond({*wanted.texts, *wanted.crops, *wanted.masks})


def test_the_key_of_a_mask_hangs_on_the_mask_not_on_the_picture() -> None:
    of_file = item(mask="masks/a.png", mask_digest="m")
    assert mask_key(of_file, CENTRE) == mask_key(replace(of_file, digest="e", caption="x"), CENTRE)
    others = [
        of_file,
        replace(of_file, mask_digest="n"),
        replace(of_file, bucket=(64, 64)),
        replace(of_file, width=256),
        replace(of_file, mask="alpha", mask_digest=""),
    ]
    keys = {mask_key(each, CENTRE) for each in others} | {mask_key(of_file, replace(CENTRE, mirrored=True))}
    assert len(keys) == 6


def test_what_validation_tries_is_wanted_as_it_is_tried() -> None:
    dataset = {"path": "d", "flip": True, "wildcards": True}
    job = make_job(datasets=[dataset], validation={"images": 2})
    held = tuple(item(str(number), f"{number:064x}", "{a|b|c}", mask="alpha") for number in (7, 8, 9))
    wanted = Wanted.of(job, PLAN, (item("x", "1", "plain"),), weights(), held)
    used = [one for one in held if latent_key(one, crop_tried(job, one), weights()) in wanted.crops]
    assert len(used) == 2
    assert len(wanted.crops) == 2 + 2  # both ways of the picture that is trained on
    assert all(text_key(text_tried(job, one), weights(), False) in wanted.texts for one in used)
    assert all(mask_key(one, crop_tried(job, one)) in wanted.masks for one in used)
    assert len(Wanted.of(make_job(datasets=[dataset]), PLAN, (), weights(), held)) == 0
