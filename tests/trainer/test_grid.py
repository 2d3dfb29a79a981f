"""The grid of states: its pictures are those of training, its columns those asked for, and what goes wrong is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import save_file

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.run_file import RunFile
from bootstrap.state import State
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import Volume
from bootstrap.wanted import Text, text_key
from entrypoint import grid as command
from entrypoint.model_files import NotFoundError
from tests.runs import make_job, make_run, make_weights, make_world
from tests.trainer.test_sample import encode
from trainer import grid
from trainer.checkpoint import Saver, publish_output
from trainer.ema import Ema
from trainer.encode import encode_texts
from trainer.export import export, export_live
from trainer.grid import GridError, column_of, draw_all, drawings_of, in_order, with_base
from trainer.make_optimizer import make_optimizer
from trainer.metadata import metadata
from trainer.model import build_model, fill, sources
from trainer.sample import Sampler
from trainer.sheet import Row, draw_grid
from trainer.tensor_output import ExportError
from trainer.trained import trained_tensors

CPU = torch.device("cpu")
SAMPLE: dict[str, Any] = {
    "width": 64,
    "height": 64,
    "steps": 2,
    "prompts": ["a cat", "a dog --seed 7 --width 96 --guidance 2"],
}


def make_state(volume: Path, base: Path, control: dist.ProcessGroup, name: str, **keys: Any) -> tuple[RunFile, State]:
    """A run whose weights were moved a little, its state of step 3 with the samples of that step, its output."""
    world = make_world(control)
    run = make_run(volume, make_job(name=name, sample=SAMPLE, **keys), make_weights(base))
    run.folder.root.mkdir(parents=True)
    run.write(())
    encode(run, "a cat", "a dog")
    places = sources(FLUX_TINY, [base / SINGLE_FILE], "bfl")
    model = build_model(run.job, run.plan, FLUX_TINY, world, lambda model: fill(model, places, world))
    tensors = trained_tensors(model, 0, 1)
    ema = Ema(run.job.ema, 1, model, tensors, 0, host=False) if run.job.ema else None
    chance = torch.Generator().manual_seed(len(name))
    for tensor in tensors:
        tensor.weight.add_(torch.randn(tensor.weight.shape, generator=chance).to(tensor.weight), alpha=0.02)
    if ema:
        ema.begin_step(0)
        ema.finish_step()
    Sampler(run, model, world, ema).draw(3)
    saver = Saver(run, world)
    optimizer = make_optimizer(tensors, run.job, run.plan, world)
    saver.begin(3, tensors, optimizer, metadata(run, 3), ema=ema)
    state = saver.publish()
    publish_output(state, run.folder.output / f"{name}.safetensors")
    return run, state


def sampled(run: RunFile, number: int) -> np.ndarray:
    with Image.open(run.folder.samples / f"step-000003-{number:02d}.png") as image:
        return np.asarray(image)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [{}, {"ema": {"every": 1}}, {"method": "lora", "lora": {"rank": 4}, "ema": {}}],
    ids=["full", "full-average", "lora-average"],
)
def test_the_pictures_are_those_of_training(
    keys: dict[str, Any], tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup
) -> None:
    run, state = make_state(tmp_path, flux_tiny, control, "one", **keys)
    columns = with_base([column_of(state.path), column_of(run.folder.output / "one.safetensors")])
    assert [column.label for column in columns] == ["base, flux-tiny", "one, step 3", "one, output"]
    pictures = draw_all(columns, drawings_of([], [], columns), CPU)
    for number, (base, of_state, of_output) in enumerate(pictures):
        assert np.array_equal(of_state, sampled(run, number))
        assert np.array_equal(of_output, of_state)
        assert not np.array_equal(base, of_state)


@pytest.mark.slow
def test_columns_of_several_runs_keep_their_order(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole models and adapters of two ranks, which cannot share a model; drawn in another order than shown."""
    made = {
        name: make_state(tmp_path, flux_tiny, control, name, **keys)
        for name, keys in {
            "full": {},
            "lora": {"method": "lora", "lora": {"rank": 4}},
            "larger": {"method": "lora", "lora": {"rank": 8}},
        }.items()
    }
    target = tmp_path / "grid.png"
    arguments = [str(made[name][1].path) for name in ("lora", "full", "larger")]
    assert grid.main([*arguments, "--base", "--cpu", f"--to={target}"]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    with Image.open(target) as image:
        sheet = np.asarray(image)
    for place, name in enumerate(("lora", "full", "larger"), start=1):
        wanted = sampled(made[name][0], 0)
        left = 12 + place * (96 + 12)  # cells are as wide as the widest picture
        tops = [y for y in range(sheet.shape[0] - 64) if np.array_equal(sheet[y : y + 64, left : left + 64], wanted)]
        assert len(tops) == 1, name
    assert in_order(with_base([column_of(made["full"][1].path)]))[0].label == "base, flux-tiny"


def test_a_file_beside_the_output_is_of_either_layout_or_told(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_state(tmp_path, flux_tiny, control, "one")
    lora, _ = make_state(tmp_path, flux_tiny, control, "lora", method="lora", lora={"rank": 4})
    shards = [read_tensors(file) for file in make_weights(flux_tiny).transformer]
    other, wrong = (run.folder.output / f"{name}.safetensors" for name in ("other", "wrong"))
    save_file({name: tensor for shard in shards for name, tensor in shard.items()}, other)
    wrong.write_bytes((lora.folder.output / "lora.safetensors").read_bytes())
    columns = with_base([column_of(other)])
    for base, of_file in draw_all(columns, drawings_of([], [], columns), CPU):
        assert np.array_equal(base, of_file)
    assert grid.main([str(wrong), "--cpu"]) == 64
    assert f"{wrong} lacks" in capsys.readouterr().err


def test_prompts_and_seeds(tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup) -> None:
    _, state = make_state(tmp_path, flux_tiny, control, "one")
    columns = [column_of(state.path)]
    file = tmp_path / "prompts.txt"
    file.write_text("# mine\na bird --seed 9\n")
    drawings = drawings_of([str(file), "a fish --width 128"], [], columns)
    assert [(d.prompt, d.seed, d.width) for d in drawings] == [("a bird", 9, 64), ("a fish", 42, 128)]
    drawings = drawings_of(["a bird"], [1, 2], columns)
    assert [(d.prompt, d.seed) for d in drawings] == [("a bird", 1), ("a bird", 2)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seeds=1,x"], "--seeds 1,x: write whole numbers"),
        (["--cell=5"], "--cell 5: write a number of pixels from 64"),
        (["--prompts=a cat --sede 1"], "Did you mean --seed?"),
        (["{root}/nothing"], "lies in no run's states/ or output/"),
    ],
)
def test_what_cannot_be_drawn_is_told(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    flux_tiny: Path,
    control: dist.ProcessGroup,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, state = make_state(tmp_path, flux_tiny, control, "one")
    assert grid.main([str(state.path), *(each.format(root=tmp_path) for each in arguments), "--cpu"]) == 64
    assert told in capsys.readouterr().err
    assert not list(tmp_path.rglob("grid*"))


def test_nothing_is_overwritten(tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup) -> None:
    _, state = make_state(tmp_path, flux_tiny, control, "one")
    columns = [column_of(state.path)]
    rows = [Row("a cat", "seed 1", [Image.new("RGB", (64, 64))])]
    first, second = (grid.write_grid(None, columns, rows, 64) for _ in range(2))
    assert (first.name, second.name) == ("grid-001.png", "grid-002.png")
    assert grid.main([str(state.path), f"--to={first}"]) == 64


def test_names_of_columns(tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup) -> None:
    run, state = make_state(tmp_path, flux_tiny, control, "one")
    volume = Volume(tmp_path)
    output = run.folder.output / "one.safetensors"
    names = {"": state.path, "/3": state.path, "/states/step-000003": state.path, "/all": state.path, "/output": output}
    for name, found in names.items():
        for run_named in ("one", "runs/one", str(run.folder.root)):
            assert list(command.columns(volume, run_named + name)) == [found]
    assert list(command.columns(volume, "runs/one/states/all")) == [state.path]
    assert list(command.columns(volume, str(output))) == [output]
    for name in ("two", "two/all", "one/4", "two/output", "runs/two/all"):
        with pytest.raises(NotFoundError) as told:
            list(command.columns(volume, name))
        assert "RUN/STEP" in str(told.value)


def test_too_little_memory_is_told(
    tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = make_state(tmp_path, flux_tiny, control, "one")
    monkeypatch.setattr(grid, "read_free_memory", lambda: 1 << 30)
    columns = [column_of(state.path)]
    with pytest.raises(GridError, match=r"drawing takes 2\.\d GiB of memory, and this machine has 1.0 GiB free"):
        draw_all(columns, drawings_of([], [], columns), CPU)


@pytest.mark.parametrize("layout", ["kohya", "diffusers", "full"])
def test_stock_diffusers_draws_the_same_from_the_file(
    layout: str, tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with settings of the prompt's own. (Kohya's layout on double blocks: diffusers' reader of it takes
    the single blocks' width for that of FLUX.1.)"""
    from diffusers import FluxPipeline, FluxTransformer2DModel

    def encode_truly(run: RunFile, *prompts: str) -> None:
        encode_texts({text_key(p, run.weights, False): Text(p, False, p) for p in prompts}, run.weights, CPU, run.cache)

    monkeypatch.setattr(sys.modules[__name__], "encode", encode_truly)
    targets = ["transformer_blocks.*.attn.*", "transformer_blocks.*.ff.net.*"]
    adapter = {"rank": 4, "alpha": 64, "layout": layout, "targets": targets if layout == "kohya" else "all-linear"}
    keys = {} if layout == "full" else {"method": "lora", "lora": adapter}
    run, state = make_state(tmp_path, flux_tiny, control, "one", **keys)
    pipeline: Any = FluxPipeline.from_pretrained(flux_tiny, torch_dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    untrained = stock_picture(pipeline)
    if layout == "full":
        folder = export(state, tmp_path / "model", "diffusers", None, saturate=False)
        pipeline.transformer = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    else:
        pipeline.load_lora_weights(run.folder.output / "one.safetensors")
    assert np.array_equal(stock_picture(pipeline), sampled(run, 1))
    assert np.abs(untrained.astype(int) - sampled(run, 1)).mean() > 1


def stock_picture(pipeline: Any) -> np.ndarray:
    """The second prompt of ``SAMPLE``."""
    seed = torch.Generator("cpu").manual_seed(7)
    settings = {"width": 96, "height": 64, "num_inference_steps": 2, "guidance_scale": 2.0, "generator": seed}
    return np.asarray(pipeline("a dog", **settings, max_sequence_length=64).images[0])


# ---------------------------------------------------------------- the sheet


def test_a_sheet_of_uneven_pictures_and_long_texts() -> None:
    wide, high = Image.new("RGB", (300, 100), "red"), Image.new("RGB", (100, 300), "blue")
    rows = [Row("word " * 400, "seed 1", [wide, high]), Row("\u0000 \u4f60", "seed " * 99, [high, wide])]
    sheet = draw_grid(["a label that is far too long for a column of that width " * 3, "b"], rows, 150)
    assert sheet.width == 12 + 2 * (150 + 12)
    pixels = np.asarray(sheet)
    for colour in ((255, 0, 0), (0, 0, 255)):
        assert int((pixels == colour).all(axis=2).sum()) == pytest.approx(2 * 150 * 50, rel=0.1)


# ---------------------------------------------------------------- live weights


def test_live_weights_are_exported(tmp_path: Path, flux_tiny: Path, control: dist.ProcessGroup) -> None:
    """What a state without an average would hold: the weights are moved alike."""
    from bootstrap.state import read_state, thin
    from bootstrap.tensor_files import read_header, read_tensors

    for method in ({}, {"method": "lora", "lora": {"rank": 4, "alpha": 2}}):
        root = tmp_path / str(method.get("method"))
        _, plain = make_state(root / "a", flux_tiny, control, "same", **method)
        _, averaged = make_state(root / "b", flux_tiny, control, "same", ema={"every": 1}, **method)
        live = export_live(averaged, None, None, None, saturate=False)
        assert "live" in live.name
        found, expected, average = (read_tensors(file) for file in (live, plain.model, averaged.model))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert not all(torch.equal(average[name], tensor) for name, tensor in expected.items())
        assert "fluxpod.ema" in read_header(averaged.model).metadata
        assert "fluxpod.ema" not in read_header(live).metadata
        with pytest.raises(ExportError, match="without --live"):
            export_live(plain, None, None, None, saturate=False)
        thin(averaged)
        with pytest.raises(ExportError, match="has been thinned"):
            export_live(read_state(averaged.path), None, None, None, saturate=False)
