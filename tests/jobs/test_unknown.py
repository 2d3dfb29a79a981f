from __future__ import annotations

import pytest

from jobs import unknown
from jobs.schema import Job


@pytest.mark.parametrize(
    ("group", "name", "words"),
    [
        ("", "learning_rte", "Did you mean learning_rate?"),
        ("", "Steps", "Did you mean steps?"),
        ("", "images-per-step", "Did you mean images_per_step?"),
        ("", "rank", "belongs under lora:"),
        ("", "every", "under save: or under sample:"),
        ("", "trigger", "under datasets:, beside the path of a folder"),
        ("", "optimizer_in_backward", "belongs under plan:"),
        ("lora", "learning_rate", "at the outermost level"),
        ("datasets[]", "repeat", "Did you mean repeats?"),
        ("datasets[]", "steps", "at the outermost level"),
        ("save", "wieghts", "Did you mean weights?"),
        ("", "lr", "Here it is called learning_rate"),
        ("", "batch_size", "Here it is called images_per_step"),
        ("", "max_train_steps", "Here it is called steps"),
        ("", "network_dim", "Here it is called rank, under lora:"),
        ("", "epoch", "epochs"),
        ("", "model", "Here it is called base"),
        ("", "train_data_dir", "Here it is called path, under datasets:"),
        ("datasets[]", "num_repeats", "Did you mean repeats?"),
        ("lora", "linear_alpha", "Here it is called alpha"),
        ("", "mixed_precision", "not needed"),
        ("", "triger", "under datasets:"),
        ("", "zzz", "use one of name, base"),
    ],
)
def test_a_remedy_for_every_kind_of_unknown_key(group: str, name: str, words: str) -> None:
    assert words in unknown.remedy(group, name)[0]


def test_every_name_of_another_tool_leads_to_a_key_of_ours() -> None:
    keys = {prefix: set(kind.model_fields) for prefix, kind in unknown.sections()}
    for ours in unknown._OTHER_NAMES:
        group, _, key = ours.rpartition(".")
        assert key in keys[group]


def test_all_groups_are_found() -> None:
    groups = dict(unknown.sections())
    assert set(groups) == {
        "",
        "text_encoders",
        "lora",
        "lora.layers[]",
        "datasets[]",
        "save",
        "sample",
        "validation",
        "ema",
        "output",
        "notify",
        "plan",
    }
    assert groups[""] is Job
