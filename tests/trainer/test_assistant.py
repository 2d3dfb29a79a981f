"""The assistant: on in training, off in samples and files, beside any base and adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft.tuners.lora import LoraLayer

from bootstrap.bases import FLUX_TINY
from bootstrap.lora_file import LoraFileError
from jobs.schema import Lora
from tests.loras import SMALL, seem_trained, write_lora
from tests.trainer.test_adapter import tensors_of
from tests.trainer.test_model import make_batch
from trainer.adapter import add_adapter
from trainer.assistant import add_assistant, switch_assistant, without_assistant
from trainer.model import predict
from trainer.sample import evaluating


def model_with(assistant: Path | None, **lora: Any) -> FluxTransformer2DModel:
    torch.manual_seed(1)
    model = FluxTransformer2DModel(**SMALL.config()).to(torch.bfloat16)
    add_adapter(model, Lora(rank=4, **lora), 42, 2)
    seem_trained(model, 0.05)
    if assistant:
        add_assistant(model, assistant, SMALL)
    return model.train()


def out_of(model: FluxTransformer2DModel) -> torch.Tensor:
    return predict(model, make_batch(shape=SMALL), 1.0, False)


def merged(model: FluxTransformer2DModel, assistant: Path) -> FluxTransformer2DModel:
    """The same with the assistant in the base's weights."""
    other = model_with(assistant)
    for module in other.modules():
        if isinstance(module, LoraLayer) and "assistant" in module.lora_A:
            with torch.no_grad():
                weight = module.get_base_layer().weight
                weight.copy_(weight.float() + module.get_delta_weight("assistant").float())
    switch_assistant(other, on=False)
    return other


@pytest.mark.parametrize("lora", [{}, {"dora": True}, {"targets": "modulation", "dropout": 0.2}])
def test_it_is_on_in_training_and_off_in_samples(tmp_path: Path, lora: dict[str, Any]) -> None:
    file = write_lora(tmp_path / "a.safetensors")
    plain, helped = model_with(None, **lora), model_with(file, **lora)
    before = {name: tensor.clone() for name, tensor in tensors_of(helped).items()}
    assert before.keys() == tensors_of(plain).keys(), "nothing of it is trained"
    plain.eval()
    expected = out_of(plain)
    with evaluating(helped), without_assistant(helped):
        assert torch.equal(out_of(helped), expected)
        assert tensors_of(helped).keys() == before.keys()
    helped.eval()
    assert not torch.allclose(out_of(helped).float(), expected.float(), atol=0.05)
    assert tensors_of(helped).keys() == before.keys()


def test_it_adds_what_its_file_says(tmp_path: Path) -> None:
    file = write_lora(tmp_path / "a.safetensors")
    model = model_with(file)
    found, expected = out_of(model).float(), out_of(merged(model, file)).float()
    assert (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.slow
def test_compiled_it_can_be_switched(tmp_path: Path) -> None:
    file = write_lora(tmp_path / "a.safetensors")
    plain, model = model_with(file), model_with(file)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    for on in (True, False, True):
        switch_assistant(plain, on)
        switch_assistant(model, on)
        found, expected = out_of(model).float(), out_of(plain).float()
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_what_cannot_be_one_is_told(tmp_path: Path) -> None:
    dora = write_lora(tmp_path / "dora.safetensors", dora=True)
    with pytest.raises(LoraFileError, match="is a DoRA"):
        model_with(dora)
    other = write_lora(tmp_path / "other.safetensors", FLUX_TINY)
    with pytest.raises(LoraFileError, match=r"assistant_lora: .*other\.safetensors was made for another FLUX"):
        model_with(other)
