"""What only pictures or tensors tell of a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.bases import FLUX_TINY, FLUX_TINY_SCHNELL
from bootstrap.dataset import Item
from bootstrap.doubts import doubts_of_base, doubts_of_pictures, doubts_of_start
from bootstrap.lora_file import tensors_of
from bootstrap.tensor_files import write_tensors
from bootstrap.volume import Volume
from tests.loras import make_adapter
from tests.runs import make_job


def item(number: int, width: int, height: int, dataset: int = 0) -> Item:
    return Item(f"{number}.jpg", f"{number}", "", 1, width, height, (512, 512), dataset)


@pytest.mark.parametrize(
    ("keys", "sides", "told"),
    [
        ({"resolution": 1024}, [(1024, 1024), (800, 1300), (990, 1000)], None),
        ({"resolution": 1024}, [(700, 700), (2000, 2000), (2000, 2000), (2000, 2000)], None),
        ({"resolution": 1024}, [(700, 700), (600, 900), (2000, 2000)], "2 of the 3 .* own size.* Write 704"),
        ({"resolution": [512, 1024]}, [(500, 600)], "smaller than 1024"),
        ({"resolution": 1024, "upscale": True}, [(300, 300)], "teaches blur.* Write 256"),
    ],
)
def test_a_resolution_above_the_pictures(keys: dict[str, Any], sides: list[tuple[int, int]], told: str | None) -> None:
    items = [item(number, *side) for number, side in enumerate(sides)]
    found = doubts_of_pictures(make_job(**keys), [*items, *items])  # each at two sizes, say
    assert [problem.key for problem in found] == (["resolution"] if told else [])
    if told:
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(str(found[0]))


def test_it_is_told_of_the_dataset_that_has_its_own() -> None:
    job = make_job(resolution=512, datasets=[{"path": "a"}, {"path": "b", "resolution": 1024}])
    found = doubts_of_pictures(job, [item(1, 600, 600, 0), item(2, 600, 600, 1)])
    assert [problem.key for problem in found] == ["datasets[1].resolution"]


def test_a_base_without_guidance_may_be_distilled() -> None:
    job = make_job(method="lora", base="models/fine-tune.safetensors", vae="v", text_encoders={"clip": "c", "t5": "t"})
    assert [problem.key for problem in doubts_of_base(job, FLUX_TINY_SCHNELL)] == ["base"]
    assert doubts_of_base(job, FLUX_TINY) == []
    assert doubts_of_base(make_job(base="flux-tiny-schnell"), FLUX_TINY_SCHNELL) == []


WIDE, STRONG = {"match": "attention", "rank": 64}, {"match": ["*.to_q"], "alpha": 64}


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"layers": [WIDE, STRONG]}, {}),
        ({"rank": 4, "layers": [WIDE, STRONG]}, {}),
        ({"rank": 4, "layers": [STRONG]}, {"lora.layers[0].alpha": "rank is 16, .* Write 4, the rank"}),
        ({"layers": [{"match": "attention", "alpha": 0}]}, {"lora.layers[0].alpha": "nothing is learned"}),
        ({"layers": [{"match": "attention", "alpha": 0}, STRONG | {"match": "attention"}]}, {}),
        ({"rslora": True, "alpha": 4, "layers": [WIDE]}, {}),
        (
            {"rslora": True, "layers": [WIDE | {"rank": 256}]},
            {"lora.layers[0].rank": r"sqrt\(rank\) is 16, .* Write 16"},
        ),
    ],
)
def test_layers_whose_strength_is_strange(lora: dict[str, Any], told: dict[str, str]) -> None:
    found = {problem.key: problem for problem in doubts_of_base(make_job(method="lora", lora=lora), FLUX_TINY)}
    assert found.keys() == told.keys()
    for key, words in told.items():
        assert re.search(words, str(found[key]))


def test_a_lora_to_start_from_that_has_text_encoders_too(tmp_path: Path) -> None:
    file = {"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.ones(1)}
    write_tensors(tmp_path / "a.safetensors", tensors_of(make_adapter(), "kohya") | file)
    write_tensors(tmp_path / "b.safetensors", tensors_of(make_adapter(), "kohya"))
    found = doubts_of_start(make_job(method="lora", lora={"start": "a.safetensors"}), Volume(tmp_path))
    assert [problem.key for problem in found] == ["lora.start"]
    assert "text encoders too (1 tensors), which is left out" in str(found[0])
    assert doubts_of_start(make_job(method="lora", lora={"start": "b.safetensors"}), Volume(tmp_path)) == []
    assert doubts_of_start(make_job(method="lora"), Volume(tmp_path)) == []
