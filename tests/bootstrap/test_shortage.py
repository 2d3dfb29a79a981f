"""A plan that ran out of GPU memory, and the plans after it. Pods and cards are made up; nothing is measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bootstrap.bases import FLUX_TINY
from bootstrap.gpus import GIB
from bootstrap.outcome import PodError
from bootstrap.plan import DataSummary, Plan, make_plan, ways_out_of
from bootstrap.pod import Pod
from bootstrap.shortage import FailedPlan, Shortage, read_failed, room_after, write_failed
from jobs.schema import Job
from tests.bootstrap.test_plan import DEV, LARGE, job, pod, reason

OUTSIDE = int(1.3 * GIB)
ONE = "images_per_step: 1\nresolution: 1024\n"
FOUR = "images_per_step: 4\nresolution: 1024\n"


def shortage(plan: Plan, lacked: float = 0.5) -> Shortage:
    """What the trainer sees where a plan needs so many GiB more than estimated."""
    held = plan.memory_per_gpu + int(lacked * GIB) - GIB - OUTSIDE
    return Shortage("step 3", 0, GIB, held, GIB // 2, OUTSIDE, 45 * GIB)


def plans(asked: Job, here: Pod, count: int, lacked: float = 0.5) -> list[Plan]:
    """One after the other, each after the one before it has failed."""
    failed: list[FailedPlan] = []
    found: list[Plan] = []
    for _ in range(count):
        found.append(make_plan(asked, here, DEV, LARGE, failed))
        failed.append(found[-1].that_failed(shortage(found[-1], lacked)))
    return found


@pytest.mark.parametrize(
    ("asked", "card"), [(job(extra=ONE), "A40"), (job(extra=FOUR), "A100 80GB"), (job("lora", FOUR), "A40")]
)
def test_each_plan_needs_less_and_gives_the_same_numbers(asked: Job, card: str) -> None:
    found = plans(asked, pod(card), 4)
    for before, after in pairwise(found):
        held = before.memory_per_gpu - OUTSIDE
        assert after.memory_per_gpu <= before.memory_per_gpu - 0.05 * held
        same = ("processes", "split", "compile", "optimizer_in_backward", "base_precision", "steps", "setting")
        assert all(getattr(after, name) == getattr(before, name) for name in same)
    assert "retry" not in {choice.name for choice in found[0].choices}
    assert "plan 4: the one before was estimated at" in reason(found[3], "retry")


def test_what_was_lacking_is_left_twice() -> None:
    first, second = plans(job(extra=FOUR), pod("A100 80GB"), 2, lacked=6)
    assert second.memory_per_gpu <= first.memory_per_gpu - 6 * GIB


def test_room_is_what_the_worst_of_all_leaves() -> None:
    small, large = (FailedPlan("", planned * GIB, planned * GIB, "bf16", "") for planned in (30, 40))
    assert room_after(44 * GIB, []) == 44 * GIB
    assert room_after(44 * GIB, [small, large]) == room_after(44 * GIB, [small]) < 30 * GIB
    lacking = replace(large, needed=47 * GIB)
    assert room_after(44 * GIB, [lacking]) == 33 * GIB


def test_a_base_keeps_its_format_where_another_would_fit() -> None:
    asked = job("lora", "resolution: 1024\nimages_per_step: 1\n")
    first = make_plan(asked, pod("RTX 4090"), DEV, LARGE)
    assert first.base_precision == "int8"
    lost = replace(shortage(first), held=30 * GIB)
    with pytest.raises(PodError, match=r"No plan is left .* plan: \{base_precision: nf4\} \(\d+\.\d GiB, \d\.\d\d s a"):
        make_plan(asked, pod("RTX 4090"), DEV, LARGE, [first.that_failed(lost)])


def test_what_was_learned_holds_for_this_job_on_these_cards_alone() -> None:
    asked = job(extra=ONE)
    failed = [plans(asked, pod("A40"), 1)[0].that_failed(shortage(plans(asked, pod("A40"), 1)[0]))]
    for other, card in (
        (job(extra=ONE + "plan: {images_per_pass: 1}\n"), "A40"),
        (job(extra=ONE + "optimizer: Lion8bit\n"), "A40"),
        (job(extra=FOUR), "A40"),
        (job(extra=ONE + "plan: {retry: false}\n"), "A40"),
        (asked, "L40S"),
    ):
        assert make_plan(other, pod(card), DEV, LARGE, failed) == make_plan(other, pod(card), DEV, LARGE)
    more_pictures = replace(LARGE, images=300, items_per_epoch=300, buckets=((1024, 1024, 200), (960, 1024, 100)))
    slower = make_plan(job(extra=ONE + "learning_rate: 1e-6\n"), pod("A40"), DEV, more_pictures, failed)
    assert reason(slower, "retry").startswith("plan 2: ")


def test_an_override_is_never_overruled() -> None:
    asked = job(extra=ONE + "plan: {checkpointing: false, optimizer_states: device}\n")
    first = make_plan(asked, pod("A100 80GB"), DEV, LARGE)
    told = r"out of GPU memory: in step 3 process 0 held .* No plan is left .* no plan\.checkpointing"
    with pytest.raises(PodError, match=told):
        make_plan(asked, pod("A100 80GB"), DEV, LARGE, [first.that_failed(shortage(first))])


# ---------------------------------------------------------------- the ways out


def told(asked: Job, here: Pod) -> str:
    plan = make_plan(asked, here, DEV, LARGE)
    return ways_out_of(plan, asked, here, DEV, LARGE, plan.that_failed(shortage(plan)))


def test_three_ways_out_with_their_need_and_their_price() -> None:
    ways = told(job(extra=FOUR), pod("A100 80GB"))
    assert ways.startswith("Ways out, the one that changes least first: plan: {")
    assert ways.count("; or ") == 2
    assert ways.count(" s a step)") == 3
    assert "plan: {optimizer_states: host}" in ways
    assert "plan: {checkpointing: true}" in ways
    assert "plan: {images_per_pass: " in ways


def test_a_job_that_wants_no_retry_is_told_of_it_first_or_of_what_is_as_fast() -> None:
    assert "plan: {retry: true} (" in told(job(extra=ONE + "plan: {retry: false}\n"), pod("A40"))


def test_where_all_is_done_already_the_job_must_change() -> None:
    streamed = "plan: {checkpointing: true, optimizer_states: host}\n"
    asked = job(extra="optimizer: AdamW\nmax_grad_norm: 1.0\n" + FOUR + "plan: {checkpointing: true}\n")
    ways = told(asked, pod("H200", memory=200 * GIB))
    assert "no max_grad_norm" in ways
    assert "optimizer: AdamW8bit" in ways
    assert "resolution" in told(job(extra=ONE + streamed), pod("RTX 4090", memory=40 * GIB))


def test_what_keeps_the_numbers_keeps_the_base() -> None:
    """Checkpointing all blocks would do with a base in int8: that is another change, told as such."""
    asked = job("lora", "images_per_step: 1\nresolution: 1024\n")
    plan = make_plan(asked, pod("RTX 5090"), DEV, LARGE)
    lost = replace(plan.that_failed(shortage(plan)), needed=plan.memory_per_gpu + 8 * GIB)
    ways = ways_out_of(plan, asked, pod("RTX 5090"), DEV, LARGE, lost)
    assert ways.startswith("Ways out, the one that changes least first: plan: {base_precision: int8} (")
    assert "checkpointing" not in ways


def test_an_average_can_go() -> None:
    asked = job(extra="ema: {decay: 0.99}\nimages_per_step: 1\nresolution: 1024\nplan: {checkpointing: true}\n")
    assert "no ema (" in told(asked, pod("H200", memory=40 * GIB))


def test_an_unknown_card_has_no_speed() -> None:
    here = pod("A40")
    unknown = replace(here, gpus=(replace(here.gpus[0], name="NVIDIA Z9000"),))
    assert "s a step" not in told(job(extra=ONE), unknown)
    assert "GiB)" in told(job(extra=ONE), unknown)


def test_a_cpu_takes_the_next_way_too() -> None:
    data = DataSummary(10, 10, ((64, 64, 10),))
    asked = job(extra="images_per_step: 4\n")
    first = make_plan(asked, pod(), FLUX_TINY, data)
    failed = [first.that_failed(Shortage("step 3", 0, 0, 0, 0, 0, 0))]
    second = make_plan(asked, pod(), FLUX_TINY, data, failed)
    assert (first.checkpointed_blocks, second.checkpointed_blocks) == (0, 5)
    assert ways_out_of(second, asked, pod(), FLUX_TINY, data, failed[0]) == ""
    failed += [second.that_failed(Shortage("step 3", 0, 0, 0, 0, 0, 0))]
    third = make_plan(asked, pod(), FLUX_TINY, data, failed)
    assert third.memory_per_gpu < second.memory_per_gpu
    failed += [replace(failed[0], planned=1)]
    with pytest.raises(PodError, match="No plan needs less"):
        make_plan(asked, pod(), FLUX_TINY, data, failed)


# ---------------------------------------------------------------- the record


def test_the_record_comes_back(tmp_path: Path) -> None:
    failed = (FailedPlan("a", 1, 2, "bf16", "told"), FailedPlan("b", 3, 4, "nf4", "told again"))
    write_failed(tmp_path / "memory.json", failed)
    assert read_failed(tmp_path / "memory.json") == failed


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"failed": 1}', '{"failed": [{"setting": "a"}]}'])
def test_a_record_that_cannot_be_read_is_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "memory.json").write_text(content)
    assert read_failed(tmp_path / "memory.json") == ()


def test_a_shortage_is_told_with_figures_and_neighbours() -> None:
    seen = Shortage("step 12", 1, 2 * GIB, 40 * GIB, GIB, 2 * GIB, 45 * GIB)
    assert str(seen) == (
        "in step 12 process 1 held 40.0 GiB and asked for 2.0 GiB more; 2.0 GiB of the GPU's 45.0 GiB were in use "
        "beside torch, 1.0 GiB lay in pieces too small"
    )
    crowded = replace(seen, outside=9 * GIB)
    assert str(crowded).endswith("Other programs seem to hold about 6.0 GiB of this GPU: end them")
