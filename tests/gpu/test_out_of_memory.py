"""What a card says when its memory runs out, and that the process can go on with less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from bootstrap.gpus import GIB
from trainer.out_of_memory import in_parts_that_fit, is_out_of_memory, measure

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

ROOM = 4 * GIB


@pytest.fixture
def small_card() -> Iterator[None]:
    """Of which torch may have ROOM."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(ROOM / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def gibibytes(count: float) -> torch.Tensor:
    return torch.empty(int(count * GIB), dtype=torch.uint8, device="cuda")


def test_the_figures_are_the_cards(small_card: None) -> None:
    held = [gibibytes(1) for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        gibibytes(2)
    assert len(held) == 3
    assert is_out_of_memory(caught.value)
    seen = measure(caught.value, "step 1", 0)
    assert seen.asked == 2 * GIB
    assert seen.held == pytest.approx(3 * GIB, abs=GIB / 50)
    assert 0.1 * GIB < seen.outside < 3 * GIB
    assert seen.total == pytest.approx(ROOM + seen.outside, abs=GIB / 10), "what may be filled, not what there is"
    assert seen.needed == seen.held + seen.asked + seen.outside


def test_work_goes_on_in_parts(small_card: None) -> None:
    def work(things: Sequence[float]) -> list[float]:
        memory = gibibytes(sum(things))
        memory.fill_(1)
        return [float(thing) for thing in things]

    assert in_parts_that_fit(work, [1.5, 1.5, 1.5, 1.5]) == [1.5] * 4
