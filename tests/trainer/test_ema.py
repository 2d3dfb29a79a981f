"""The average of the weights: what it is, where it lies, that showing it loses nothing, and how it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.state import State
from bootstrap.tensor_files import open_tensors, read_tensors
from bootstrap.volume import Volume
from jobs.schema import Ema as Settings
from tests.runs import PLAN, make_trained, make_world, shards_of
from tests.streaming import train_in_backward
from tests.trainer.test_model import make_batch
from tests.trainer.test_streamed import random_weights
from tests.training import Trained, fill_volume, prepared, shared_folder, train, trained
from trainer.ema import PREFIX, Ema, go_back, kept_share, live_of, packed, show
from trainer.rounding import round_stochastically
from trainer.trained import Trained as Tensor
from trainer.world import World

NOTHING = nn.Module()  # a model without streamed blocks
AWKWARD = [0.0, -0.0, 1.0, -1.0, 1e-40, 65504.0, 3.3e38, -3.3e38, 1 + 2**-8, 1 + 2**-9, 1 - 2**-9, 0.1]


def settings(**keys: Any) -> Settings:
    return Settings.model_validate({"decay": 0.9, "every": 1} | keys)


def make_ema(tensors: list[Tensor], **keys: Any) -> Ema:
    return Ema(settings(**keys), 42, NOTHING, tensors, 0, host=False)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the exchange


@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("average_type", [torch.bfloat16, torch.float32])
def test_showing_and_going_back_is_exact(weight_type: torch.dtype, average_type: torch.dtype) -> None:
    if weight_type == torch.float32 and average_type == torch.bfloat16:
        return  # refused: an adapter's average is float32
    chance = torch.Generator().manual_seed(1)
    weight = torch.cat([torch.randn(5000, generator=chance), torch.tensor(AWKWARD)]).to(weight_type)
    average = torch.cat([torch.randn(5000, generator=chance), torch.tensor(AWKWARD).flip(0)]).to(average_type)
    shown, kept = weight.clone(), average.clone()
    show(shown, kept)
    assert (shown.double() - average.double()).abs().le(average.double().abs() * 2**-8 + 1e-40).all()
    nearest = average.to(weight_type)
    ties = average.view(torch.int32) & 0xFFFF == 0x8000 if average.dtype != weight.dtype else torch.zeros(())
    assert bool(((shown == nearest) | ties.bool()).all())
    assert torch.equal(live_of(packed(shown, kept)), weight)
    go_back(shown, kept)
    bits = torch.int16 if weight_type == torch.bfloat16 else torch.int32
    assert torch.equal(shown.view(bits), weight.view(bits))
    assert torch.equal(kept, average)


# ---------------------------------------------------------------- following


def test_the_average_of_a_weight() -> None:
    (tensor,) = tensors = make_trained({"w": torch.zeros(3)})
    ema = make_ema(tensors)
    expected = 0.0
    for step in range(30):
        tensor.weight.fill_(step + 1.0)
        ema.begin_step(step)
        ema.finish_step()
        share = min(0.9, (2 + step) / (11 + step))
        expected = share * expected + (1 - share) * (step + 1)
    assert ema.averages["w"].tolist() == pytest.approx([expected] * 3, rel=1e-5)


def test_it_follows_at_steps_that_are_due_and_each_tensor_once() -> None:
    (tensor,) = tensors = make_trained({"w": torch.zeros(3)})
    ema = make_ema(tensors, every=3)
    tensor.weight.fill_(1.0)
    seen = []
    for step in range(6):
        ema.begin_step(step)
        ema.follow(tensor)  # in the backward pass
        ema.follow(tensor)
        ema.finish_step()
        seen.append(float(ema.averages["w"][0]))
    third, sixth = (kept_share(ema.settings, n) for n in (3, 6))
    assert seen == pytest.approx([0, 0, *[1 - third] * 3, 1 - third * sixth])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_follow_as_the_whole_does(dtype: str) -> None:
    """bf16 is rounded by the logical place."""
    chance = torch.Generator().manual_seed(3)
    start, moved = ({"w": torch.randn(7, 37, generator=chance).bfloat16()} for _ in range(2))

    def follow(tensors: list[Tensor], first: int, count: int) -> torch.Tensor:
        ema = make_ema(tensors, dtype=dtype)
        tensors[0].weight.copy_(moved["w"][first : first + count])
        for step in range(3):
            ema.begin_step(step)
            ema.finish_step()
        return ema.averages["w"]

    whole = follow(make_trained(start), 0, 7)
    for rank in range(3):
        (shard,) = shards_of(start, rank, 3)
        rows = follow([shard], shard.first_row, shard.weight.shape[0])
        assert torch.equal(rows, whole[shard.first_row : shard.first_row + rows.shape[0]])


def test_a_bf16_average_arrives_where_rounding_to_the_nearest_would_stand_still() -> None:
    (tensor,) = tensors = make_trained({"w": torch.ones(20_000).bfloat16()})
    ema = make_ema(tensors, dtype="bf16", decay=0.99)
    tensor.weight.fill_(1.0 + 2**-6)
    ema.begun = -2000  # no warm-up
    for step in range(300):
        ema.begin_step(step)
        ema.finish_step()
    expected = 1 + 2**-6 * (1 - 0.99**300)
    assert float(ema.averages["w"].float().mean()) == pytest.approx(expected, abs=2**-11)
    assert torch.equal(round_stochastically(torch.ones(4), "w", seed=1, step=1, first=0), torch.ones(4).bfloat16())


# ---------------------------------------------------------------- wherever weights and averages lie


@pytest.fixture(scope="module")
def world(control: dist.ProcessGroup) -> World:
    return make_world(control)


def averaged(world: World, dtype: str, *, host: bool, streamed: int = 0) -> dict[str, torch.Tensor]:
    plan = replace(
        PLAN,
        checkpointed_blocks=FLUX_TINY.blocks,
        streamed_blocks=streamed,
        optimizer_in_backward=True,
        ema_on_host=host,
    )
    keys: dict[str, Any] = {"decay": 0.9, "every": 2, "dtype": dtype}
    return train_in_backward(
        plan, FLUX_TINY, world, random_weights, make_batch(), steps=3, learning_rate=1e-2, average=keys
    )


@pytest.mark.parametrize(("dtype", "streamed"), [("fp32", 2), ("bf16", 0)])
def test_averages_and_weights_on_the_host_change_nothing(dtype: str, streamed: int, world: World) -> None:
    resident = averaged(world, dtype, host=False)
    other = averaged(world, dtype, host=True, streamed=streamed)
    assert all(torch.equal(other[name], weight) for name, weight in resident.items())


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, flux_tiny_schnell: Path) -> Volume:
    bases = (flux_tiny, flux_tiny_schnell)
    return Volume(shared_folder(tmp_path_factory, "training", lambda root: fill_volume(root, *bases)))


FULL: dict[str, Any] = {"steps": 5, "images_per_step": 2, "save": {"every": 1, "states": 9, "weights": 9}}
LORA: dict[str, Any] = FULL | {"method": "lora", "lora": {"rank": 4}}


def live_weights(state: State) -> dict[str, torch.Tensor]:
    with open_tensors(state.optimizer) as reader:
        names = [name for name in reader.header.tensors if name.startswith(PREFIX)]
        return {name.removeprefix(PREFIX): live_of(reader.read(name)) for name in names}


@pytest.mark.slow
def test_the_states_of_a_run_hold_the_average_of_its_live_weights(volume: Volume, flux_tiny: Path) -> None:
    """By hand, from what the states keep; in two processes."""
    from trainer.model import sources

    run = trained(volume, name="averaged", ema={"every": 1}, plan={"processes": 2}, **FULL)
    plain = trained(volume, name="not-averaged", plan={"processes": 2}, **FULL)
    assert run.values("loss") == plain.values("loss")
    name = "transformer_blocks.0.attn.to_q.weight"
    (place,) = [s for s in sources(FLUX_TINY, [flux_tiny / SINGLE_FILE], "bfl") if s.parameter == name]
    rows = slice(place.file_first, place.file_first + place.count)
    average = read_tensors(flux_tiny / SINGLE_FILE)[place.file_name][rows].float()
    for state, other in zip(run.states, plain.states, strict=True):
        live = live_weights(state)[name]
        assert torch.equal(live, read_tensors(other.model)[place.file_name][rows])
        share = kept_share(settings(decay=0.99), state.step)
        average = average.mul(share).add(live.float().mul(1 - share))
        shown = read_tensors(state.model)[place.file_name][rows]
        assert (shown.float() - average).abs().le(average.abs() * 2**-8).all()
        assert not torch.equal(shown, live)
    assert run.output.samefile(run.states[-1].model)
    with open_tensors(run.output) as reader:
        assert reader.header.metadata["fluxpod.ema"] == "average of the weights, decay 0.99"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [FULL, LORA, FULL | {"ema": {"dtype": "bf16", "every": 2}}])
def test_a_run_goes_on_exactly_on_any_number_of_processes(keys: dict[str, Any], volume: Volume) -> None:
    keys = {"ema": {"every": 2}} | keys
    method = f"{keys.get('method', 'full')}-{keys['ema'].get('dtype', 'fp32')}"
    straight = trained(volume, name=f"ema-{method}", plan={"processes": 2}, **keys)
    third = straight.states[2]
    again = trained(volume, third, name=f"ema-{method}-again", plan={"processes": 2}, **keys)
    assert again.values("loss") == straight.values("loss")[3:]
    assert again.states[-1].optimizer.read_bytes() == straight.states[-1].optimizer.read_bytes()
    assert_same(read_tensors(again.output), read_tensors(straight.output))
    if keys["ema"].get("dtype") == "bf16":
        return
    other = train(prepared(volume, third, name=f"ema-{method}-other", plan={"processes": 1}, **keys))
    assert other.values("loss") == pytest.approx(straight.values("loss")[3:], rel=1e-3)


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_average_may_come_and_go(volume: Volume) -> None:
    """Without it the run goes on with the live weights; with a new one it begins at those it finds."""
    with_one = trained(volume, name="ema-there", ema={"every": 1}, **LORA)
    without = trained(volume, name="ema-never", **LORA)
    gone = trained(volume, with_one.states[2], name="ema-gone", **LORA)
    assert gone.values("loss") == without.values("loss")[3:]
    assert_same(read_tensors(gone.output), read_tensors(without.output))
    come = trained(volume, without.states[2], name="ema-come", ema={"every": 1}, **LORA)
    assert come.values("loss") == without.values("loss")[3:]
    assert come.states[-1].manifest.ema == {"decay": 0.99, "every": 1, "begun": 3}


@pytest.mark.slow
def test_samples_are_drawn_with_either(volume: Volume) -> None:
    """Drawing changes no later step, whichever weights it shows."""
    small = {"width": 64, "height": 64, "steps": 2, "every": 2, "prompts": ["a star", "a cat"]}
    keys: dict[str, Any] = FULL | {"steps": 3, "plan": {"processes": 2}, "sample": small, "learning_rate": 0.01}
    runs = [trained(volume, name=f"ema-drawn-{n}", ema={"every": 1, "samples": bool(n)}, **keys) for n in (0, 1)]
    assert runs[0].values("loss") == runs[1].values("loss")
    assert runs[0].states[-1].optimizer.read_bytes() == runs[1].states[-1].optimizer.read_bytes()
    assert last_picture(runs[0]) != last_picture(runs[1])


def last_picture(run: Trained) -> bytes:
    from PIL import Image

    with Image.open(run.run.folder.samples / "step-000003-00.png") as image:
        return image.tobytes()
