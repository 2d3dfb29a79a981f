"""The processor does what diffusers' own does; the operation itself needs a GPU (tests/gpu)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bootstrap.bases import FLUX_TINY
from tests.trainer.test_model import make_batch
from trainer import cudnn_attention
from trainer.cudnn_attention import use_cudnn
from trainer.model import bare_model, predict


def test_the_model_is_the_same_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2), None

    monkeypatch.setattr(cudnn_attention, "cudnn_attention", plain)
    torch.manual_seed(0)
    model = bare_model(FLUX_TINY).to_empty(device="cpu").float()
    batch = make_batch()
    batch = replace(batch, noisy=batch.noisy.float(), text=batch.text.float(), pooled=batch.pooled.float())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    before = predict(model, batch, 1.0, False)
    use_cudnn(model)
    torch.testing.assert_close(predict(model, batch, 1.0, False), before)
