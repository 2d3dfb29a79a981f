"""Small updates arrive, on any number of GPUs the same ones, and what is exact or broken stays so."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.rounding import CACHED, round_stochastically

NAME = "transformer_blocks.0.attn.to_q.weight"


def rounded(source: torch.Tensor, *, name: str = NAME, seed: int = 42, step: int = 0, first: int = 0) -> torch.Tensor:
    return round_stochastically(source, name, seed=seed, step=step, first=first)


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 numbers next to a float32, towards zero and away from it."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    down, up = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    return struct.unpack("<f", struct.pack("<I", down))[0], struct.unpack("<f", struct.pack("<I", up & 0xFFFFFFFF))[0]


def test_a_small_update_arrives() -> None:
    """P31: bf16 1.0 minus 1e-3 a thousand times stays 1.0 by rounding to nearest."""
    nearest = torch.ones(1000, dtype=torch.bfloat16)
    weight = nearest.clone()
    for step in range(1000):
        nearest = (nearest.float() - 1e-3).bfloat16()
        weight = rounded(weight.float() - 1e-3, step=step)
    assert (nearest == 1).all()
    assert weight.float().mean().item() == pytest.approx(0, abs=0.005)


@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_a_value_lands_on_one_of_its_neighbours_in_the_mean_on_itself(value: float) -> None:
    count = 20_000
    result = rounded(torch.full((count,), value)).double()
    down, up = neighbours(value)
    assert set(result.tolist()) <= {down, up}
    spread = abs(up - down) / 2 / math.sqrt(count)
    assert abs(result.mean().item() - value) <= 5 * spread + abs(up - down) * 2**-16


@pytest.mark.parametrize("share", [1 / 256, 0.1, 0.5, 0.9])
def test_the_probability_is_the_remainder(share: float) -> None:
    value = 1 + share * 2**-7  # bf16 has 1 and 1 + 2**-7
    up = (rounded(torch.full((100_000,), value)) > 1).double().mean().item()
    assert up == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / 100_000))


def test_values_that_bf16_has_stay() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    result = rounded(every.float())
    finite = every.isfinite()
    assert torch.equal(result[finite].view(torch.int16), every[finite].view(torch.int16)), "minus zero too"


def test_infinities_and_nan_stay() -> None:
    for step in range(20):
        result = rounded(torch.tensor([math.inf, -math.inf] * 100), step=step)
        assert torch.equal(result.float(), torch.tensor([math.inf, -math.inf] * 100))
    # Every kind of NaN, CUDA's own (0x7fffffff) first: with a carry it would become minus zero.
    kinds = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert rounded(kinds.repeat(1000)).isnan().all()


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 7))
def test_the_shards_of_a_tensor_round_as_the_whole(processes: int, rows: int, columns: int) -> None:
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    shards = [
        rounded(shard.contiguous(), first=sum(s.shape[0] for s in whole.chunk(processes)[:i]) * columns)
        for i, shard in enumerate(whole.chunk(processes))
    ]
    assert torch.equal(torch.cat(shards), rounded(whole))


def test_what_a_cpu_takes_in_parts_rounds_as_its_shards_do() -> None:
    whole = torch.randn(3, CACHED + 77, generator=torch.Generator().manual_seed(2))
    rows = [rounded(row, first=i * len(row)) for i, row in enumerate(whole)]  # other parts than the whole's
    assert torch.equal(torch.stack(rows), rounded(whole))


def test_no_rows_at_all() -> None:
    assert rounded(torch.empty(0, 7), first=70).shape == (0, 7)


def test_another_seed_step_or_name_rounds_otherwise() -> None:
    halves = torch.full((4096,), 1 + 2**-8)
    results = [rounded(halves), rounded(halves, seed=43), rounded(halves, step=1), rounded(halves, name=NAME + "x")]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert (one == other).double().mean().item() == pytest.approx(0.5, abs=0.05)


def test_neighbouring_elements_round_independently() -> None:
    up = (rounded(torch.full((2**16,), 1 + 2**-8)) > 1).double() - 0.5
    for distance in (1, 2, 3, 4, 64, 256, 3072):
        assert abs((up[distance:] * up[:-distance]).mean().item()) < 0.25 * 5 / 2**8


def test_the_bits_are_the_same_for_all_time() -> None:
    result = rounded(torch.full((32,), 1 + 2**-8), step=3, first=5) > 1
    assert "".join("1" if bit else "0" for bit in result.tolist()) == GOLDEN


GOLDEN = "11010100010010110010000010100011"
