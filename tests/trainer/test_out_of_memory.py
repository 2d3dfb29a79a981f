"""Errors as torch and its libraries word them, and what is done about them. No GPU: the errors are made here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bootstrap.gpus import GIB
from bootstrap.outcome import CRASH, POD_WRONG
from bootstrap.whereabouts import Place
from trainer.encode import load_vae
from trainer.out_of_memory import (
    decode_in_tiles,
    decode_patiently,
    in_parts_that_fit,
    is_out_of_memory,
    measure,
)
from trainer.train import at_work_on, failure

# As torch 2.11 words it under a memory fraction, and without.
TOLD = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 97.00 GiB is "
    "free. 43.20 GiB allowed; Process 7 has 42.80 GiB memory in use. Of the allocated memory 40.25 GiB is allocated by "
    "PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError(TOLD), True),
        (torch.cuda.OutOfMemoryError("whatever it says"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL error ...: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError("the host has not as much memory to pin"), False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_what_ran_out(error: Exception, ran_out: bool) -> None:
    assert is_out_of_memory(error) is ran_out
    assert (failure(error, Place.unwatched()).shortage is not None) is ran_out


def test_a_compiler_that_ran_out_says_so_inside() -> None:
    error = RuntimeError("backend='inductor' raised: LoweringException")
    error.__cause__ = torch.OutOfMemoryError(TOLD)
    assert is_out_of_memory(error)
    assert measure(error, "step 1", 0).asked == int(2.5 * GIB)
    looped, other = RuntimeError("a"), RuntimeError("b")
    looped.__context__, other.__context__ = other, looped
    assert not is_out_of_memory(looped)


def test_the_figures_are_those_of_the_moment() -> None:
    seen = measure(torch.OutOfMemoryError(TOLD), "step 4", 3)
    assert (seen.asked, seen.held, seen.spare) == (int(2.5 * GIB), int(40.25 * GIB), GIB // 2)
    assert (seen.during, seen.process) == ("step 4", 3)
    assert seen.needed >= int(42.75 * GIB)
    bare = measure(RuntimeError("CUDA error: out of memory"), "step 4", 0)
    assert bare.asked == 0
    assert "asked for more" in str(bare)


def test_the_outcome_says_where_and_how_much() -> None:
    outcome = failure(torch.OutOfMemoryError(TOLD), Place.unwatched(1), "step 4")
    assert outcome.code == POD_WRONG
    assert outcome.reason.startswith("out of GPU memory: in step 4 process 1 held 40.2 GiB and asked for 2.5 GiB more")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in outcome.reason
    assert failure(ZeroDivisionError("x"), Place.unwatched()).code == CRASH


def test_where_a_process_is() -> None:
    def at(start: int, done: int) -> Any:
        return SimpleNamespace(start=start, done=done)

    assert at_work_on(None) == "setting up weights and optimizer"
    assert at_work_on(at(0, 0)) == "step 1, the first of this start"
    assert at_work_on(at(500, 0)) == "step 501, the first of this start"
    assert at_work_on(at(500, 512)) == "step 513"


# ---------------------------------------------------------------- in parts


@pytest.mark.parametrize("fits", [1, 2, 3, 8])
def test_a_batch_is_halved_until_it_fits(fits: int) -> None:
    sizes: list[int] = []

    def work(things: Sequence[int]) -> list[str]:
        sizes.append(len(things))
        if len(things) > fits:
            raise torch.OutOfMemoryError(TOLD)
        return [str(thing) for thing in things]

    assert in_parts_that_fit(work, list(range(7))) == list("0123456")
    assert max(size for size in sizes if size <= fits) <= fits


def test_what_does_not_fit_alone_is_told() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        in_parts_that_fit(never, [1, 2, 3])
    with pytest.raises(ZeroDivisionError):
        in_parts_that_fit(lambda things: [1 // 0], [1, 2])


def never(*_: Any) -> Any:
    raise torch.OutOfMemoryError(TOLD)


@pytest.mark.slow
def test_a_sample_that_does_not_fit_whole_is_decoded_in_tiles(
    flux_tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    latents = torch.randn(1, 16, 96, 72, generator=torch.Generator().manual_seed(0))  # 768 x 576 px
    vae, planned = (load_vae(flux_tiny / "vae", torch.device("cpu")) for _ in range(2))
    decode_in_tiles(planned)
    inside = vae.decoder.forward

    def short(sample: torch.Tensor, *more: Any) -> Any:
        if sample.shape[-1] * sample.shape[-2] > 64 * 64:
            raise torch.OutOfMemoryError(TOLD)
        return inside(sample, *more)

    monkeypatch.setattr(vae.decoder, "forward", short)
    with torch.inference_mode():
        first, second = (decode_patiently(vae, latents) for _ in range(2))
        expected = planned.decode(latents, return_dict=False)[0]
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "out of GPU memory while decoding a sample"
    ]
    monkeypatch.setattr(vae.decoder, "forward", never)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        decode_patiently(vae, latents)
