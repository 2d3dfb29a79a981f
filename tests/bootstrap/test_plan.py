from __future__ import annotations

from dataclasses import replace

import pytest

from bootstrap.bases import FLUX_TINY
from bootstrap.estimate import USABLE
from bootstrap.flux_shape import FluxShape
from bootstrap.gpus import GIB, find_gpu
from bootstrap.outcome import PodError
from bootstrap.plan import DataSummary, Plan, make_plan, predict
from bootstrap.pod import Gpu, Pod
from bootstrap.ways import split_images
from jobs.load import parse_job
from jobs.problem import JobError
from jobs.schema import Job

DEV = FluxShape()
LARGE = DataSummary(images=200, items_per_epoch=200, buckets=((1024, 1024, 200),))
DATA = DataSummary(images=200, items_per_epoch=200, buckets=((512, 512, 152), (448, 576, 48)))


def job(method: str = "full", extra: str = "") -> Job:
    return parse_job(
        f"name: a\nbase: black-forest-labs/FLUX.1-dev\nmethod: {method}\ndatasets: [{{path: d}}]\n{extra}"
    ).job


def pod(*names: str, **changes: object) -> Pod:
    gpus = []
    for index, name in enumerate(names):
        model = find_gpu(name)
        assert model
        gpus.append(Gpu(index, name, model.bytes, capability=model.capability))
    count = max(1, len(gpus))
    known = Pod(tuple(gpus), cpus=8 * count, memory=64 * GIB * count, shm=GIB * count, disk_free=10**13)
    return replace(known, **changes)  # type: ignore[arg-type]


def reason(plan: Plan, name: str) -> str:
    return next(f"{choice.value}: {choice.reason}" for choice in plan.choices if choice.name == name)


# ---------------------------------------------------------------- what fits where


@pytest.mark.parametrize(
    ("gpu", "count", "method", "fits"),
    [
        ("RTX 4090", 1, "full", True),  # weights and states streamed from the host
        ("RTX 4090", 2, "full", True),  # sharded: 11 GiB of weights each
        ("RTX 3080", 1, "lora", True),  # the base quantised, here and on the next three
        ("RTX 4070 Ti", 1, "lora", True),
        ("RTX 4080", 1, "lora", True),
        ("RTX 4090", 4, "lora", True),
        ("RTX 5090", 1, "lora", True),
        ("A40", 1, "full", True),
        ("A40", 1, "lora", True),
        ("A40", 2, "full", True),
        ("L40S", 1, "full", True),
        ("A100 40GB", 1, "full", True),
        ("A100 80GB", 1, "full", True),
        ("A100 80GB", 2, "full", True),
        ("A100 80GB", 3, "full", True),
        ("H100", 8, "full", True),
        ("H100", 8, "lora", True),
        ("H200", 1, "full", True),
    ],
)
def test_fits(gpu: str, count: int, method: str, fits: bool) -> None:
    here = pod(*[gpu] * count)
    if not fits:
        with pytest.raises(PodError, match=r"needs at least .* GiB on each GPU .* Choose a GPU of \d+ GB or more"):
            make_plan(job(method), here, DEV, DATA)
        return
    plan = make_plan(job(method), here, DEV, DATA)
    assert plan.device == "cuda"
    assert plan.memory_per_gpu <= here.gpus[0].memory * USABLE
    assert plan.processes == min(count, 4)
    assert plan.sharding == ("fsdp" if method == "full" and count > 1 else "none")
    assert sum(plan.split) == 4
    assert max(plan.split) <= plan.images_per_pass * plan.passes
    assert plan.compile
    assert plan.optimizer_in_backward == (method == "full")


@pytest.mark.parametrize(
    ("cards", "optimizer", "memory", "on_the_host"),
    [
        (["A40"] * 2, "AdamW8bit", 90, False),
        (["RTX 4090"] * 4, "AdamW8bit", 240, False),
        (["RTX 4090"] * 2, "Lion8bit", 64, True),
        (["RTX 4090"] * 2, "AdamW8bit", 120, True),
    ],
)
def test_cards_that_are_small_train_all_weights_at_1024_px_together(
    cards: list[str], optimizer: str, memory: int, on_the_host: bool
) -> None:
    here = pod(*cards, memory=memory * GIB)
    keys = f"images_per_step: {len(cards)}\nresolution: 1024\noptimizer: {optimizer}\n"
    plan = make_plan(job(extra=keys), here, DEV, LARGE)
    assert plan.memory_per_gpu <= here.gpus[0].memory * USABLE
    assert plan.processes == len(cards)
    assert (plan.host_state_blocks > 0) == on_the_host
    assert plan.streamed_blocks == 0


@pytest.mark.parametrize("images", [1, 2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_any_number_of_gpus(images: int, count: int) -> None:
    plan = make_plan(job(extra=f"images_per_step: {images}\n"), pod(*["H100"] * count), DEV, DATA)
    assert plan.processes == min(count, images)
    assert sum(plan.split) == images
    assert max(plan.split) - min(plan.split) <= 1
    assert min(plan.split) >= 1
    assert len(plan.gpus) == plan.processes
    assert plan.steps_per_epoch == sum(-(-items // images) for _, _, items in DATA.buckets)  # on any number of GPUs


def test_split() -> None:
    assert split_images(4, 3) == (2, 1, 1)
    assert split_images(8, 8) == (1,) * 8


def test_an_uneven_split_is_explained() -> None:
    plan = make_plan(job(), pod("H100", "H100", "H100"), DEV, DATA)
    assert reason(plan, "images") == ("2+1+1: 4 images on 3 GPUs: 67% efficient; 3 or 6 images would fill them")


def test_more_gpus_than_images() -> None:
    plan = make_plan(job(extra="images_per_step: 2\n"), pod(*["H100"] * 4), DEV, DATA)
    assert plan.gpus == (0, 1)
    assert "idle: GPU 2, 3" in reason(plan, "GPUs")


# ---------------------------------------------------------------- choices


def test_memory_decides_checkpointing_and_place_of_states() -> None:
    small, large = (make_plan(job(), pod(name), DEV, DATA) for name in ("A40", "H200"))
    assert small.checkpointing
    assert small.optimizer_states == "host"
    assert "needs" in reason(small, "checkpointing")
    assert "all on the device it needs" in reason(small, "optimizer")
    assert not large.checkpointing
    assert large.optimizer_states == "device"
    assert large.passes == 1


def test_a_small_card_takes_checkpointing_rather_than_accumulation() -> None:
    plan = make_plan(job(extra="images_per_step: 8\n"), pod("A40"), DEV, DATA)
    assert (plan.checkpointing, plan.passes, plan.images_per_pass) == (True, 1, 8)


LORA_1024 = "resolution: 1024\nimages_per_step: 1\n"
AT_1024 = DataSummary(images=200, items_per_epoch=200, buckets=((1024, 1024, 200),))


@pytest.mark.parametrize(
    ("gpu", "base"),
    [("RTX 4070 Ti", "nf4"), ("RTX 4080", "nf4"), ("RTX 4000 Ada", "int8"), ("RTX 4090", "int8"), ("RTX 5090", "bf16")],
)
def test_a_base_is_quantised_no_further_than_it_must_be(gpu: str, base: str) -> None:
    plan = make_plan(job("lora", LORA_1024), pod(gpu), DEV, AT_1024)
    assert plan.base_precision == base
    told = reason(plan, "base")
    assert told.startswith(f"{base}: ")
    assert ("bf16 needs 2" in told) == (base != "bf16")
    assert ("int8 needs 1" in told) == (base == "nf4")


def test_a_card_too_small_for_any_base_is_told_the_least() -> None:
    with pytest.raises(PodError, match=r"This LoRA needs at least 10\.\d GiB .* Choose a GPU of 11 GB or more"):
        make_plan(job("lora", LORA_1024), pod("RTX 3080"), DEV, AT_1024)


def test_the_base_can_be_told() -> None:
    wish = LORA_1024 + "plan: {{base_precision: {}}}\n"
    told = make_plan(job("lora", wish.format("fp8")), pod("H200"), DEV, AT_1024)
    assert told.base_precision == "fp8"
    assert "plan.base_precision says so; 11.2 GiB, off by 2.6%; bf16 fits too" in reason(told, "base")
    with pytest.raises(
        JobError, match=r"with base_precision the job needs .* Leave it out: the plan's own choice fits"
    ):
        make_plan(job("lora", wish.format("bf16")), pod("RTX 4080"), DEV, AT_1024)


def test_a_sample_is_decoded_in_tiles_where_it_does_not_fit_whole() -> None:
    drawing = LORA_1024 + "sample: {prompts: [x], width: 2048, height: 2048}\n"
    small, large = (make_plan(job("lora", drawing), pod(name), DEV, AT_1024) for name in ("RTX 4080", "A40"))
    assert (small.base_precision, small.tiled_decoding) == ("nf4", True)
    assert "decoded whole, a sample needs" in reason(small, "samples")
    assert not large.tiled_decoding


def test_paged_optimizers_live_on_the_host() -> None:
    full = make_plan(job(extra="optimizer: PagedAdamW8bit\n"), pod("H200"), DEV, DATA)
    assert full.optimizer_states == "host"
    lora = make_plan(job("lora", "optimizer: PagedAdamW8bit\n"), pod("H200"), DEV, DATA)
    assert lora.optimizer_states == "device"


def test_too_little_host_memory_is_said_with_figures() -> None:
    with pytest.raises(PodError, match=r"needs at least .* this pod needs \d+\.\d GiB of RAM; it has 4.0 GiB"):
        make_plan(job(), pod("A40", memory=4 * GIB), DEV, DATA)
    with pytest.raises(PodError, match="Choose a pod with more RAM, or optimizer: AdamW8bit"):
        make_plan(job(extra="optimizer: PagedAdamW32bit\n"), pod("H100"), DEV, DATA)


def test_states_sent_to_a_host_without_room() -> None:
    with pytest.raises(JobError, match=r"needs 25.4 GiB of RAM, more than there is"):
        make_plan(job(extra="plan: {optimizer_states: host}\n"), pod("H200", memory=16 * GIB), DEV, DATA)


@pytest.mark.parametrize(
    ("gpus", "on_host", "states"),
    [(["H200"], False, 0), (["A100 80GB"], True, 0), (["A100 80GB"] * 2, False, 0), (["L40S"], True, 57)],
)
def test_the_average_of_the_weights_goes_to_the_host_before_the_states(
    gpus: list[str], on_host: bool, states: int
) -> None:
    ram = {"memory": 128 * GIB}
    plan = make_plan(job(extra="ema: {}\n"), pod(*gpus, **ram), DEV, DATA)
    assert (plan.ema_on_host, plan.host_state_blocks >= states // 2) == (on_host, True)
    assert plan.memory_per_gpu <= USABLE * pod(*gpus).gpus[0].memory
    assert f"fp32, on {'host' if on_host else 'device'}: 47.6 GB; it follows the weights every 10 steps" in reason(
        plan, "average"
    )


def test_weights_lie_on_the_host_only_with_their_average() -> None:
    plan = make_plan(job(extra="ema: {}\n"), pod("RTX 4090", memory=256 * GIB), DEV, DATA)
    assert plan.streamed_blocks
    assert plan.ema_on_host


def test_an_average_that_does_not_fit_is_told_with_the_way_out() -> None:
    with pytest.raises(PodError, match=r"and the average's 44\.\d GiB on the host this pod needs 6\d\.\d GiB") as error:
        make_plan(job(extra="ema: {}\n"), pod("L40S", memory=46 * GIB), DEV, DATA)
    assert "no ema (" in str(error.value)


def test_prodigy_looks_at_the_whole_model() -> None:
    big = replace(pod("H200", "H200").gpus[0], memory=400 * GIB)
    plan = make_plan(
        job(extra="optimizer: Prodigy\n"), replace(pod("H200"), gpus=(big, replace(big, index=1))), DEV, DATA
    )
    assert plan.processes == 1
    assert not plan.optimizer_in_backward
    assert "runs on one GPU; idle: GPU 1" in reason(plan, "GPUs")
    with pytest.raises(PodError, match="optimizer: AdamW8bit"):
        make_plan(job(extra="optimizer: Prodigy\n"), pod("A40"), DEV, DATA)


def test_clipping_keeps_the_gradients() -> None:
    plan = make_plan(job(extra="max_grad_norm: 1.0\n"), pod("H200"), DEV, DATA)
    assert not plan.optimizer_in_backward
    assert "max_grad_norm 1 needs all gradients" in reason(plan, "update")
    with pytest.raises(PodError, match="no max_grad_norm"):
        make_plan(job(extra="max_grad_norm: 1.0\n"), pod("A40"), DEV, DATA)


def test_products_in_fp8_are_for_cards_that_have_it() -> None:
    asked = "plan: {products: fp8-rowwise}\n"
    for card in ("L40S", "H200", "RTX 5090"):
        plan = make_plan(job("lora", asked), pod(card), DEV, DATA)
        assert (plan.products, plan.base_precision) == ("fp8-rowwise", "bf16")
        assert reason(plan, "products").startswith("fp8-rowwise: plan.products says so")
    for card in ("A40", "A100 80GB", "RTX A6000"):
        with pytest.raises(PodError, match=rf"{card} has no fp8 arithmetic.*L40S or H100"):
            make_plan(job(extra=asked), pod(card), DEV, DATA)
        assert make_plan(job(), pod(card), DEV, DATA).products == "bf16"
    with pytest.raises(JobError, match=r"plan\.products: fp8-rowwise is for one process .* there are 2"):
        make_plan(job(extra=asked), pod("H200", "H200"), DEV, DATA)
    with pytest.raises(JobError, match=r"a base in int8 is taken back to bf16"):
        make_plan(job("lora", "plan: {products: fp8-rowwise, base_precision: int8}\n"), pod("H200"), DEV, DATA)


def test_gpus_asks_for_fewer() -> None:
    plan = make_plan(job("lora", "gpus: 2\n"), pod(*["H100"] * 4), DEV, DATA)
    assert plan.gpus == (0, 1)
    more = make_plan(job("lora", "gpus: 8\n"), pod("H100", "H100"), DEV, DATA)
    assert more.processes == 2


def test_mixed_gpus_use_the_fastest_and_name_the_slowest() -> None:
    mixed = pod("A40", "H100", "L40S")
    plan = make_plan(job("lora"), mixed, DEV, DATA)
    assert "slowest, A40" in reason(plan, "GPUs")
    two = make_plan(job("lora", "gpus: 2\n"), mixed, DEV, DATA)
    assert two.gpus == (1, 2)


def test_cards_without_bf16() -> None:
    with pytest.raises(PodError, match=r"V100 has no bf16"):
        make_plan(job("lora"), pod("V100"), DEV, DATA)
    plan = make_plan(job("lora"), pod("V100", "A40"), DEV, DATA)
    assert plan.gpus == (1,)
    assert any("V100" in warning and "idle" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("cuda", "driver", "good"),
    [
        ("13.0", "535.183.01", False),
        ("13.0", "570.10", False),
        ("13.0", "580.95", True),
        ("13.0", "", True),
        ("12.8", "535.183.01", True),
        ("12.8", "470.1", False),
        ("", "470.1", True),  # torch without CUDA says so by itself
        ("21.0", "470.1", True),  # not in the table: tried
    ],
)
def test_driver(cuda: str, driver: str, good: bool) -> None:
    here = pod("A40")
    here = replace(here, gpus=(replace(here.gpus[0], driver=driver),), cuda=cuda)
    if good:
        make_plan(job("lora"), here, DEV, DATA)
    else:
        with pytest.raises(PodError, match=rf"driver of this host is {driver}.* filter CUDA version {cuda} or newer"):
            make_plan(job("lora"), here, DEV, DATA)


def test_an_unknown_gpu_is_planned_without_a_forecast() -> None:
    here = replace(pod("A40"), gpus=(Gpu(0, "NVIDIA Z9000", 96 * GIB, capability=(14, 0)),))
    plan = make_plan(job(), here, DEV, DATA)
    assert reason(plan, "speed").startswith("not known")
    assert predict(plan, job(), here, DEV, DATA) is None


@pytest.mark.parametrize(
    ("gpus", "shm", "told"), [(1, 0, False), (2, 64 << 20, True), (2, 80 << 20, False), (8, 64 << 20, True)]
)
def test_small_shared_memory_is_told_where_gpus_would_talk_through_it(gpus: int, shm: int, told: bool) -> None:
    """Row P14."""
    plan = make_plan(job("full", "images_per_step: 8\n"), pod(*["A100 80GB"] * gpus, shm=shm), DEV, DATA)
    assert any("/dev/shm" in warning for warning in plan.warnings) == told


@pytest.mark.parametrize("shm", [0, 64 << 20])
def test_small_shared_memory_is_no_matter_for_loading(shm: int) -> None:
    """Row P14: images are prepared by threads, and a container's 64 MB of /dev/shm stay untouched."""
    assert make_plan(job("lora"), pod("A40", shm=shm), DEV, DATA).workers == 2


def test_loaders_and_threads_fit_the_cpus() -> None:
    plan = make_plan(job("lora"), pod("H100", "H100", cpus=2), DEV, DATA)
    assert (plan.workers, plan.threads) == (1, 1)


# ---------------------------------------------------------------- without a GPU


def test_a_real_model_waits_for_a_gpu() -> None:
    here = pod(notes=("nvidia-smi is not there",))
    with pytest.raises(PodError, match=r"no GPU: nvidia-smi is not there.*prepare"):
        make_plan(job(), here, DEV, DATA)


@pytest.mark.parametrize(("extra", "processes"), [("", 1), ("gpus: 2\n", 2), ("plan: {processes: 3}\n", 3)])
def test_flux_tiny_trains_on_a_cpu(extra: str, processes: int) -> None:
    plan = make_plan(job(extra=extra), pod(cpus=4), FLUX_TINY, DATA)
    assert plan.device == "cpu"
    assert plan.gpus == ()
    assert plan.processes == processes
    assert plan.threads == max(1, 4 // processes)
    assert plan.sharding == ("fsdp" if processes > 1 else "none")
    assert (plan.passes, plan.checkpointing, plan.compile) == (1, False, False)
    assert plan.optimizer_in_backward
    assert plan.optimizer_states == "device"


def test_prodigy_on_a_cpu_runs_in_one_process() -> None:
    plan = make_plan(job(extra="optimizer: Prodigy\ngpus: 2\n"), pod(), FLUX_TINY, DATA)
    assert (plan.processes, plan.split, plan.images_per_pass) == (1, (4,), 4)


# ---------------------------------------------------------------- overrides


def test_overrides_win() -> None:
    wish = (
        "plan: {processes: 2, checkpointing: true, compile: false, images_per_pass: 1, optimizer_in_backward: false}\n"
    )
    plan = make_plan(job(extra=wish), pod(*["H200"] * 4), DEV, DATA)
    assert (plan.processes, plan.checkpointing, plan.compile) == (2, True, False)
    assert (plan.images_per_pass, plan.passes, plan.optimizer_in_backward) == (1, 2, False)
    assert "plan.checkpointing says so" in reason(plan, "checkpointing")
    host = make_plan(job(extra="plan: {optimizer_states: host}\n"), pod("H200"), DEV, DATA)
    assert host.optimizer_states == "host"


@pytest.mark.parametrize(
    ("method", "extra", "key"),
    [
        ("full", "plan: {processes: 5}", "plan.processes"),
        ("full", "plan: {processes: 4}", "plan.processes"),
        ("full", "plan: {sharding: none}", "plan.sharding"),
        ("lora", "lora: {targets: ['*.attn.*', '*.conv.*']}", "lora.targets"),
        ("lora", "plan: {sharding: fsdp}", "plan.sharding"),
        ("lora", "plan: {optimizer_in_backward: true}", "plan.optimizer_in_backward"),
        ("lora", "plan: {optimizer_states: host}", "plan.optimizer_states"),
        ("full", "plan: {base_precision: nf4}", "plan.base_precision"),
        ("full", "optimizer: PagedAdamW8bit\nplan: {optimizer_states: device}", "plan.optimizer_states"),
        ("full", "optimizer: Prodigy\nplan: {optimizer_in_backward: true}", "plan.optimizer_in_backward"),
        ("full", "optimizer: Prodigy\nplan: {processes: 2}", "plan.processes"),
        (
            "full",
            "resolution: 1024\nimages_per_step: 16\nplan: {checkpointing: false, images_per_pass: 8}",
            "plan.checkpointing",
        ),
    ],
)
def test_overrides_that_cannot_be(method: str, extra: str, key: str) -> None:
    data = DataSummary(100, 100, ())
    with pytest.raises(JobError) as raised:
        make_plan(job(method, extra + "\n"), pod("H100", "H100"), DEV, data)
    assert key in raised.value.problems[0].key
    assert all(problem.remedy for problem in raised.value.problems)


def test_an_override_may_use_the_reserve() -> None:
    """With weights on the device: those that have room on the host would always fit."""
    here = pod("A40", memory=26 * GIB)
    plain = make_plan(job(extra="plan: {checkpointing: true, optimizer_states: host}\n"), here, DEV, DATA)
    assert not plain.streamed_blocks
    tight = replace(here, gpus=(replace(here.gpus[0], memory=int(plain.memory_per_gpu * 1.01)),))
    with pytest.raises(PodError):
        make_plan(job(), tight, DEV, DATA)
    plan = make_plan(job(extra="plan: {checkpointing: true, optimizer_states: host}\n"), tight, DEV, DATA)
    assert any("Leave it out if memory runs out" in warning for warning in plan.warnings)


# ---------------------------------------------------------------- length, disk, warnings


@pytest.mark.parametrize(
    ("method", "extra", "items", "steps", "per_epoch"),
    [
        ("full", "steps: 77\n", 63, 77, 16),
        ("full", "epochs: 25\n", 63, 400, 16),
        ("lora", "", 63, 1000, 16),
        ("full", "", 4, 1000, 1),
        ("full", "", 63, 1600, 16),
        ("full", "", 10_000, 4000, 2500),
    ],
)
def test_length(method: str, extra: str, items: int, steps: int, per_epoch: int) -> None:
    for count in (1, 2, 4):
        plan = make_plan(job(method, extra), pod(*["H100"] * count), DEV, DataSummary(items, items, ()))
        assert (plan.steps, plan.steps_per_epoch) == (steps, per_epoch)


def test_disk_holds_what_is_kept_and_what_is_being_written() -> None:
    weights, states = 2 * DEV.parameters(), 2.03 * DEV.parameters()
    plan = make_plan(job(extra="steps: 2000\n"), pod("H200"), DEV, DATA)  # keeps 2 weights, 1 state
    assert plan.state_bytes == pytest.approx(weights + states, rel=0.01)
    assert plan.disk_bytes == pytest.approx(3 * weights + 2 * states, rel=0.01)
    one = make_plan(job(extra="steps: 100\n"), pod("H200"), DEV, DATA)
    assert one.disk_bytes == one.state_bytes
    lora = make_plan(job("lora"), pod("H200"), DEV, DATA)
    assert lora.disk_bytes < 4e9
    averaged = make_plan(job(extra="steps: 2000\nema: {dtype: bf16}\n"), pod("H200"), DEV, DATA)
    assert averaged.disk_bytes == plan.disk_bytes + 2 * weights


def test_many_processes_and_little_memory_is_a_warning() -> None:
    plan = make_plan(job("lora"), pod(*["H100"] * 4, memory=8 * GIB), DEV, DATA)
    assert any("SIGKILL (-9)" in warning for warning in plan.warnings)


def test_a_handful_of_images_seen_hundreds_of_times() -> None:
    few = DataSummary(10, 10, ((512, 512, 10),))
    for method in ("full", "lora"):
        plan = make_plan(job(method), pod("H200"), DEV, few)
        assert any("each of the 10 images about 400 times" in warning for warning in plan.warnings)
    assert not make_plan(job(), pod("H200"), DEV, DATA).warnings


def test_few_images_on_many_gpus() -> None:
    here = pod(*["H100"] * 8)
    three = make_plan(job("lora", "images_per_step: 8\nsteps: 100\n"), here, DEV, DataSummary(3, 3, ((512, 512, 3),)))
    assert any("each step is the whole data set" in warning for warning in three.warnings)
    nine = make_plan(job("lora", "images_per_step: 8\nsteps: 100\n"), here, DEV, DataSummary(9, 9, ((512, 512, 9),)))
    assert any("the last step of every epoch has 1 for 8 processes" in warning for warning in nine.warnings)


def test_gpus_that_hardly_help_are_named() -> None:
    one = job(extra="images_per_step: 2\noptimizer: Adafactor\n")
    plan = make_plan(one, pod("H100 PCIe", "H100 PCIe"), DEV, DATA)
    assert any("eats the gain" in warning for warning in plan.warnings)


def test_a_full_run_never_mixes_sizes_in_a_step() -> None:
    """Between the passes of a mixed step 22 GiB of gradients would have to be kept; each size's rest is a step."""
    odd = DataSummary(200, 200, ((512, 512, 150), (448, 576, 49), (576, 448, 1)))
    for gpus in (pod("A40"), pod(*["A40"] * 4)):
        assert make_plan(job(), gpus, DEV, odd).steps_per_epoch == 38 + 13 + 1
        assert make_plan(job("lora"), gpus, DEV, odd).steps_per_epoch == 50


def test_a_busy_gpu_is_named() -> None:
    here = pod("H200")
    busy = replace(here, gpus=(replace(here.gpus[0], free=20 * GIB),))
    assert any("in use by something else" in warning for warning in make_plan(job(), busy, DEV, DATA).warnings)


def test_every_choice_has_a_reason() -> None:
    for here, base in ((pod("A40"), DEV), (pod("H100", "H100", "H100"), DEV), (pod(), FLUX_TINY)):
        for method in ("full", "lora"):
            plan = make_plan(job(method), here, base, DATA)
            assert all(choice.name and choice.value and choice.reason for choice in plan.choices)
            assert len({choice.name for choice in plan.choices}) == len(plan.choices)


def test_prediction() -> None:
    sampled = job(extra="sample: {prompts: [a, b]}\nsteps: 1000\n")
    here = pod("H100")
    found = predict(make_plan(sampled, here, DEV, DATA), sampled, here, DEV, DATA)
    assert found
    assert found.images_per_second == pytest.approx(4 / found.step)
    assert found.training == pytest.approx(1000 * found.step)
    assert found.drawing > 0
    assert found.total == found.training + found.drawing + found.saving


def test_without_p2p_the_traffic_is_slower() -> None:
    here = pod("H200", "H200")
    seconds = []
    for p2p in (True, False):
        plan = make_plan(job(), replace(here, p2p=p2p), DEV, DATA)
        assert plan.p2p is p2p
        forecast = predict(plan, job(), replace(here, p2p=p2p), DEV, DATA)
        assert forecast
        seconds.append(forecast.step)
    assert seconds[0] < seconds[1]


def test_who_holds_a_gpus_memory_is_named() -> None:
    busy = replace(pod("A40").gpus[0], free=10 << 30, processes=("python3 (process 42) with 34.0 GiB",))
    plan = make_plan(job("lora"), replace(pod("A40"), gpus=(busy,)), DEV, DATA)
    assert any("in use by python3 (process 42) with 34.0 GiB" in warning for warning in plan.warnings)


def test_24_gb_train_the_whole_model_with_weights_on_the_host() -> None:
    plan = make_plan(job(extra="images_per_step: 1\n"), pod("RTX 4090", memory=64 * GIB), DEV, DATA)
    assert plan.optimizer_states == "host"
    assert 0 < plan.streamed_blocks < DEV.blocks
    assert plan.checkpointed_blocks == DEV.blocks
    assert plan.memory_per_gpu <= 24 * GIB * USABLE
    assert "brought block by block; on the device needs" in reason(plan, "weights")


def test_no_more_blocks_are_checkpointed_than_must_be() -> None:
    plan = make_plan(job(extra="images_per_step: 1\nresolution: 1024\n"), pod("A40", memory=64 * GIB), DEV, LARGE)
    assert plan.optimizer_states == "host"
    assert 0 < plan.checkpointed_blocks < DEV.blocks


def test_a_step_of_several_passes_keeps_its_weights_on_the_gpu() -> None:
    """Gradients of all blocks would have to wait on the GPU for the last pass."""
    with pytest.raises(JobError, match="with images_per_pass the job needs"):
        make_plan(
            job(extra="images_per_step: 2\nplan: {images_per_pass: 1}\n"), pod("RTX 4090", memory=64 * GIB), DEV, DATA
        )
