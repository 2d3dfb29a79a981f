"""What each process computes on: the same pictures, noise and levels on any number of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.cache import ShardWriter
from bootstrap.dataset import Dataset, Item
from bootstrap.draws import Use, draw
from bootstrap.order import epoch_order
from bootstrap.plan import run_length
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume
from bootstrap.wanted import crops_of, latent_key, mask_key, text_key
from tests.runs import make_job, make_run
from trainer.data import Batch, Latents, StepData, TrainingData
from trainer.flow import image_ids, noise_level, pack

TOKENS, TEXT, POOLED = 6, 8, 4
LATENTS = Latents(shift=0.125, scale=0.25)
BUCKETS = [(64, 64), (64, 96), (64, 64), (96, 64), (64, 64), (64, 96), (64, 64)]
ITEMS = tuple(
    Item(f"{i}.png", str(i), f"picture {i}", 2 if i == 2 else 1, *bucket, bucket) for i, bucket in enumerate(BUCKETS)
)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Volume:
    """A cache that holds, of picture i, the mean i everywhere, and of its caption i everywhere."""
    volume = Volume(tmp_path_factory.mktemp("volume"))
    weights = make_run(volume.root).weights
    with ShardWriter(volume.cache) as writer:
        for i, item in enumerate(ITEMS):
            size = (16, item.bucket[1] // 8, item.bucket[0] // 8)
            latent = {
                "mean": torch.full(size, i, dtype=torch.float16),
                "spread": torch.full(size, 0.5, dtype=torch.float16),
            }
            (crop,) = crops_of(item, make_job().datasets[0])
            writer.add(latent_key(item, crop, weights), latent)
            writer.add(text_key(item.caption, weights, False), text(i))
        writer.add(text_key("", weights, False), text(-1))
    return volume


def text(number: int) -> dict[str, torch.Tensor]:
    return {
        "prompt_embeds": torch.full((TOKENS, TEXT), number, dtype=torch.bfloat16),
        "mask": torch.arange(TOKENS) <= abs(number) % TOKENS,
        "pooled": torch.full((POOLED,), number, dtype=torch.bfloat16),
    }


def make_run_of(
    volume: Volume,
    items: tuple[Item, ...] = ITEMS,
    processes: int = 1,
    images_per_pass: int = 4,
    workers: int = 1,
    **keys: Any,
) -> RunFile:
    job = make_job(**{"method": "lora", "images_per_step": 4, "caption_dropout": 0} | keys)
    steps = len(epoch_order(items, job.seed, 0, job.images_per_step, job.mixes_buckets))
    plan = {"processes": processes, "images_per_pass": images_per_pass, "workers": workers, "steps_per_epoch": steps}
    return make_run(volume.root, job, **plan)


def data_of(volume: Volume, rank: int = 0, **keys: Any) -> TrainingData:
    return TrainingData(make_run_of(volume, **keys), ITEMS, LATENTS, rank)


def images_of(batches: tuple[Batch, ...]) -> list[tuple[Any, ...]]:
    """Every image that weighs, as bytes, for comparing sets of them."""
    found = []
    for batch in batches:
        for i in range(len(batch.weights)):
            if batch.weights[i]:
                tensors = (
                    batch.noisy[i].float(),
                    batch.target[i],
                    batch.sigma[i],
                    batch.text[i].float(),
                    batch.image_ids,
                )
                found.append(tuple((tuple(t.shape), t.numpy().tobytes()) for t in tensors))
    return sorted(found)


def picture_of(batch: Batch, i: int) -> int:
    return int(batch.text[i, 0, 0])


# ---------------------------------------------------------------- one image


def test_an_image_by_the_formulas(volume: Volume) -> None:
    data = data_of(volume)
    image = data.example(step=5, place=2, item=ITEMS[3])
    size = (16, 8, 12)

    def normal(use: Use) -> torch.Tensor:
        return torch.from_numpy(draw(42, use, 5, 2).standard_normal(size, dtype="float32"))

    latent = (3 + 0.5 * normal(Use.LATENT) - 0.125) * 0.25
    noise = normal(Use.NOISE)
    sigma = noise_level(draw(42, Use.NOISE_LEVEL, 5, 2), "flux_shift", 4 * 6, discrete_flow_shift=3, sigmoid_scale=1)
    assert image["sigma"].item() == pytest.approx(sigma, rel=1e-7)
    assert image["sigma"].dtype == torch.float32
    assert torch.equal(image["target"], pack((noise - latent)[None])[0])
    noisy = pack(((1 - sigma) * latent + sigma * noise)[None])[0]
    assert torch.equal(image["noisy"], noisy.bfloat16())
    assert (image["text"] == 3).all()
    assert (image["pooled"] == 3).all()
    assert image["text_mask"].tolist() == [True] * 4 + [False] * 2


def test_an_image_is_a_function_of_step_and_place(volume: Volume) -> None:
    data = data_of(volume)

    def noise(step: int, place: int, item: Item) -> torch.Tensor:
        return data.example(step, place, item)["target"]

    assert torch.equal(noise(5, 2, ITEMS[0]), data_of(volume, processes=3, rank=1).example(5, 2, ITEMS[0])["target"])
    seen = [noise(5, 2, ITEMS[0]), noise(6, 2, ITEMS[0]), noise(5, 3, ITEMS[0])]
    seen.append(data_of(volume, seed=7).example(5, 2, ITEMS[0])["target"])
    assert len({tensor.numpy().tobytes() for tensor in seen}) == 4


def test_a_fresh_latent_is_drawn_each_time_it_is_seen(volume: Volume) -> None:
    """The clean latent is (noisy - sigma target) for any sigma; its spread over steps is the encoder's."""
    data = data_of(volume)
    clean = []
    for step in range(20):
        image = data.example(step, 0, ITEMS[1])
        clean.append(image["noisy"].float() - image["sigma"] * image["target"])
    values = torch.stack(clean)
    assert values.mean().item() == pytest.approx((1 - 0.125) * 0.25, abs=0.01)
    assert values.std(0).mean().item() == pytest.approx(0.5 * 0.25, rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_captions_are_dropped_by_their_share(share: float, volume: Volume) -> None:
    data = data_of(volume, caption_dropout=share)
    dropped = [bool((data.example(step, 0, ITEMS[3])["text"] == -1).all()) for step in range(300)]
    assert sum(dropped) / 300 == pytest.approx(share, abs=0.1 if 0 < share < 1 else 0)


def test_dropping_captions_shifts_no_other_number(volume: Volume) -> None:
    one, other = (data_of(volume, caption_dropout=share).example(5, 2, ITEMS[3]) for share in (0.0, 1.0))
    assert torch.equal(one["target"], other["target"])
    assert torch.equal(one["noisy"], other["noisy"])


# ---------------------------------------------------------------- a step


def test_a_step_of_one_process(volume: Volume) -> None:
    data = data_of(volume)
    step = next(i for i in range(2) if len({ITEMS[item].bucket for item in data.step(i)}) == 1)
    prepared = data.prepare(step)
    (batch,) = prepared.batches
    width, height = ITEMS[data.step(step)[0]].bucket
    tokens = width * height // 256
    assert prepared.images == 4
    assert batch.noisy.shape == batch.target.shape == (4, tokens, 64)
    assert (batch.noisy.dtype, batch.target.dtype) == (torch.bfloat16, torch.float32)
    assert (batch.text.shape, batch.pooled.shape) == ((4, TOKENS, TEXT), (4, POOLED))
    assert batch.text_mask.dtype == torch.bool
    assert torch.equal(batch.image_ids, image_ids(height // 8, width // 8))
    assert batch.weights.tolist() == [1, 1, 1, 1]
    assert [picture_of(batch, i) for i in range(4)] == list(data.step(step))


@settings(max_examples=25, deadline=None)
@given(processes=st.integers(1, 5), images_per_pass=st.integers(1, 5), step=st.integers(0, 5))
def test_the_images_of_a_step_are_the_same_however_they_are_shared_out(
    volume: Volume, processes: int, images_per_pass: int, step: int
) -> None:
    """And every process takes as many passes as the others: unequal ones hang a sharded model."""
    alone = data_of(volume).prepare(step)
    shares = [
        data_of(volume, rank, processes=processes, images_per_pass=images_per_pass).prepare(step)
        for rank in range(processes)
    ]
    assert images_of(tuple(b for share in shares for b in share.batches)) == images_of(alone.batches)
    assert {share.images for share in shares} == {len(data_of(volume).step(step))}
    assert len({len(share.batches) for share in shares}) == 1
    assert all(len(batch.weights) <= images_per_pass for share in shares for batch in share.batches)


def test_a_dummy_is_one_image_of_a_neighbours_that_weighs_nothing(volume: Volume) -> None:
    """Four images on seven processes."""
    shares = [data_of(volume, rank, processes=7).prepare(0) for rank in range(7)]
    dummies = [share.batches[0] for share in shares if not share.batches[0].weights.any()]
    assert len(dummies) == 3
    smallest = min(share.batches[0].noisy.shape[1] for share in shares)
    for dummy in dummies:
        assert dummy.weights.tolist() == [0]
        assert dummy.noisy.shape == (1, smallest, 64)
        assert dummy.noisy.isfinite().all(), "zero times NaN is NaN"


def test_images_weigh_what_their_dataset_says(volume: Volume) -> None:
    datasets = [{"path": "datasets/test"}, {"path": "datasets/regular", "weight": 0.25}]
    items = tuple(replace(item, dataset=i % 2) for i, item in enumerate(ITEMS))
    data = TrainingData(make_run_of(volume, items, datasets=datasets), items, LATENTS, 0)
    for step in range(2):
        for batch in data.prepare(step).batches:
            pictures = [picture_of(batch, i) for i in range(len(batch.weights))]
            assert batch.weights.tolist() == [0.25 if picture % 2 else 1 for picture in pictures]


def test_a_mask_is_that_of_the_crop_with_the_floor_of_its_dataset(volume: Volume) -> None:
    item = replace(ITEMS[0], mask="alpha", digest="masked")
    job = make_job(method="lora", datasets=[{"path": "datasets/test", "mask_floor": 0.5}])
    (crop,) = crops_of(item, job.datasets[0])
    half = torch.zeros(8, 8, dtype=torch.uint8)
    half[:4] = 255
    weights = make_run(volume.root).weights
    with ShardWriter(volume.cache) as writer:
        writer.add(mask_key(item, crop), {"mask": half})
        mean = torch.zeros(16, 8, 8, dtype=torch.float16)
        writer.add(latent_key(item, crop, weights), {"mean": mean, "spread": mean})
    data = TrainingData(make_run(volume.root, job), (item,), LATENTS, 0)
    assert data.example(0, 0, item)["mask"].tolist() == [[1.0] * 4] * 8 + [[0.5] * 4] * 8
    assert (data.example(0, 0, ITEMS[1])["mask"] == 1).all()


def test_a_repeated_image_in_one_step_has_noise_of_its_own(volume: Volume) -> None:
    items = (replace(ITEMS[0], repeats=4),)
    run = make_run_of(volume, items)
    (batch,) = TrainingData(run, items, LATENTS, 0).prepare(0).batches
    assert [picture_of(batch, i) for i in range(4)] == [0, 0, 0, 0]
    assert len({batch.target[i].numpy().tobytes() for i in range(4)}) == 4
    assert len(set(batch.sigma.tolist())) == 4


# ---------------------------------------------------------------- over the epochs


def test_every_epoch_shows_everything_its_repeats_in_an_order_of_its_own(volume: Volume) -> None:
    data = data_of(volume, images_per_step=3)
    assert data.order.steps_per_epoch == 3  # eight images, three at a time
    epochs = [[item for i in range(3) for item in data.step(epoch * 3 + i)] for epoch in range(4)]
    expected = Counter({i: item.repeats for i, item in enumerate(ITEMS)})
    assert all(Counter(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [len(data.step(i)) for i in range(6)] == [3, 3, 2, 3, 3, 2]


def test_a_full_models_steps_are_of_one_size(volume: Volume) -> None:
    """Each is one pass: a full model has no room to keep gradients between passes."""
    data = data_of(volume, method="full")
    steps = [data.step(i) for i in range(data.order.steps_per_epoch)]
    assert sorted(len(step) for step in steps) == [1, 1, 2, 4]
    assert all(len({ITEMS[item].bucket for item in step}) == 1 for step in steps)
    assert all(len(data.prepare(i).batches) == 1 for i in range(data.order.steps_per_epoch))


def test_going_on_in_mid_epoch_is_going_on_where_it_was(volume: Volume) -> None:
    straight = [images_of(step.batches) for step in data_of(volume).prepared(0, 7)]
    again = [images_of(step.batches) for step in data_of(volume).prepared(5, 7)]
    assert again == straight[5:]


@pytest.mark.parametrize("workers", [1, 3])
def test_steps_prepared_ahead_come_in_order(workers: int, volume: Volume) -> None:
    data = data_of(volume, workers=workers)
    ahead = [images_of(step.batches) for step in data.prepared(2, 9)]
    assert ahead == [images_of(data.prepare(step).batches) for step in range(2, 9)]
    assert list(data.prepared(4, 4)) == []


def test_leaving_early_leaves_no_thread_waiting(volume: Volume) -> None:
    steps = data_of(volume).prepared(0, 1000)
    assert isinstance(next(steps), StepData)
    steps.close()


def test_an_error_in_a_thread_reaches_the_loop(volume: Volume) -> None:
    items = (replace(ITEMS[0], digest="nowhere", repeats=4),)
    data = TrainingData(make_run_of(volume, items), items, LATENTS, 0)
    with pytest.raises(KeyError, match=r"[0-9a-f]{64}"):
        next(data.prepared(0, 3))


def test_a_batch_moves_whole() -> None:
    names = list(Batch.__dataclass_fields__)
    batch = Batch(*(torch.full((1,), float(i)) for i in range(len(names))))
    moved = batch.to(torch.device("cpu"))
    assert [getattr(moved, name).item() for name in names] == list(range(len(names)))


@settings(max_examples=60, deadline=None)
@given(
    repeats=st.lists(st.tuples(st.sampled_from(sorted(set(BUCKETS))), st.integers(1, 5)), min_size=1, max_size=12),
    images_per_step=st.integers(1, 9),
    method=st.sampled_from(["full", "lora"]),
)
def test_the_plan_and_the_order_agree_on_the_length_of_an_epoch(
    repeats: list[tuple[tuple[int, int], int]], images_per_step: int, method: str
) -> None:
    """The trainer looks steps up by the plan's count; one too many would end a run in mid-epoch."""
    items = tuple(Item(f"{i}", f"{i}", "", count, *size, size) for i, (size, count) in enumerate(repeats))
    job = make_job(method=method, images_per_step=images_per_step)
    _, per_epoch, _ = run_length(job, Dataset(items, len(items), 0, (), ()).summary())
    assert per_epoch == len(epoch_order(items, 42, 3, images_per_step, job.mixes_buckets))
