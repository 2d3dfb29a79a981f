"""A product of bfloat16 on a processor without instructions for it: formed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch.nn.functional import conv2d, linear, scaled_dot_product_attention

from trainer.processor import multiply_in_float32, use_processor

Check = Callable[[], None]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layers() -> None:
    """Forward and both gradients."""
    x, weight, bias = (normal(*shape).requires_grad_() for shape in ((3, 50, 64), (48, 64), (48,)))
    wide = [tensor.detach().float().requires_grad_() for tensor in (x, weight, bias)]
    out, expected = linear(x, weight, bias), linear(*wide)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    onto = normal(3, 50, 48, seed=1)
    out.backward(onto)
    expected.backward(onto.float())
    assert torch.equal(x.grad, wide[0].grad.bfloat16())
    assert torch.equal(weight.grad, wide[1].grad.bfloat16())


def batches() -> None:
    a, b, bias = normal(4, 8, 16), normal(4, 16, 8, seed=1), normal(4, 8, 8, seed=2)
    assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
    both = torch.baddbmm(bias.float(), a.float(), b.float(), beta=0.5, alpha=2)
    assert torch.equal(torch.baddbmm(bias, a, b, beta=0.5, alpha=2), both.bfloat16())


def convolutions() -> None:
    x, weight, bias = normal(2, 3, 16, 16), normal(4, 3, 3, 3, seed=1), normal(4, seed=2)
    expected = conv2d(x.float(), weight.float(), bias.float(), padding=1, stride=2)
    out = conv2d(x, weight, bias, padding=1, stride=2)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-6)  # half a place of bfloat16


def attention() -> None:
    """Its gradients are those of float32, as near as bfloat16 has them; where a mask is given too."""
    for mask in (None, normal(7, 7, seed=3)):
        narrow = [normal(2, 3, 7, 8, seed=seed).requires_grad_() for seed in range(3)]
        wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
        onto = normal(2, 3, 7, 8, seed=4)
        scaled_dot_product_attention(*narrow, attn_mask=mask).backward(onto)
        scaled_dot_product_attention(*wide, attn_mask=None if mask is None else mask.float()).backward(onto.float())
        for ours, theirs in zip(narrow, wide, strict=True):
            assert ours.grad.dtype is torch.bfloat16
            assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 0.01


def other_types() -> None:
    a, b = normal(8, 16).double(), normal(16, 8).double()
    assert torch.equal(a @ b, torch.einsum("ij,jk->ik", a, b))
    assert (a @ b).dtype is torch.float64
    with pytest.raises(RuntimeError, match=r"same dtype|BFloat16"):
        torch.mm(normal(2, 3), torch.ones(3, 2))


def without_instructions(check: Check) -> None:
    use_processor(1)
    multiply_in_float32()  # whatever this processor can
    check()


@pytest.fixture(scope="module")
def another() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: the way holds for a whole one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("check", [layers, batches, convolutions, attention, other_types])
def test_products(check: Check, another: ProcessPoolExecutor) -> None:
    another.submit(without_instructions, check).result(timeout=300)


def test_threads() -> None:
    assert use_processor(1) == torch.device("cpu")
    assert torch.get_num_threads() == 1
