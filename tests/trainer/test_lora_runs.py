"""Whole runs of an adapter with everything that it can have: they go on to the bit, and on any number of processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.bases import FLUX_TINY
from bootstrap.outcome import JOB_WRONG
from bootstrap.resume import resume_problems
from bootstrap.tensor_files import read_header
from bootstrap.volume import Volume
from tests.loras import write_lora
from tests.training import fill_volume, prepared, train, trained

LORA: dict[str, Any] = {
    "rank": 4,
    "alpha": 2,
    "dora": True,
    "rslora": True,
    "dropout": 0.3,
    "layers": [{"match": "attention", "rank": 6, "learning_rate": 2e-3}, {"match": ["*.ff.net.2"], "alpha": 3}],
}
KEYS: dict[str, Any] = {
    "method": "lora",
    "lora": LORA,
    "assistant_lora": "models/assistant.safetensors",
    "plan": {"base_precision": "nf4"},
    "learning_rate": 1e-2,
    "steps": 4,
    "images_per_step": 2,
}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Volume:
    volume = fill_volume(tmp_path_factory.mktemp("volume"), flux_tiny)
    write_lora(volume.models / "assistant.safetensors", FLUX_TINY)
    write_lora(volume.models / "dora.safetensors", FLUX_TINY, dora=True)
    return volume


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_is_the_same_on_two_processes(volume: Volume) -> None:
    whole = trained(volume, name="whole", **KEYS)
    half = trained(volume, name="half", **KEYS | {"steps": 2})
    assert resume_problems(half.states[-1], whole.run.job) == []
    rest = trained(volume, half.states[-1], name="rest", **KEYS)
    assert half.values("loss") + rest.values("loss") == whole.values("loss")
    assert rest.weights.keys() == whole.weights.keys()
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in rest.weights.items())
    plan, state = whole.run.plan, whole.states[-1]
    assert plan.weights_bytes == sum(tensor.numel() * 4 for tensor in whole.weights.values())
    optimizer = [e.shape for n, e in read_header(state.optimizer).tensors.items() if n.endswith("exp_avg")]
    assert sum(map(math.prod, optimizer)) * 8 == plan.state_bytes - plan.weights_bytes
    two = trained(volume, name="two", **KEYS | {"plan": {"base_precision": "nf4", "processes": 2}})
    assert two.values("loss") == pytest.approx(whole.values("loss"), rel=2e-3)


def test_an_assistant_that_is_none_is_the_jobs_fault(volume: Volume) -> None:
    told = train(prepared(volume, name="strange", **KEYS | {"assistant_lora": "models/dora.safetensors"})).outcome
    assert told.code == JOB_WRONG
    assert "dora.safetensors is a DoRA" in told.reason
