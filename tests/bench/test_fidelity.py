"""bench/fidelity.py on a FLUX of two blocks: what float32 masters would do arrives in bf16 weights. Row P31."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.fidelity import REFERENCE, TOLERANCE, Mode, Row, measure_rate, prepare, table
from bootstrap.bases import FLUX_TINY
from bootstrap.volume import Volume

SMALL = replace(FLUX_TINY, double_blocks=1, single_blocks=1)
FP8 = Mode("AdamW", "bf16", "fp8-rowwise")
RATE = 1e-5  # about half of it is lost where |w| is above 0.004, all of it above 0.008


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[Mode, Row]:
    run_file: Path = prepare(Volume(tmp_path_factory.mktemp("fidelity")), SMALL, 64, 1)
    masters = (REFERENCE, Mode("AdamW8bit", "fp32"))
    modes = (*masters, Mode("AdamW", "nearest"), Mode("AdamW", "bf16"), Mode("PagedAdamW8bit", "bf16"), FP8)
    return {
        Mode(row.optimizer, row.arithmetic, row.products): row for row in measure_rate(run_file, 16, 4, modes, RATE)
    }


@pytest.mark.parametrize("optimizer", ["AdamW", "PagedAdamW8bit"])
def test_stochastic_rounding_keeps_up_with_float32_masters(optimizer: str, rows: dict[Mode, Row]) -> None:
    row = rows[Mode(optimizer, "bf16")]
    assert row.progress == pytest.approx(1, abs=TOLERANCE)
    assert row.arrives
    assert row.length > 1, "what rounding adds at random"
    assert row.changed > 0.9, "P31: as many weights move"


def test_products_in_fp8_lead_about_the_same_way(rows: dict[Mode, Row]) -> None:
    assert 0.8 < rows[FP8].progress < 1.02
    assert rows[FP8].progress != rows[Mode("AdamW", "bf16")].progress


def test_round_to_nearest_stalls(rows: dict[Mode, Row]) -> None:
    row = rows[Mode("AdamW", "nearest")]
    assert row.progress < 0.3
    assert row.changed < 0.5
    assert row.loss_fall < 0.3


def test_a_reference_is_measured_by_itself(rows: dict[Mode, Row]) -> None:
    row = rows[REFERENCE]
    assert (row.progress, row.of_adamw, row.length, row.loss_fall, row.curve) == pytest.approx((1, 1, 1, 1, 0))


def test_the_table_marks_what_is_off(rows: dict[Mode, Row]) -> None:
    good = rows[REFERENCE]
    lines = table([good, replace(good, arithmetic="bf16", progress=0.97)]).splitlines()
    assert "off" not in lines[2]
    assert "| AdamW | bf16 **off** | bf16 | 0.970 |" in lines[3]


def test_each_optimizer_has_its_own_scale() -> None:
    assert Mode("AdamW8bit", "bf16").own_rate(1e-5) == 1e-5
    assert Mode("PagedLion8bit", "bf16").own_rate(1e-5) == pytest.approx(2e-6)
    assert Mode("Adafactor", "fp32").own_rate(1e-5) == pytest.approx(5e-4)
