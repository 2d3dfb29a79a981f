"""What the keys of sd-scripts' datasets become, where they fall through its levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.convert.conversion import Conversion, convert

TRAINING = """\
output_name = "a"
guidance_scale = 1.0
timestep_sampling = "flux_shift"
model_prediction_type = "raw"
network_module = "networks.lora_flux"
cache_text_encoder_outputs = true
"""


def converted(tmp_path: Path, datasets: str, more: str = "") -> Conversion:
    (tmp_path / "a.toml").write_text(TRAINING + more, encoding="utf-8")
    (tmp_path / "d.toml").write_text(datasets, encoding="utf-8")
    return convert(tmp_path / "a.toml", datasets=tmp_path / "d.toml")


def kinds(done: Conversion) -> dict[str, str]:
    return {fate.given.key: fate.kind for fate in done.fates}


SUBSET = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '/x'\n"


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("num_repeats = 4", "repeats", 4),
        ("class_tokens = 'a dog'", "caption", "a dog"),
        ("caption_prefix = 'by me, '", "prefix", "by me,"),
        ("caption_suffix = ', film'", "suffix", ", film"),
        ("enable_wildcard = true", "wildcards", True),
        ("enable_wildcard = true", "multiline", True),
        ("shuffle_caption = true", "shuffle_tags", True),
        ("flip_aug = true", "flip", True),
        ("random_crop = true", "random_crops", 4),
        ("alpha_mask = true", "mask", "alpha"),
    ],
)
def test_a_key_of_a_subset(tmp_path: Path, line: str, key: str, value: object) -> None:
    done = converted(tmp_path, SUBSET + line)
    assert getattr(done.loaded.job.datasets[0], key) == value
    assert kinds(done)[f"datasets[0].subsets[0].{line.partition(' ')[0]}"] == "mapped"


def test_the_innermost_level_wins(tmp_path: Path) -> None:
    datasets = "[general]\nnum_repeats = 2\nflip_aug = true\n" + SUBSET + "num_repeats = 3\nflip_aug = false\n"
    done = converted(tmp_path, datasets, "dataset_repeats = 5\n")
    assert (done.loaded.job.datasets[0].repeats, done.loaded.job.datasets[0].flip) == (3, False)
    assert kinds(done)["general.num_repeats"] == "not needed"
    assert kinds(done)["general.flip_aug"] == "not needed"


def test_a_key_that_reaches_several_datasets_is_mapped_if_it_is_anywhere(tmp_path: Path) -> None:
    datasets = "[general]\nkeep_tokens = 2\n" + SUBSET + SUBSET.replace("/x", "/y") + "shuffle_caption = true\n"
    done = converted(tmp_path, datasets)
    assert [(entry.shuffle_tags, entry.keep_tags) for entry in done.loaded.job.datasets] == [(False, 0), (True, 2)]
    assert kinds(done)["general.keep_tokens"] == "mapped"


def test_masks(tmp_path: Path) -> None:
    done = converted(tmp_path, SUBSET + "conditioning_data_dir = 'C:\\masks'\n", "masked_loss = true\n")
    assert done.loaded.job.datasets[0].mask == "datasets/masks"
    assert kinds(done)["masked_loss"] == "not needed"
    assert "copy it there" in next(line for line in done.text.splitlines() if "mask:" in line)
    assert kinds(converted(tmp_path, SUBSET, "masked_loss = true\n"))["masked_loss"] == "not supported"


def test_caption_dropout_is_the_jobs_where_all_agree(tmp_path: Path) -> None:
    two = SUBSET + "caption_dropout_rate = 0.2\n" + SUBSET.replace("/x", "/y")
    done = converted(tmp_path, two)
    assert [entry.caption_dropout for entry in done.loaded.job.datasets] == [0.2, 0]
    done = converted(tmp_path, two + "caption_dropout_rate = 0.2\n")
    assert [entry.caption_dropout for entry in done.loaded.job.datasets] == [None, None]
    assert done.loaded.job.caption_dropout == 0.2
    assert converted(tmp_path, SUBSET).loaded.job.caption_dropout == 0  # not the default of a LoRA here


def test_regularisation_images_weigh_what_they_weigh_there(tmp_path: Path) -> None:
    datasets = SUBSET + "[[datasets.subsets]]\nimage_dir = '/reg'\nis_reg = true\n"
    job = converted(tmp_path, datasets, "prior_loss_weight = 0.25\n").loaded.job
    assert [(entry.path, entry.weight) for entry in job.datasets] == [("/x", 1), ("/reg", 0.25)]
