from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny.judge import NOT_JUDGED, Judge, examination, load_judge, right
from tiny.scenes import (
    ATTRIBUTES,
    KNOWN,
    UNSEEN,
    Scenes,
    caption,
    draw,
    random_scenes,
    read_captions,
    standard_luck,
)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return load_judge()


def pictures(scenes: Scenes, seed: int) -> torch.Tensor:
    values = {name: torch.from_numpy(value) for name, value in scenes.values.items()}
    luck = torch.rand(len(scenes), 32, generator=torch.Generator().manual_seed(seed))
    return draw(values, luck, 128, 128)


def test_it_reads_true_drawings(judge: Judge) -> None:
    shares = examination(judge, torch.device("cpu"), count=600)
    assert shares["all"] >= 0.99, shares


def test_it_reads_what_flux_tiny_should_draw(judge: Judge) -> None:
    for fixed in ({}, UNSEEN):
        scenes = random_scenes(np.random.default_rng(9), 200, fixed, among=KNOWN)
        values = {name: torch.from_numpy(value) for name, value in scenes.values.items()}
        drawn = draw(values, standard_luck(200), 128, 128)
        assert right(judge, drawn, scenes)["all"].mean() >= 0.99


def test_what_is_not_what_was_asked_for_is_wrong(judge: Judge) -> None:
    """Each attribute changed in turn: the judge must see that one, and no other."""
    scenes = random_scenes(np.random.default_rng(5), 40, {"count": "one", "position": "left"}, unseen=True)
    drawn = pictures(scenes, 5)
    for name, words in ATTRIBUTES.items():
        if name in ("position", *NOT_JUDGED):
            continue
        asked = dict(scenes.values) | {name: (scenes.values[name] + 1) % len(words)}
        verdict = right(judge, drawn, Scenes(asked))
        assert verdict[name].mean() <= 0.03, name
        assert verdict["all"].mean() <= 0.03, name
        assert all(verdict[other].mean() >= 0.9 for other in ATTRIBUTES if other != name)


def test_what_a_caption_leaves_open_is_right(judge: Judge) -> None:
    scenes = random_scenes(np.random.default_rng(6), 16)
    drawn = pictures(scenes, 6)
    assert right(judge, drawn, read_captions([""] * 16))["all"].all()
    said = [caption(scenes.words(row), said={"size": False, "ground": False}) for row in range(16)]
    assert right(judge, drawn, read_captions(said))["all"].mean() > 0.9


def test_noise_is_not_right(judge: Judge) -> None:
    noise = torch.randn(64, 3, 128, 128, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    assert right(judge, noise, random_scenes(np.random.default_rng(7), 64))["all"].mean() < 0.05
