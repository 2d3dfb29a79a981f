"""What only pictures or tensors tell of a job."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.bases import FLUX_TINY, FLUX_TINY_SCHNELL
from bootstrap.dataset import Item
from bootstrap.doubts import doubts_of_base, doubts_of_pictures
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
