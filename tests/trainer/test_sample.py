"""Samples: who draws what, that nothing else changes by it, and what happens when it goes wrong."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from PIL import Image

from bootstrap.bases import FLUX_TINY
from bootstrap.cache import ShardWriter
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume, read_json
from bootstrap.wanted import text_key
from jobs.prompts import Drawing
from tests.runs import make_job, make_run, make_weights, make_world
from tests.training import fill_volume, prepared, shared_folder, train
from trainer import sample as samples
from trainer.model import bare_model, fill, sources
from trainer.pipeline import Pipeline
from trainer.prompts import Prompts
from trainer.sample import Sampler, notes_of, turns_of
from trainer.train import train as train_on

SMALL = {"width": 64, "height": 64, "steps": 2}
CPU = torch.device("cpu")


def sampler(
    folder: Path, base: Path, control: dist.ProcessGroup, prompts: list[str], **keys: Any
) -> tuple[Sampler, FluxTransformer2DModel]:
    """One that draws with an untrained flux-tiny; its text outputs are made up."""
    weights = make_weights(base)
    run = make_run(folder, make_job(sample=SMALL | {"prompts": prompts, **keys}), weights)
    run.folder.root.mkdir(parents=True)
    encode(run, *(each.prompt for each in run.job.sample.drawings))
    model = bare_model(FLUX_TINY).to_empty(device="cpu")
    fill(model, sources(FLUX_TINY, weights.transformer, "diffusers"), world=make_world(control))
    return Sampler(run, model.train(), make_world(control)), model


def encode(run: RunFile, *prompts: str) -> None:
    chance = torch.Generator().manual_seed(1)
    shape = run.weights.shape
    with ShardWriter(run.cache) as writer:
        for prompt in prompts:
            embeds = torch.randn(run.weights.text_tokens, shape.text_size, generator=chance).bfloat16()
            pooled = torch.randn(shape.pooled_size, generator=chance).bfloat16()
            writer.add(text_key(prompt, run.weights, False), {"prompt_embeds": embeds, "pooled": pooled})


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Volume:
    return Volume(shared_folder(tmp_path_factory, "samples", lambda root: fill_volume(root, flux_tiny)))


# ---------------------------------------------------------------- drawing


def test_the_model_is_told_the_guidance_of_drawing(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    drawing, model = sampler(tmp_path, flux_tiny, control, ["a cat", "a dog --guidance 2 --steps 1"])
    told: list[float] = []
    model.register_forward_pre_hook(lambda _, __, named: told.append(float(named["guidance"])), with_kwargs=True)
    with caplog.at_level(logging.INFO):
        drawing.draw(0)
    assert told == [3.5, 3.5, 2.0]
    assert "drawing 2 samples of step 0, with guidance 3.5" in caplog.text
    assert model.training


def test_drawing_leaves_every_generator_as_it_is(tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup) -> None:
    drawing, _ = sampler(tmp_path, flux_tiny, control, ["a cat"])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawing.draw(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_picture_tells_how_it_was_drawn_and_is_drawn_once(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup
) -> None:
    drawing, _ = sampler(tmp_path, flux_tiny, control, ["ein Kätzchen --seed 7 --width 96"])
    drawing.draw(4)
    path = drawing.path(4, 0)
    told = {"prompt": "ein Kätzchen", "settings": "step 4, seed 7, 2 steps, guidance 3.5, 96x64"}
    assert notes_of(path) == told
    with Image.open(path) as image:
        assert image.size == (96, 64)
    first = path.stat().st_mtime_ns
    drawing.draw(4)
    assert path.stat().st_mtime_ns == first
    drawing.prompts.drawings = (replace(drawing.prompts.drawings[0], seed=8),)  # of an edited job
    drawing.draw(4)
    assert path.stat().st_mtime_ns > first


def test_pictures_of_steps_that_are_done_again_are_drawn_again(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup
) -> None:
    """The weights that they are of are gone, and a job may have been edited."""
    drawing, model = sampler(tmp_path, flux_tiny, control, ["a cat"])
    paths = [drawing.path(step, 0) for step in (0, 4, 8)]
    assert [drawing.draw(step) for step in (0, 4, 8, 8)] == [True, True, True, False]
    Sampler(drawing.run, model, drawing.world, start=4)
    assert [path.exists() for path in paths] == [True, True, False]


def test_a_start_draws_what_a_stop_came_before() -> None:
    drawn: list[int] = []
    due = SimpleNamespace(due=lambda step: step % 4 == 0)
    ends = {"rest": lambda step: True, "stopped": lambda step: step}
    for start in (4, 5):
        train_on(cast(Any, SimpleNamespace(start=start, sampler=due, draw=drawn.append, **ends)))
    assert drawn == [4]


def test_a_round_leaves_nothing_in_memory(tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup) -> None:
    """Not even until Python next looks for cycles: that may be rounds later, and each would hold a VAE on the GPU."""
    drawing, model = sampler(tmp_path, flux_tiny, control, ["a cat"])
    gc.disable()
    try:
        pipeline = Pipeline(drawing.run.weights, model, CPU, tiled=False)
        vae = ref(pipeline.stock.vae)
        del pipeline
        assert vae() is None
    finally:
        gc.enable()


def test_turns_put_together_what_takes_equally_long() -> None:
    costs = [(2, 64), (9, 64), (2, 128), (9, 128), (1, 64)]
    drawings = [(i, Drawing(str(i), 0, side, side, steps, 1.0)) for i, (steps, side) in enumerate(costs)]
    assert [[number for number, _ in turn] for turn in turns_of(drawings, 2)] == [[3, 1], [2, 0], [4]]


# ---------------------------------------------------------------- alarms


def test_samples_of_a_broken_model_raise_an_alarm_until_they_are_sound(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    drawing, model = sampler(tmp_path, flux_tiny, control, ["a cat", "a dog"])
    drawing.draw(0)
    assert not drawing.run.folder.alarm.exists()
    sound = model.proj_out.weight.detach().clone()
    model.proj_out.weight.data.fill_(torch.nan)
    drawing.draw(5)
    told = read_json(drawing.run.folder.alarm)
    assert told["message"].startswith("all samples of step 5 are no numbers. Usual causes: learning_rate (1e-05)")
    assert "ALARM: all samples of step 5" in caplog.text
    model.proj_out.weight.data.copy_(sound)
    drawing.draw(10)
    assert not drawing.run.folder.alarm.exists()


def test_what_the_base_draws_too_is_no_alarm(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, _ = sampler(tmp_path, flux_tiny, control, ["a cat", "a dog"])
    monkeypatch.setattr(samples, "fault_of", lambda image: "black")
    drawing.draw(0)
    drawing.draw(5)
    assert not drawing.run.folder.alarm.exists()
    drawing.path(0, 1).unlink()
    drawing.draw(10)
    told = read_json(drawing.run.folder.alarm)
    assert told["message"].startswith("1 of 2 samples of step 10 are black.")


# ---------------------------------------------------------------- what fails


def test_a_failure_is_a_warning(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    drawing, model = sampler(tmp_path, flux_tiny, control, ["a cat"])
    drawing.prompts.drawings = (replace(drawing.prompts.drawings[0], prompt="what nobody has encoded"),)
    drawing.draw(3)
    assert "samples of step 3 are not complete: process 0: KeyError" in caplog.text
    assert model.training


def _train_where_one_cannot_write(run_file: Path) -> int:
    """The trainer, whose process 1 cannot write a picture."""
    from trainer.train import main

    def write(*_: object) -> None:
        raise OSError("the disk is gone")

    if os.environ["RANK"] == "1":
        samples.write_picture = write  # type: ignore[assignment]
    return main(run_file)


@pytest.mark.slow
def test_processes_of_a_sharded_model_agree_on_what_failed(volume: Volume) -> None:
    """The others go on with the next turn, which needs all of them; drawings of unequal length are evened out."""
    prompts = ["a star --steps 4", "a cat", "a dog --steps 3 --width 96", "a house --steps 1", "a tree --steps 1"]
    keys: dict[str, Any] = {"steps": 1, "plan": {"processes": 2}, "sample": SMALL | {"prompts": prompts}}
    done = train(prepared(volume, name="one-cannot-write", **keys), work=_train_where_one_cannot_write)
    assert done.outcome.code == 0, done.log
    there = sorted(path.name for path in done.run.folder.samples.iterdir())
    # By cost: (star, dog), (cat, house or tree), ...: the second of each turn is process 1's.
    assert len(there) == 2 * 3
    assert done.log.count("are not complete: process 1: OSError: the disk is gone. Training goes on.") == 2


# ---------------------------------------------------------------- prompts in a file


def run_drawing_from(file: Path, root: Path, base: Path, name: str = "test") -> RunFile:
    """A run whose prompts stand in ``file``, of which "a cat" was the only one when it began."""
    job = make_job(name=name, sample=SMALL | {"prompts_file": str(file)})
    job = job.model_copy(update={"sample": job.sample.model_copy(update={"prompts": ("a cat",)})})
    return make_run(root, job, make_weights(base))


def prompts_of(run: RunFile, control: dist.ProcessGroup) -> Prompts:
    return Prompts(run, make_world(control))


def test_an_edited_file_is_drawn_from(volume: Volume, control: dist.ProcessGroup, tmp_path: Path) -> None:
    """New prompts are encoded by a process of their own."""
    file = volume.root / "prompts.txt"
    file.write_text("a cat\n")
    run = run_drawing_from(Path("prompts.txt"), volume.root, (volume.models / "flux-tiny").resolve(), name="edited")
    encode(run, "a cat")
    run.write(())
    prompts = prompts_of(run, control)
    assert [each.prompt for each in prompts.now()] == ["a cat"]
    file.write_text("a cat --seed 3\nan owl that nobody has encoded --steps 5\n")
    assert [(each.prompt, each.seed, each.steps) for each in prompts.now()] == [
        ("a cat", 3, 2),
        ("an owl that nobody has encoded", 42, 5),
    ]


def test_the_last_good_list_stays(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prompts.txt"
    run = run_drawing_from(file, tmp_path, flux_tiny)
    encode(run, "a cat", "a dog")
    prompts = prompts_of(run, control)
    good = prompts.now()
    assert "the last good list is drawn, since" in caplog.text
    assert "cannot be read" in caplog.text
    file.write_text("a cat --sede 3\n")
    for _ in range(2):
        assert prompts.now() == good
    assert caplog.text.count("prompts.txt:1: --sede is not known. Did you mean --seed?") == 1
    file.write_text("a cat --width 96\n")
    assert prompts.now() == good
    assert "96x64 is larger than the samples that memory was planned for" in caplog.text
    file.write_text("a dog\n")
    assert [each.prompt for each in prompts.now()] == ["a dog"]
    file.unlink()
    assert [each.prompt for each in prompts.now()] == ["a dog"]


def test_prompts_that_cannot_be_encoded_are_tried_once(
    tmp_path: Path,
    flux_tiny: Path,
    control: dist.ProcessGroup,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU waits for each try."""
    file = tmp_path / "prompts.txt"
    file.write_text("a new one\n")
    run = run_drawing_from(file, tmp_path, flux_tiny)
    prompts = prompts_of(run, control)
    monkeypatch.setattr("trainer.prompts.sys.executable", "false")
    caplog.set_level(logging.INFO)
    for tries, text in enumerate(("a new one\n", "another new one\n"), start=1):
        file.write_text(text)
        for _ in range(3):
            assert [each.prompt for each in prompts.now()] == ["a cat"]
        assert caplog.text.count("encoding the new ones on the CPU") == tries
    assert caplog.text.count("encoding the new ones failed (exit status 1)") == 1
    assert "tried again when the file is saved anew" in caplog.text
    encode(run, "another new one")
    os.utime(file)
    assert [each.prompt for each in prompts.now()] == ["another new one"]


def test_new_prompts_wait_where_memory_is_short(
    tmp_path: Path,
    flux_tiny: Path,
    control: dist.ProcessGroup,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a new one\n")
    run = run_drawing_from(file, tmp_path, flux_tiny)
    monkeypatch.setattr("trainer.prompts.read_free_memory", lambda: 1 << 30)
    assert [each.prompt for each in prompts_of(run, control).now()] == ["a cat"]
    assert "encoding new ones takes 3." in caplog.text
    assert "GiB of RAM and 1.0 GiB are free" in caplog.text
