from __future__ import annotations

import numpy as np
import pytest
import torch

from bootstrap.flux_tiny import TEXT_TOKENS, WORDS, make_clip_tokenizer, make_t5_tokenizer
from tiny.scenes import (
    ATTRIBUTES,
    COLOURS,
    PALETTE,
    SHAPES,
    STRANGERS,
    UNSEEN,
    Scenes,
    caption,
    draw,
    place,
    random_scenes,
    read_captions,
    standard_luck,
    varied_captions,
    words_of,
)


def chance(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def tensors(scenes: Scenes, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    luck = torch.rand(len(scenes), 32, generator=torch.Generator().manual_seed(seed))
    return {name: torch.from_numpy(value) for name, value in scenes.values.items()}, luck


def test_pretraining_never_draws_nor_says_what_is_left_for_fine_tuning() -> None:
    scenes = random_scenes(chance(), 5000)
    for name, word in UNSEEN.items():
        assert word not in {scenes.words(row)[name] for row in range(len(scenes))}
        assert set(ATTRIBUTES[name]) - {word} == {scenes.words(row)[name] for row in range(len(scenes))}
        assert word not in WORDS
    assert not any(word in text.split() for text in varied_captions(scenes, chance()) for word in UNSEEN.values())


def test_a_figure_is_never_of_its_grounds_colour() -> None:
    scenes = random_scenes(chance(), 5000, unseen=True)
    assert (scenes.values["colour"] != scenes.values["ground"]).all()


def test_a_caption_says_all_and_is_read_back() -> None:
    scenes = random_scenes(chance(), 2000, unseen=True)
    read = read_captions([caption(scenes.words(row)) for row in range(len(scenes))])
    for name, value in scenes.values.items():
        seen = read.values[name]
        np.testing.assert_array_equal(np.maximum(seen, 0) if name == "position" else seen, value, name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("two small red circles on a striped blue ground", {"count": 1, "shape": 0, "ground_texture": 1, "size": 0}),
        ("a picture of a star at the top", {"shape": 3, "position": 3, "count": 0, "colour": -1, "ground": -1}),
        ("a blorp on a white background", {"shape": -1, "style": -1, "ground": COLOURS.index("white")}),
        ("", dict.fromkeys(ATTRIBUTES, -1)),
    ],
)
def test_what_a_caption_leaves_open_is_not_asked_for(text: str, said: dict[str, int]) -> None:
    read = read_captions([text])
    assert {name: int(read.values[name][0]) for name in said} == said


def test_captions_are_whole_for_both_encoders() -> None:
    captions = varied_captions(random_scenes(chance(), 500), chance())
    t5, clip = make_t5_tokenizer(), make_clip_tokenizer()
    t5.model_max_length = 10**6  # all captions at once, below
    assert max(len(t5(text).input_ids) for text in captions) <= TEXT_TOKENS
    assert t5.unk_token_id not in t5(" ".join(captions)).input_ids
    known = caption(random_scenes(chance(), 1).words(0))
    assert len(t5(known).input_ids) == len(known.split()) + 1  # a token for each word, and the end
    assert len(clip(known).input_ids) <= TEXT_TOKENS  # some words are two of its tokens


def test_figures_lie_inside_the_picture_and_apart() -> None:
    scenes = random_scenes(chance(), 4000, unseen=True)
    values, luck = tensors(scenes)
    for width in (1.0, 5 / 3):
        radius, centres = place(values, luck[:, 2:], 1.0, width)
        radius = radius[:, 0, 0]
        for figure in range(3):
            there = values["count"] >= figure
            for axis, extent in ((0, width), (1, 1.0)):
                middle = centres[there, figure, axis]
                assert (middle >= 0.99 * radius[there]).all()
                assert (middle <= extent - 0.99 * radius[there]).all()
            for other in range(figure):
                gap = (centres[there, figure] - centres[there, other]).abs().amax(dim=1)
                assert (gap > 1.9 * radius[there]).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_colours_are_those_of_the_caption(shape: str) -> None:
    fixed = {"shape": shape, "texture": "plain", "style": "flat", "ground_texture": "plain", "size": "large"}
    scenes = random_scenes(chance(1), 8, fixed)
    pictures = ((draw(*tensors(scenes), 128, 128) + 1) * 127.5).round()
    for row in range(len(scenes)):
        for name, least in (("colour", 0.03), ("ground", 0.3)):
            colour = torch.tensor(PALETTE[scenes.words(row)[name]])[:, None, None]
            share = ((pictures[row] - colour).abs().amax(dim=0) < 3).float().mean()
            assert share > least, scenes.words(row)


def test_the_same_numbers_draw_the_same_picture_in_any_company() -> None:
    scenes = random_scenes(chance(2), 6, unseen=True)
    values, luck = tensors(scenes)
    together = draw(values, luck, 64, 96)
    assert together.shape == (6, 3, 64, 96)
    assert together.abs().max() <= 1
    alone = draw({name: value[3:4] for name, value in values.items()}, luck[3:4], 64, 96)
    torch.testing.assert_close(alone[0], together[3])


def test_strangers_have_outlines_textures_and_words_of_their_own() -> None:
    """Each its own, so that there is something to learn; none of them a word that is known or left for fine-tuning."""
    said = {name: words_of(name)[len(ATTRIBUTES[name]) :] for name in STRANGERS}
    assert {name: len(set(words)) for name, words in said.items()} == STRANGERS
    assert not {word for words in said.values() for word in words} & {*WORDS, *UNSEEN.values()}
    fixed = {"size": "large", "count": "one", "position": "middle", "colour": "red", "ground": "blue", "style": "flat"}
    for name, count in STRANGERS.items():
        scenes = random_scenes(chance(), count + len(ATTRIBUTES[name]), fixed | {"ground_texture": "plain"})
        plain = {"shape": np.zeros(len(scenes), int), "texture": np.zeros(len(scenes), int)}
        scenes = Scenes(dict(scenes.values) | plain | {name: np.arange(len(scenes))})
        pictures = draw(tensors(scenes)[0], standard_luck(len(scenes)), 64, 64).flatten(1)
        apart = torch.cdist(pictures, pictures, p=1) / pictures.shape[1]
        assert apart[~torch.eye(len(scenes), dtype=torch.bool)].min() > 0.01


def test_a_share_of_scenes_shows_strangers() -> None:
    scenes = random_scenes(chance(), 2000)
    strange = scenes.with_strangers(chance(1), 0.3)
    for name in ATTRIBUTES:
        new = strange.values[name] >= len(ATTRIBUTES[name])
        assert abs(new.mean() - (0.3 if name in STRANGERS else 0)) < 0.03
        np.testing.assert_array_equal(strange.values[name][~new], scenes.values[name][~new])
