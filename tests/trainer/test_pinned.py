"""One slab for all optimizer states, with the driver's answer played by the test: there is no GPU here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer import pinned
from trainer.pinned import ALIGNMENT, move_to_host

SIZES = {
    "a": {"state1": torch.empty(3, 256, dtype=torch.uint8), "state1.absmax": torch.empty(3, 1)},
    "b": {"state1": torch.empty(5, device="meta"), "empty": torch.empty(0, 7)},
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Address and bytes of what the driver was asked to pin."""
    asked: list[tuple[int, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        asked.append((address, size))
        return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    return asked


def test_states_are_zeros_of_their_shapes_in_one_slab(registered: list[tuple[int, int]]) -> None:
    states = move_to_host(SIZES)
    ((address, size),) = registered
    assert size == 1024 + 512 + 512, "of 768, 12 and 20 bytes, and none of an empty one"
    for name, group in SIZES.items():
        for key, like in group.items():
            state = states[name][key]
            assert (state.shape, state.dtype, state.device.type) == (like.shape, like.dtype, "cpu")
            assert not state.any()
            assert state.numel() == 0 or address <= state.data_ptr() <= address + size - state.nbytes
            assert state.data_ptr() % 4 == 0


def test_no_state_lies_in_another(registered: list[tuple[int, int]]) -> None:
    states = [state for group in move_to_host(SIZES).values() for state in group.values()]
    for number, state in enumerate(states, start=1):
        state.fill_(number)
    for number, state in enumerate(states, start=1):
        assert (state == number).all()


def test_a_host_that_cannot_pin_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with pytest.raises(MemoryError, match=r"cannot pin 0\.0 GiB .*error 2"):
        move_to_host(SIZES)


def test_nothing_is_wasted_between_states() -> None:
    assert pinned._aligned(torch.empty(ALIGNMENT, dtype=torch.uint8)) == ALIGNMENT
    assert pinned._aligned(torch.empty(ALIGNMENT + 1, dtype=torch.uint8)) == 2 * ALIGNMENT
