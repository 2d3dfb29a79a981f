from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.gradients import plan_for_one_card
from bootstrap.flux_shape import FluxShape
from tests.broken_attention import HALF, NAN
from tests.runs import make_job
from trainer.attention import ATTENTIONS, Attention
from trainer.self_check import Size, Verdict, check
from trainer.world import World

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

# A block of 128 that is full at the end, and one that is half full.
SIZES = (Size(512, 512, 1, 512), Size(832, 448, 1, 512))


def verdict_of(attention: Attention, compiled: bool, t5_mask: bool = False) -> Verdict:
    job = make_job(t5_mask=t5_mask)
    plan = replace(plan_for_one_card(job), compile=compiled)
    device = torch.device("cuda", 0)
    return check(attention, job, plan, FluxShape(), SIZES, World(0, 1, device, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("attention", [NAN, HALF], ids=lambda each: each.name)
def test_a_broken_attention_is_caught(attention: Attention, compiled: bool) -> None:
    verdict = verdict_of(attention, compiled)
    print(verdict)
    assert not verdict.right


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda each: each.name)
def test_what_training_may_take_is_right(attention: Attention, masked: bool) -> None:
    if why := attention.cannot(torch.device("cuda", 0), masked):
        pytest.skip(why)
    verdict = verdict_of(attention, compiled=True, t5_mask=masked)
    print(verdict)
    assert verdict.right
