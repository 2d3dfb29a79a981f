"""Slabs of host memory, with the driver's answer played by the test: there is no GPU here."""

from __future__ import annotations

import pytest
import torch

from trainer.pinned import ALIGNMENT, aligned_bytes, pinned_slab, unpin


class Driver:
    """What was asked to be pinned and still is, by address."""

    def __init__(self, answer: int = 0):
        self.answer = answer
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - the driver's name
        self.pinned[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_a_slab_is_zeros_and_pinned_until_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    slab = pinned_slab(12345)
    assert slab.shape == (12345,)
    assert not slab.any()
    assert driver.pinned == {slab.data_ptr(): 12345}
    unpin(slab)
    assert not driver.pinned


def test_a_host_that_has_not_as_much_is_told_with_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(answer=2))
    with pytest.raises(MemoryError, match=r"the host cannot pin 0\.5 GiB for what lies on the host \(CUDA error 2\)"):
        pinned_slab(1 << 29)


@pytest.mark.parametrize(("shape", "dtype", "size"), [((3, 256), torch.uint8, 1024), ((5,), torch.float32, 512)])
def test_tensors_begin_at_whole_alignments(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
    assert aligned_bytes(torch.empty(shape, dtype=dtype, device="meta")) == size
    assert size % ALIGNMENT == 0


def test_an_empty_tensor_takes_nothing() -> None:
    assert aligned_bytes(torch.empty(0, 7)) == 0
