from __future__ import annotations

from typing import Any

import pytest

from jobs import rules
from jobs.schema import Job

LEAST: dict[str, Any] = {"name": "a", "base": "me/flux", "method": "lora", "datasets": [{"path": "x"}]}
SCHNELL, DEV = "black-forest-labs/FLUX.1-schnell", "black-forest-labs/FLUX.1-dev"
LAYER = {"match": "attention"}
SINGLE = {"base": "models/flux.safetensors"}
ENCODERS = {"clip": "c", "t5": "t"}


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"steps": 1, "epochs": 1}, ("epochs",)),
        ({"method": "full", "lora": {"rank": 4}}, ("lora",)),
        ({"discrete_flow_shift": 3.0}, ("discrete_flow_shift",)),
        ({"discrete_flow_shift": 3.0, "timestep_sampling": "uniform"}, ("discrete_flow_shift",)),
        ({"sigmoid_scale": 1, "timestep_sampling": "uniform"}, ("sigmoid_scale",)),
        ({"vae": "v"}, ("vae",)),
        ({"text_encoders": ENCODERS}, ("text_encoders",)),
        (SINGLE, ("base",)),
        (SINGLE | {"vae": "v"}, ("base",)),
        ({"plan": {"optimizer_in_backward": True}, "max_grad_norm": 1.0}, ("max_grad_norm",)),
        ({"method": "full", "assistant_lora": "a.safetensors"}, ("assistant_lora",)),
        ({"lora": {"layers": [LAYER]}}, ("lora", "layers", 0)),
        (
            {"optimizer": "Prodigy", "lora": {"layers": [LAYER | {"learning_rate": 1}]}},
            ("lora", "layers", 0, "learning_rate"),
        ),
        ({"validation": {"path": "d", "fraction": 0.1}}, ("validation", "fraction")),
        ({"validation": {"path": "https://example.org/a.zip"}}, ("validation", "path")),
        ({"optimizer_args": {"lr": 1}}, ("optimizer_args", "lr")),
        ({"optimizer_args": {"weight_decay": 1}}, ("optimizer_args", "weight_decay")),
        ({"optimizer": "AdamW8bit", "optimizer_args": {"amsgrad": True}}, ("optimizer_args", "amsgrad")),
        ({"schedule_args": {"end": 0.1}}, ("schedule_args", "end")),
        ({"schedule": "cosine", "schedule_args": {"cycles": 2}}, ("schedule_args", "cycles")),
        ({"schedule": "cosine", "schedule_args": {"end": "low"}}, ("schedule_args", "end")),
        ({"sample": {"every": 100}}, ("sample",)),
        ({"save": {"states": 3, "weights": 2}}, ("save", "weights")),
        ({"gpus": 2, "plan": {"processes": 4}}, ("plan", "processes")),
        ({"resolution": [512, 64], "bucket_step": 128}, ("bucket_step",)),
        ({"datasets": [{"path": "x"}, {"path": "y", "keep_tags": 1}]}, ("datasets", 1, "keep_tags")),
        ({"datasets": [{"path": "x", "crop": "top", "random_crops": 2}]}, ("datasets", 0, "crop")),
        ({"datasets": [{"path": "x", "mask_floor": 0.5}]}, ("datasets", 0, "mask_floor")),
        ({"datasets": [{"path": "x", "mask_normalize": True}]}, ("datasets", 0, "mask_normalize")),
    ],
)
def test_keys_that_contradict_or_have_no_effect(keys: dict[str, Any], path: rules.Path) -> None:
    findings = rules.contradictions(LEAST | keys)
    assert [finding.path for finding in findings] == [path]
    assert findings[0].message
    assert findings[0].remedy


@pytest.mark.parametrize(
    "keys",
    [
        {"steps": 1, "epochs": None},
        {"method": "full"},
        {"discrete_flow_shift": 3.0, "timestep_sampling": "shift"},
        {"sigmoid_scale": 2.0},
        SINGLE | {"vae": "v", "text_encoders": ENCODERS},
        {"plan": {"optimizer_in_backward": True}, "max_grad_norm": None},
        {"optimizer": "AdamW", "optimizer_args": {"amsgrad": True}},
        {"schedule": "my.curve", "schedule_args": {"anything": "goes"}},
        {"schedule": "cosine_with_restarts", "schedule_args": {"cycles": 2, "end": 0.1}},
        {"sample": {"prompts": []}},
        {"datasets": [{"path": "x", "keep_tags": 1, "shuffle_tags": True}, {"path": "y", "random_crops": 2}]},
        {"datasets": [{"path": "x", "mask": "alpha", "mask_floor": 0.5}, {"path": "y", "mask_floor": 0}]},
        {"save": {"states": 3, "weights": "all"}},
        {"gpus": 4, "plan": {"processes": 2}},
    ],
)
def test_keys_that_agree(keys: dict[str, Any]) -> None:
    assert rules.contradictions(LEAST | keys) == []


@pytest.mark.parametrize("wrong", [None, 3, "x", [], {}, True, [{}], 1.5])
def test_values_of_a_wrong_kind_are_left_to_the_schema(wrong: Any) -> None:
    for key in Job.model_fields:
        rules.contradictions(LEAST | {key: wrong})


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"learning_rate": 1e-2}, ("learning_rate",)),
        ({"learning_rate": 1e-5}, ("learning_rate",)),
        ({"learning_rate": 1e-4, "method": "full"}, ("learning_rate",)),
        ({"learning_rate": 1e-8, "method": "full"}, ("learning_rate",)),
        ({"learning_rate": 1e-4, "optimizer": "Prodigy"}, ("learning_rate",)),
        ({"learning_rate": 1e-3, "optimizer": "Lion8bit"}, ("learning_rate",)),
        ({"learning_rate": 1e-4, "optimizer": "Adafactor"}, ("learning_rate",)),
        ({"lora": {"layers": [LAYER | {"learning_rate": 1}]}}, ("lora", "layers", 0, "learning_rate")),
        ({"lora": {"rank": 256, "rslora": True}}, ("lora", "alpha")),
        ({"lora": {"dropout": 0.5}}, ("lora", "dropout")),
        ({"base": SCHNELL}, ("base",)),
        ({"base": "models/schnell-fp16", "method": "full"}, ("base",)),
        ({"base": SCHNELL, "assistant_lora": "a", "sample": {"prompts": ["a"]}}, ("sample", "steps")),
        ({"base": SCHNELL, "assistant_lora": "a", "guidance": 3.5}, ("guidance",)),
        ({"base": DEV, "assistant_lora": rules.SCHNELL_ASSISTANT}, ("assistant_lora",)),
        ({"guidance": 3.5}, ("guidance",)),
        ({"sample": {"prompts": ["a"], "guidance": 1}}, ("sample", "guidance")),
        ({"t5_mask": True}, ("t5_mask",)),
        ({"lora": {"alpha": 0}}, ("lora", "alpha")),
        ({"lora": {"rank": 16, "alpha": 4096}}, ("lora", "alpha")),
        ({"weight_decay": 1}, ("weight_decay",)),
        ({"caption_dropout": 0.9}, ("caption_dropout",)),
        ({"datasets": [{"path": "x"}, {"path": "y", "weight": 0}]}, ("datasets", 1, "weight")),
        ({"timestep_sampling": "shift", "discrete_flow_shift": 30}, ("discrete_flow_shift",)),
        ({"timestep_sampling": "shift", "discrete_flow_shift": 0.1}, ("discrete_flow_shift",)),
        ({"sigmoid_scale": 50}, ("sigmoid_scale",)),
        ({"images_per_step": 500}, ("images_per_step",)),
        ({"steps": 20}, ("warmup",)),
    ],
)
def test_settings_that_ruin_a_run_are_doubted(keys: dict[str, Any], path: rules.Path) -> None:
    findings = rules.doubts(Job.model_validate(LEAST | keys))
    assert [finding.path for finding in findings] == [path]
    assert findings[0].remedy


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"method": "full"},
        {"optimizer": "Prodigy"},
        {"optimizer": "some.Optimizer", "learning_rate": 3},
        {"base": "flux-tiny", "learning_rate": 1e-2},
        {"base": "flux-tiny-schnell", "method": "full", "learning_rate": 1e-3},
        {"base": SCHNELL, "assistant_lora": "a", "sample": {"prompts": ["a"], "guidance": 0, "steps": 4}},
        {"base": "flux-tiny-schnell", "learning_rate": 1e-2},
        {"optimizer": "Lion8bit"},
        {"optimizer": "Adafactor"},
        {"optimizer": "Adafactor", "method": "full"},
        {"lora": {"rank": 64, "alpha": 16, "rslora": True, "dora": True, "dropout": 0.05}},
        {"timestep_sampling": "shift"},
        {"lora": {"rank": 32, "alpha": 16}},
    ],
)
def test_common_settings_are_not_doubted(keys: dict[str, Any]) -> None:
    assert rules.doubts(Job.model_validate(LEAST | keys)) == []
