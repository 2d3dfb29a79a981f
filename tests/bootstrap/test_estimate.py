"""The estimates against what was measured on an H200 with FLUX.1-dev (the figures stand in estimate.py)."""

from __future__ import annotations

import pytest

from bootstrap.estimate import (
    Arrangement,
    Work,
    adapter_layers,
    decimal,
    in_time,
    memory_per_gpu,
    optimizer_bytes,
    seconds_per_step,
    stored_in_8bit,
    work_of,
)
from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import GIB, find_gpu
from jobs.load import parse_job

DEV = FluxShape()
TENSORS = list(DEV.tensors().values())


def way(**changes: object) -> Arrangement:
    known: dict[str, object] = {
        "processes": 1,
        "images_per_pass": 1,
        "passes": 1,
        "sharded": False,
        "reshard": False,
        "checkpointed": DEV.blocks,
        "compiled": True,
        "in_backward": True,
        "states_on_host": 0,
        "streamed": 0,
    }
    return Arrangement(**(known | changes))  # type: ignore[arg-type]


def work(method: str = "full", side: int = 1024, extra: str = "") -> Work:
    job = parse_job(f"name: a\nbase: b/c\nmethod: {method}\ndatasets: [{{path: d}}]\n{extra}").job
    return work_of(job, DEV, [(side, side, 1.0)])


@pytest.mark.parametrize(("checkpointed", "measured"), [(DEV.blocks, 24.7), (0, 50.3)])
def test_memory_as_measured(checkpointed: int, measured: float) -> None:
    memory = memory_per_gpu(work(), way(checkpointed=checkpointed))
    inside_torch = memory.weights + memory.gradients + memory.activations  # SGD: no states, no 32-bit copies
    assert inside_torch / GIB == pytest.approx(measured, rel=0.01)


def test_time_as_measured() -> None:
    """Whole steps on one H200: bench/NOTES.md, 2026-11-30."""
    h200 = find_gpu("H200")
    assert h200
    plain = way(checkpointed=0)
    paged = way(states_on_host=DEV.blocks, images_per_pass=8)
    measured = (
        (0.479, seconds_per_step(work(), plain, h200, 1)),
        (0.389, seconds_per_step(work("lora"), plain, h200, 1)),
        (1.347, seconds_per_step(work(side=512, extra="optimizer: PagedAdamW8bit\n"), paged, h200, 8)),
    )
    for seconds, estimated in measured:
        assert estimated == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "gib"),
    [
        ("AdamW", 88.7),
        ("AdamW8bit", 22.5),
        ("PagedAdamW8bit", 22.5),
        ("PagedAdamW32bit", 88.7),
        ("Lion8bit", 11.3),
        ("Adafactor", 0.03),
        ("transformers.optimization.Adafactor", 0.03),
        ("Prodigy", 177.3),
        ("some.module.Class", 88.7),
    ],
)
def test_optimizer_states(optimizer: str, gib: float) -> None:
    assert optimizer_bytes(optimizer, TENSORS, {}) / GIB == pytest.approx(gib, abs=0.06)


def test_prodigy_can_keep_less() -> None:
    assert optimizer_bytes("Prodigy", [(10, 10)], {"slice_p": 4}) == 100 * 10


def test_the_8bit_rule_looks_at_whole_rows() -> None:
    assert stored_in_8bit((64, 3072))
    assert not stored_in_8bit((3072, 64))
    assert not stored_in_8bit((3072,))


def test_sharding_divides_and_gathers() -> None:
    one, four = memory_per_gpu(work(), way()), memory_per_gpu(work(), way(processes=4, sharded=True, reshard=True))
    assert four.weights < one.weights / 2
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=0.01)
    assert four.outside > one.outside
    whole = memory_per_gpu(work(), way(processes=4, sharded=True, reshard=False))
    assert whole.weights > one.weights


def test_kept_gradients_cost_their_full_size() -> None:
    gradients = [memory_per_gpu(work(), each).gradients for each in (way(), way(in_backward=False), way(passes=2))]
    assert (gradients[1] - gradients[0]) / GIB == pytest.approx(22.2, abs=0.1)
    assert gradients[1] == gradients[2]


def test_states_on_the_host_leave_the_device() -> None:
    on_host = memory_per_gpu(work(), way(states_on_host=DEV.blocks)).optimizer
    assert (memory_per_gpu(work(), way()).optimizer - on_host) / GIB == pytest.approx(20.6, abs=0.2)


def test_a_sample_needs_room_too() -> None:
    drawing = work("lora", 256, "sample: {prompts: [x], width: 2048, height: 2048}\n")
    assert memory_per_gpu(drawing, way()).peak > memory_per_gpu(work("lora", 256), way()).peak


def test_the_largest_sample_counts() -> None:
    small = work(extra="sample: {prompts: [x]}\n")
    mixed = work(extra="sample: {prompts: [x, y --width 2048 --height 1536 --steps 48]}\n")
    assert (small.sample_pixels, mixed.sample_pixels) == (1024**2, 2048 * 1536)
    assert mixed.sample_flops > 5 * small.sample_flops


@pytest.mark.parametrize(("extra", "gib"), [("", 0), ("ema: {}\n", 44.3), ("ema: {dtype: bf16}\n", 22.2)])
def test_the_average_of_the_weights(extra: str, gib: float) -> None:
    averaged = work(extra=extra)
    assert averaged.ema / GIB == pytest.approx(gib, abs=0.1)
    assert averaged.state == work().state + averaged.ema
    here, away = (memory_per_gpu(averaged, way(ema_on_host=host)).average for host in (False, True))
    assert here >= averaged.ema
    assert away <= 0.15 * here


def test_traffic_without_nvlink_takes_over() -> None:
    h100, l40s = find_gpu("H100"), find_gpu("L40S")
    assert h100
    assert l40s
    small = work(side=512)
    sharded = way(processes=4, sharded=True, reshard=True)
    assert seconds_per_step(small, sharded, h100, 1) < seconds_per_step(small, way(), h100, 4) / 2
    assert seconds_per_step(small, sharded, l40s, 1) > 0.9 * 3 * 2 * DEV.parameters() * 0.75 / 22e9


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("attention", 19 * 8 + 38 * 3),
        ("attention+feed-forward", 19 * 12 + 38 * 5),
        ("all-linear", sum(len(shape) == 2 for shape in TENSORS)),
        (("transformer_blocks.0.attn.*",), 8),
        (("single_transformer_blocks.*.proj_out",), 38),
        (("nothing",), 0),
    ],
)
def test_adapter_layers(targets: str | tuple[str, ...], layers: int) -> None:
    assert len(adapter_layers(DEV, targets)) == layers


def test_adapter_size() -> None:
    lora = work("lora")
    assert lora.trained == 16 * sum(out + size for out, size in adapter_layers(DEV, "attention+feed-forward").values())
    assert lora.weights_file > 4 * lora.trained  # fused parts have zeros off the diagonal
    assert lora.optimizer == 8 * lora.trained


def test_words() -> None:
    assert [in_time(seconds) for seconds in (5, 120, 7200)] == ["5 s", "2 min", "2.0 h"]
    assert [decimal(size) for size in (2_000, 3.5e6, 23.8e9)] == ["2 kB", "3.5 MB", "23.8 GB"]
