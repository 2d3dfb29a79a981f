from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from jobs.schema import Job, is_single_file

LEAST: dict[str, Any] = {"name": "a", "base": "flux-tiny", "datasets": [{"path": "x"}]}


def job(method: str = "lora", **keys: Any) -> Job:
    return Job.model_validate(LEAST | {"method": method} | keys)


@pytest.mark.parametrize(
    ("key", "lora", "full"),
    [
        ("learning_rate", 1e-4, 1e-5),
        ("images_per_step", 4, 4),
        ("optimizer", "AdamW", "AdamW8bit"),
        ("weight_decay", 0.01, 0.01),
        ("max_grad_norm", 1.0, None),
        ("schedule", "constant", "constant"),
        ("warmup", 50, 100),
        ("resolutions", (512, 768, 1024), (512,)),
        ("timestep_sampling", "flux_shift", "flux_shift"),
        ("guidance", 1.0, 1.0),
        ("t5_mask", False, False),
        ("caption_dropout", 0.05, 0.0),
        ("steps", None, None),
        ("when_done", "idle", "idle"),
    ],
)
def test_the_defaults_of_each_method(key: str, lora: Any, full: Any) -> None:
    assert getattr(job("lora"), key) == lora
    assert getattr(job("full"), key) == full


def test_the_defaults_of_groups() -> None:
    adapter = job("lora").lora
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.targets) == (16, 16, "attention+feed-forward")
    assert job("full").lora is None
    assert (job("lora").save.every, job("lora").save.states, job("lora").save.weights) == (250, 1, "all")
    assert (job("full").save.every, job("full").save.states, job("full").save.weights) == (500, 1, 2)
    sample = job().sample
    assert (sample.every, sample.width, sample.height, sample.steps, sample.guidance) == (250, 1024, 1024, 24, 3.5)


def test_defaults_that_hang_on_other_keys() -> None:
    assert job(lora={"rank": 32}).lora == job(lora={"rank": 32, "alpha": 32}).lora
    assert job(lora=None).lora is not None
    assert job(optimizer="Prodigy").learning_rate == 1.0
    assert job(optimizer="Prodigy", learning_rate=0.5).learning_rate == 0.5
    assert job(plan={"optimizer_in_backward": True}).max_grad_norm is None
    assert job("full", save={"states": 4}).save.weights == 4


def test_what_is_written_stays() -> None:
    assert job("full", max_grad_norm=0.5).max_grad_norm == 0.5
    assert job("lora", max_grad_norm=None).max_grad_norm is None
    assert job("full", save={"every": 7}).save.weights == 2


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_job_survives_being_written_as_json(method: str) -> None:
    whole = job(method, resolution=[512, 1024], optimizer_args={"betas": [0.9, 0.99]}, sample={"prompts": ["a"]})
    assert Job.model_validate_json(whole.model_dump_json()) == whole
    assert Job.model_validate(whole.model_dump(mode="json")) == whole


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        job().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("keys", [{"stepz": 1}, {"save": {"evry": 1}}, {"datasets": [{"path": "a", "pth": "b"}]}])
def test_unknown_keys_are_refused_everywhere(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        job(**keys)


def test_single_files_are_known_by_their_ending() -> None:
    assert is_single_file("models/flux1-dev.safetensors")
    assert not is_single_file("black-forest-labs/FLUX.1-dev")


@pytest.mark.parametrize(
    ("written", "fraction", "path"),
    [({}, 0.1, None), ({"fraction": 0.3}, 0.3, None), ({"fraction": None}, 0.1, None), ({"path": "d"}, None, "d")],
)
def test_validation_holds_out_a_tenth_unless_a_folder_is_given(
    written: dict[str, Any], fraction: float | None, path: str | None
) -> None:
    assert job().validation is None
    validation = job(validation=written).validation
    assert validation is not None
    assert (validation.fraction, validation.path, validation.keeps_best) == (fraction, path, False)
