from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel

from bootstrap.bases import FLUX_TINY
from bootstrap.dataset import Item
from bootstrap.outcome import PodError
from bootstrap.volume import read_json
from tests.broken_attention import FLASH, HALF, NAN
from tests.runs import PLAN, make_job, make_run, make_world
from trainer import self_check
from trainer.attention import Attention, candidates
from trainer.self_check import Size, attention_by_definition, check, choose_attention, sizes_to_check

SIZES = (Size(64, 64, 2, 64),)


def other(model: FluxTransformer2DModel) -> None:
    raise TypeError("too many arguments")


def refusing(model: FluxTransformer2DModel) -> None:
    raise RuntimeError("No available kernel. Aborting execution.\nmore")


OTHER = Attention("other", other, lambda device, masked: "")
REFUSING = Attention("refusing", refusing, lambda device, masked: "")


@pytest.fixture(autouse=True)
def sdpa_as_it_was() -> Any:
    yield
    for enable in (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        enable(True)
    FLASH.switch_on(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_definition_is_attention(masked: bool) -> None:
    query, key, value = (torch.randn(2, 3, 20, 8, dtype=torch.float64).float().requires_grad_() for _ in range(3))
    mask = (torch.arange(20) < torch.tensor([[20], [7]]))[:, None, None, :] if masked else None
    ours = attention_by_definition(query, key, value, mask)
    theirs = F.scaled_dot_product_attention(query, key, value, mask)
    assert torch.allclose(ours, theirs, atol=1e-6)
    wanted = torch.autograd.grad(theirs.square().sum(), (query, key, value))
    for got, expected in zip(torch.autograd.grad(ours.square().sum(), (query, key, value)), wanted, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cpus_attentions_are_right(control: dist.ProcessGroup, name: str, masked: bool) -> None:
    (attention,) = (each for each in candidates(torch.device("cpu"), masked) if each.name == name)
    verdict = check(attention, make_job(t5_mask=masked), PLAN, FLUX_TINY, SIZES, make_world(control))
    assert verdict.right
    assert verdict.error < 2e-2
    assert verdict.why == ""


@pytest.mark.parametrize("attention", [NAN, HALF, REFUSING, OTHER], ids=lambda each: each.name)
def test_a_wrong_attention_is_found(control: dist.ProcessGroup, attention: Attention) -> None:
    verdict = check(attention, make_job(), PLAN, FLUX_TINY, SIZES, make_world(control))
    assert not verdict.right
    assert verdict.error > 0.1
    word = {"refusing": "RuntimeError: No available kernel", "other": "TypeError: too many arguments"}
    assert word.get(attention.name, "gradient") in verdict.why


def items(*buckets: tuple[int, int]) -> tuple[Item, ...]:
    return tuple(Item(f"{i}.png", f"{i}", "", 1, *bucket, bucket) for i, bucket in enumerate(buckets))


def test_a_wrong_attention_is_dropped_for_the_next(
    control: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_check, "candidates", lambda device, masked: (NAN, FLASH))
    run, world = make_run(tmp_path), make_world(control)
    with caplog.at_level("INFO"):
        assert choose_attention(run, world, items((64, 64))) is FLASH
    assert "nan gives WRONG results on this pod and is not used: the gradient of" in caplog.text
    assert "attention: flash, gradients off float32's by" in caplog.text
    verdicts = read_json(run.folder.attention)["verdicts"]  # type: ignore[index]
    assert {name: verdict["right"] for name, verdict in verdicts.items()} == {"nan": False, "flash": True}

    # The next start on this pod knows it, and says it again.
    monkeypatch.setattr(self_check, "check", None)
    caplog.clear()
    assert choose_attention(run, world, items((64, 64))) is FLASH
    assert "nan is not used: the gradient" in caplog.text


def test_what_is_known_holds_for_the_same_sizes_only(
    control: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, world, checked = make_run(tmp_path), make_world(control), []
    original = self_check.check

    def noting(attention: Attention, *rest: Any) -> Any:
        checked.append(attention.name)
        return original(attention, *rest)

    monkeypatch.setattr(self_check, "check", noting)
    for buckets in (((64, 64),), ((64, 64),), ((64, 64), (80, 48))):
        choose_attention(run, world, items(*buckets))
    assert checked == ["flash", "flash"]


def test_a_card_on_which_nothing_is_right_is_told(
    control: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "candidates", lambda device, masked: (NAN, HALF))
    with pytest.raises(PodError, match=r"No attention gives right gradients on this pod: nan: .*; half: "):
        choose_attention(make_run(tmp_path), make_world(control), items((64, 64)))


def test_a_card_broken_by_a_kernel_is_remembered(
    control: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise self_check.CardError("attention refusing breaks the card (illegal memory access)")

    monkeypatch.setattr(self_check, "candidates", lambda device, masked: (REFUSING, FLASH))
    monkeypatch.setattr(self_check, "_end_if_broken", breaks)
    run, world = make_run(tmp_path), make_world(control)
    with pytest.raises(self_check.CardError):
        choose_attention(run, world, items((64, 64)))
    assert choose_attention(run, world, items((64, 64))) is FLASH


def test_a_broken_card_that_cannot_be_cleaned_up_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", breaks)
    self_check._clean_up(PLAN, torch.device("cuda"))


def test_sizes_to_check() -> None:
    found = sizes_to_check(items((512, 512), (832, 448), (448, 832), (256, 256), (768, 512)), 4, 512)
    # The two of 832 x 448 are as long as each other, and the most frequent; 1536 + 512 are whole blocks of 128.
    assert [(size.width, size.height) for size in found] == [(832, 448), (256, 256), (768, 512)]
    assert {size.images for size in found} == {2}
    assert [size.tokens for size in found] == [1968, 768, 2048]


@pytest.mark.parametrize(("masked", "names"), [(False, ["flash", "math"]), (True, ["flash", "math"])])
def test_candidates_on_cpu(masked: bool, names: list[str]) -> None:
    assert [attention.name for attention in candidates(torch.device("cpu"), masked)] == names
