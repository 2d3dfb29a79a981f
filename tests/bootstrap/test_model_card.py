from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bootstrap.model_card import Facts, Picture, model_card
from tests.runs import make_job

DEV = "black-forest-labs/FLUX.1-dev"
RAIN = "pprflwr in the rain"
LORA = make_job(
    name="paper-flowers",
    base=DEV,
    method="lora",
    datasets=[{"path": "datasets/secret-place", "trigger": "pprflwr", "mask": "datasets/hidden"}],
    sample={"prompts": [RAIN]},
    output={"hub": "me/paper-flowers"},
    lora={"start": "runs/private/output/a.safetensors"},
)
FULL = make_job(name="paper-flowers", base=DEV, method="full", datasets=[{"path": "datasets/secret-place"}])


def facts(**keys: Any) -> Facts:
    pictures = (
        Picture(1000, Path("/w/samples/step-001000-00.png"), RAIN),
        Picture(0, Path("/w/samples/step-000000-00.png"), RAIN),
    )
    common: dict[str, Any] = {"job": LORA, "repo": "me/paper-flowers", "file": "paper-flowers.safetensors"}
    common |= {"step": 1000, "digest": "d1gest", "base_repo": DEV, "guidance": True, "licence": {}}
    return Facts(**common | {"pictures": pictures} | keys)


def metadata(card: str) -> Any:
    return yaml.safe_load(card.split("---\n")[1])


def test_what_the_hub_reads() -> None:
    card = model_card(facts())
    assert metadata(card) == {
        "license": "other",
        "license_name": "flux-1-dev-non-commercial-license",
        "license_link": f"https://huggingface.co/{DEV}/blob/main/LICENSE.md",
        "base_model": DEV,
        "base_model_relation": "adapter",
        "pipeline_tag": "text-to-image",
        "library_name": "diffusers",
        "tags": ["flux", "text-to-image", "diffusers", "lora", "fluxpod"],
        "instance_prompt": "pprflwr",
        "widget": [{"text": RAIN, "output": {"url": "samples/step-001000-00.png"}}],
    }
    assert "non-commercial purposes only" in card
    assert "![the same before training](samples/step-000000-00.png)" in card
    assert "| learning_rate | 0.0001 |" in card
    assert "d1gest" in card
    assert model_card(facts()) == card


def test_no_place_of_the_pod_is_told() -> None:
    for job in (LORA, FULL):
        card = model_card(facts(job=job))
        for place in ("secret-place", "hidden", "private/output", "/w/"):
            assert place not in card


def test_a_checkpoint() -> None:
    card = model_card(facts(job=FULL))
    assert metadata(card)["base_model_relation"] == "finetune"
    assert "from_single_file" in card
    assert "models/diffusion_models/" in card


@pytest.mark.parametrize("job", [LORA, FULL])
def test_the_code_is_python(job: Any) -> None:
    hostile = Picture(1000, Path("step-001000-00.png"), 'a "quoted" \\ prompt\nof `two` lines | <b>')
    card = model_card(facts(job=job, pictures=(hostile,)))
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ast.parse(code)
    assert metadata(card)["widget"][0]["text"] == hostile.prompt
    assert "\\|" in card


@pytest.mark.parametrize(
    ("keys", "licence"),
    [
        ({"licence": {"license": "mit"}}, "mit"),
        ({"base_repo": "", "job": FULL.model_copy(update={"base": "/w/models/mine.safetensors"})}, "other"),
        ({"base_repo": "black-forest-labs/FLUX.1-schnell", "guidance": False}, "apache-2.0"),
        ({"base_repo": "", "guidance": False}, None),
        ({"base_repo": "", "toy": True}, None),
    ],
)
def test_the_licence_is_that_of_the_base(keys: dict[str, Any], licence: str | None) -> None:
    assert metadata(model_card(replace(facts(), **keys))).get("license") == licence


def test_a_link_of_the_base_leads_to_the_base() -> None:
    card = metadata(model_card(facts(licence={"license": "other", "license_link": "LICENSE.md"})))
    assert card["license_link"] == f"https://huggingface.co/{DEV}/blob/main/LICENSE.md"


def test_without_samples_and_triggers() -> None:
    card = model_card(facts(job=FULL, pictures=()))
    assert "widget" not in metadata(card)
    assert "## Samples" not in card


def test_what_was_drawn_before_training_is_shown_beside_the_same_only() -> None:
    """A file of prompts may be edited while a run trains."""
    pictures = [Picture(9, Path("step-000009-00.png"), RAIN, "seed 1"), Picture(9, Path("step-000009-01.png"), "b", "")]
    first = [Picture(0, Path("step-000000-00.png"), RAIN, "seed 2"), Picture(0, Path("step-000000-01.png"), "a", "")]
    assert "the same before training" not in model_card(facts(pictures=(*pictures, *first)))
    moved = Picture(0, Path("step-000000-07.png"), "b", "")
    assert "![the same before training](samples/step-000000-07.png)" in model_card(facts(pictures=(*pictures, moved)))
