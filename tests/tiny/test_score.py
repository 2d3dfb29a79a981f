from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tiny import score
from tiny.judge import load_judge
from tiny.scenes import Scenes, caption, draw, random_scenes


def samples(folder: Path, step: int, scenes: Scenes, prompts: list[str]) -> None:
    """As the trainer leaves them: a picture for each prompt, which is written in it."""
    values = {name: torch.from_numpy(value) for name, value in scenes.values.items()}
    luck = torch.rand(len(scenes), 32, generator=torch.Generator().manual_seed(step))
    pixels = ((draw(values, luck, 128, 128) + 1) * 127.5).byte().permute(0, 2, 3, 1).numpy()
    folder.mkdir(exist_ok=True)
    for number, prompt in enumerate(prompts):
        notes = PngInfo()
        notes.add_itxt("prompt", prompt)
        Image.fromarray(pixels[number]).save(folder / f"step-{step:06d}-{number:02d}.png", pnginfo=notes)


def captions(scenes: Scenes) -> list[str]:
    return [caption(scenes.words(row)) for row in range(len(scenes))]


def test_a_runs_samples_are_judged_by_the_prompts_inside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = random_scenes(np.random.default_rng(1), 8)
    new = random_scenes(np.random.default_rng(2), 8, score.UNSEEN)
    prompts = captions(known) + captions(new)
    before = Scenes({name: np.concatenate([value, value]) for name, value in known.values.items()})
    after = Scenes({name: np.concatenate([value, new.values[name]]) for name, value in known.values.items()})
    samples(tmp_path, 0, before, prompts)
    samples(tmp_path, 30, after, prompts)
    rows = score.score_samples(load_judge(), tmp_path)
    shares = {title: row.all for title, row in rows.items()}
    kinds = ("known words", "the new word")
    assert list(shares) == [f"step-0000{step}, {kind}" for step in ("00", "30") for kind in kinds]
    assert list(shares.values()) == pytest.approx([1, 0, 1, 1], abs=0.13)
    assert score.main(["--samples", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1


def test_a_folder_without_samples_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score.main(["--samples", str(tmp_path)]) == 1
    assert "no pictures" in capsys.readouterr().err


def test_prompts_are_the_same_every_time_and_known_ones_never_new() -> None:
    assert score.known_prompts(50) == score.known_prompts(50)
    assert not any(map(score.is_new, score.known_prompts(500)))
    assert all(map(score.is_new, score.new_prompts(50)))
