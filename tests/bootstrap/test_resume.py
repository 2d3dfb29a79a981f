"""Which state a run goes on from, and which edited job may go on."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lora_file import tensors_of
from bootstrap.resume import (
    beyond,
    changed_settings,
    choose_state,
    refuse_absent_adapter,
    refuse_unlike_adapter,
    resume_problems,
)
from bootstrap.state import folder_name, list_states, read_state
from bootstrap.tensor_files import write_tensors
from bootstrap.volume import RunFolder, Volume
from jobs.on_resume import ROWS
from jobs.problem import JobError
from jobs.schema import Job, Section
from jobs.unknown import section_of
from tests.loras import SMALL, make_adapter
from tests.runs import make_job, make_run
from tests.states import flip_a_bit, make_state

ENTRY: dict[str, Any] = {"match": "attention", "rank": 4, "alpha": 4}


def lora(**keys: Any) -> dict[str, Any]:
    return {"lora": {"rank": 8, "layers": [ENTRY]} | keys}


ADAPTER: dict[str, Any] = {"method": "lora", "optimizer": "AdamW8bit", **lora()}


# ---------------------------------------------------------------- the table


def keys_of(kind: type[Section], before: str = "") -> list[str]:
    """Every key of a job, those of groups after a dot."""
    keys = []
    for name, field in kind.model_fields.items():
        inner = section_of(field.annotation)[1]
        keys += keys_of(inner, f"{before}{name}.") if inner else [before + name]
    return keys


def test_the_table_has_a_row_for_every_key_and_no_other() -> None:
    assert sorted(ROWS) == sorted(keys_of(Job))


DATASET: dict[str, Any] = {
    "repeats": 3,
    "weight": 2.0,
    "trigger": "t",
    "caption": "c",
    "prefix": "p",
    "suffix": "s",
    "resolution": 256,
    "multiline": True,
    "wildcards": True,
    "shuffle_tags": True,
    "keep_tags": 2,
    "caption_dropout": 0.3,
    "crop": "top",
    "random_crops": 2,
    "flip": True,
    "mask": "alpha",
    "mask_floor": 0.3,
    "mask_normalize": True,
}
OTHER: dict[str, Any] = {  # a job with another value for the key than the default, or than the job beside it
    "name": {"name": "other"},
    "base": {"base": "flux-tiny-schnell"},
    "vae": {"base": "a.safetensors", "vae": "b", "text_encoders": {"clip": "c", "t5": "d"}},
    "method": {"method": "full", "lora": None},
    "lora.rank": lora(rank=16, alpha=8),
    "lora.alpha": lora(alpha=16),
    "lora.targets": lora(targets=["*.to_q"]),
    "lora.layout": lora(layout="diffusers"),
    "lora.start": lora(start="a.safetensors"),
    "lora.layers.match": lora(layers=[ENTRY | {"match": ["*.to_q"]}]),
    "lora.layers.rank": lora(layers=[ENTRY | {"rank": 2}]),
    "lora.layers.alpha": lora(layers=[ENTRY | {"alpha": 2}]),
    "lora.layers.learning_rate": lora(layers=[ENTRY, {"match": "feed-forward", "learning_rate": 1e-3}]),
    "lora.dora": lora(dora=True),
    "lora.rslora": lora(rslora=True),
    "lora.dropout": lora(dropout=0.1),
    "assistant_lora": {"assistant_lora": "a.safetensors"},
    "datasets.path": {"datasets": [{"path": "datasets/test"}, {"path": "datasets/more"}]},
    **{f"datasets.{name}": {"datasets": [{"path": "datasets/test", name: value}]} for name, value in DATASET.items()},
    "bad_images": {"bad_images": "skip"},
    "steps": {"steps": 9000},
    "epochs": {"epochs": 7},
    "images_per_step": {"images_per_step": 3},
    "resolution": {"resolution": 256},
    "bucket_step": {"bucket_step": 16},
    "upscale": {"upscale": True},
    "learning_rate": {"learning_rate": 3e-4},
    "schedule": {"schedule": "cosine"},
    "schedule_args": {"schedule": "cosine", "schedule_args": {"end": 0.1}},
    "warmup": {"warmup": 3},
    "optimizer": {"optimizer": "Lion8bit"},
    "optimizer_args": {"optimizer_args": {"amsgrad": True}},
    "weight_decay": {"weight_decay": 0.1},
    "max_grad_norm": {"max_grad_norm": 2.0},
    "timestep_sampling": {"timestep_sampling": "uniform"},
    "discrete_flow_shift": {"discrete_flow_shift": 2.0},
    "sigmoid_scale": {"sigmoid_scale": 2.0},
    "guidance": {"guidance": 2.0},
    "t5_mask": {"t5_mask": True},
    "caption_dropout": {"caption_dropout": 0.2},
    "non_finite_steps": {"non_finite_steps": 9},
    "seed": {"seed": 7},
    "resume_from": {"resume_from": 500},
    "save.every": {"save": {"every": "30m"}},
    "save.states": {"save": {"states": 2}},
    "save.weights": {"save": {"weights": 7}},
    "save.keep_every": {"save": {"keep_every": 1000, "weights": 2}},
    "save.on_error": {"save": {"on_error": "stop"}},
    "sample.every": {"sample": {"every": 9, "prompts": ["a"]}},
    "sample.prompts": {"sample": {"prompts": ["a"]}},
    "sample.prompts_file": {"sample": {"prompts_file": "prompts.txt"}},
    "sample.width": {"sample": {"width": 512, "prompts": ["a"]}},
    "sample.height": {"sample": {"height": 512, "prompts": ["a"]}},
    "sample.steps": {"sample": {"steps": 4, "prompts": ["a"]}},
    "sample.guidance": {"sample": {"guidance": 4.0, "prompts": ["a"]}},
    "sample.seed": {"sample": {"seed": 4, "prompts": ["a"]}},
    "validation.fraction": {"validation": {"fraction": 0.2}},
    "validation.path": {"validation": {"path": "datasets/others"}},
    "validation.every": {"validation": {"every": 9}},
    "validation.images": {"validation": {"images": 9}},
    "validation.levels": {"validation": {"levels": 8}},
    "validation.best": {"validation": {"best": "keep"}},
    "output.hub": {"output": {"hub": "me/flowers"}},
    "output.private": {"output": {"hub": "me/flowers", "private": False}},
    "output.states": {"output": {"hub": "me/flowers", "states": True}},
    "ema.decay": {"ema": {"decay": 0.9}},
    "ema.every": {"ema": {"every": 3}},
    "ema.dtype": {"ema": {"dtype": "bf16"}},
    "ema.samples": {"ema": {"samples": False}},
    "gpus": {"gpus": 2},
    "least_speed": {"least_speed": 0.1},
    "when_done": {"when_done": "stop"},
    **{
        f"notify.{name}": {"notify": {name: "https://example.org/x"}}
        for name in ("ntfy", "discord", "slack", "webhook")
    },
    "plan.processes": {"plan": {"processes": 2}},
    "plan.sharding": {"plan": {"sharding": "none"}},
    "plan.checkpointing": {"plan": {"checkpointing": True}},
    "plan.base_precision": {"plan": {"base_precision": "nf4"}},
    "plan.compile": {"plan": {"compile": False}},
    "plan.images_per_pass": {"plan": {"images_per_pass": 1}},
    "plan.optimizer_in_backward": {"plan": {"optimizer_in_backward": True}},
    "plan.optimizer_states": {"plan": {"optimizer_states": "host"}},
    "plan.products": {"plan": {"products": "fp8-rowwise"}},
    "plan.retry": {"plan": {"retry": False}},
}
OTHER["text_encoders.clip"] = OTHER["text_encoders.t5"] = OTHER["vae"]


def problems(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    job = make_job(**before)
    kept = {key: getattr(job, key) for key in ("method", "base", "optimizer", "optimizer_args", "lora")}
    state = read_state(make_state(folder, 500, **kept))
    return {problem.key: str(problem) for problem in resume_problems(state, make_job(**before | now))}


@pytest.mark.parametrize("key", sorted(ROWS))
def test_a_key_may_change_or_is_refused_as_its_row_says(key: str, tmp_path: Path) -> None:
    """Every key of the schema must have another value here, too."""
    before = ADAPTER | ({"base": "a.safetensors"} if key in ("vae", "text_encoders.clip", "text_encoders.t5") else {})
    found = problems(tmp_path, before, OTHER[key])
    assert list(found) == ([] if ROWS[key].may_change else [key])
    for told in found.values():
        assert "the state of step 500 was trained with" in told
        assert ROWS[key].effect in told
        assert "back, or give the job another name to start anew" in told


def outer_keys(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@pytest.mark.parametrize("key", sorted(ROWS))
def test_a_change_is_told_with_its_effect(key: str, tmp_path: Path) -> None:
    before = make_run(tmp_path, make_job(**ADAPTER | ({"base": "a.safetensors"} if "base" in OTHER[key] else {})))
    file = tmp_path / "run.json"
    file.write_text(make_json(before))
    lines = changed_settings(file, make_job(**ADAPTER | OTHER[key]))
    mine = [
        line
        for line in lines
        if line.startswith((f"changed: {key}", *(f"changed: {outer} " for outer in outer_keys(key))))
    ]
    assert mine or key in ("discrete_flow_shift",), lines
    assert not any("example.org" in line for line in lines)


def make_json(run: Any) -> str:
    from pydantic import TypeAdapter

    return TypeAdapter(type(run)).dump_json(run).decode()


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"optimizer": "AdamW8bit"}, {"optimizer": "PagedAdamW8bit"}, False),
        ({"optimizer": "AdamW8bit"}, {"optimizer": "PagedAdamW32bit"}, True),
        ({"optimizer": "AdamW", "optimizer_args": {"eps": 1e-6}}, {"optimizer_args": {"betas": [0.9, 0.99]}}, False),
        ({"optimizer": "Prodigy"}, {"optimizer_args": {"slice_p": 11}}, True),
        ({"optimizer": "my.own.Class", "optimizer_args": {"rank": 4}}, {"optimizer_args": {"rank": 8}}, True),
    ],
)
def test_what_an_optimizer_takes_along(
    before: dict[str, Any], now: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    found = problems(tmp_path, ADAPTER | before, now)
    assert bool(found) == refused


def test_a_refused_full_run_is_told_how_to_start_from_its_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_job())
    run.folder.root.mkdir(parents=True)
    run.write(())
    state = read_state(make_state(run.folder.states, 500))
    (problem,) = resume_problems(state, make_job(optimizer="Adafactor"))
    assert f"base: {state.model}, vae: /nowhere/vae, text_encoders: {{clip: /nowhere/text_encoder, t5: " in str(problem)
    (problem,) = resume_problems(state, make_job(method="lora", optimizer="AdamW8bit"))
    assert problem.key == "method"


# ---------------------------------------------------------------- going back


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """States of steps 250, 500, 750 and 1000; the oldest is thinned."""
    run = RunFolder(tmp_path)
    make_state(run.states, 250, whole=False)
    for step in (500, 750, 1000):
        make_state(run.states, step)
    run.samples.mkdir()
    for step in (500, 750):
        (run.samples / f"step-{step:06d}-00.png").write_bytes(b"png")
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 1100)))
    return run


def steps(run: RunFolder) -> list[int]:
    return [state.step for state in list_states(run.states)[0]]


def test_going_back_sets_aside_what_lies_beyond(folder: RunFolder) -> None:
    chosen = choose_state(folder, make_job(resume_from=500))
    assert chosen.state is not None
    assert chosen.state.step == 500
    assert steps(folder) == [250, 500]
    aside = folder.root / "set-aside" / "1"
    names = ["metrics-before.jsonl", "step-000750", "step-000750-00.png", "step-001000"]
    assert sorted(path.name for path in aside.iterdir()) == names
    assert read_state(aside / "step-001000").resumable
    assert chosen.notes == (
        f"going back to step 500: the states of steps 750, 1000, their samples and figures lie in {aside} now",
    )
    assert [path.name for path in folder.samples.iterdir()] == ["step-000500-00.png"]


def test_going_back_is_done_once_and_its_own_states_are_gone_on_from(folder: RunFolder) -> None:
    choose_state(folder, make_job(resume_from=500))
    make_state(folder.states, 600, resume_from=500)
    make_state(folder.states, 700, resume_from=500)
    chosen = choose_state(folder, make_job(resume_from=500))
    assert (chosen.state and chosen.state.step, chosen.notes) == (700, ())
    assert steps(folder) == [250, 500, 600, 700]
    again = choose_state(folder, make_job(resume_from=600))  # and back again, within the new line
    assert (again.state and again.state.step, steps(folder)) == (600, [250, 500, 600])


def test_its_own_states_stay_when_the_one_it_went_back_to_is_thinned_away(folder: RunFolder) -> None:
    choose_state(folder, make_job(resume_from=500))
    make_state(folder.states, 600, resume_from=500)
    (folder.states / folder_name(500)).rename(folder.root / "gone")
    chosen = choose_state(folder, make_job(resume_from=500))
    assert (chosen.state and chosen.state.step) == 600


def test_a_kill_in_the_middle_of_going_back_is_finished_by_the_next_start(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, done = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            choose_state(folder, make_job(resume_from=500))
    chosen = choose_state(folder, make_job(resume_from=500))
    assert (chosen.state and chosen.state.step, steps(folder)) == (500, [250, 500])
    moved = sorted(path.name for path in folder.root.glob("set-aside/*/step-00*") if path.is_dir())
    assert moved == ["step-000750", "step-001000"]


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (600, "there is no state of step 600. Whole are those of 500, 750, 1000"),
        (
            250,
            "the state of step 250 has no optimizer any more .* To start a new run from it: base: .*step-000250/model",
        ),
    ],
)
def test_there_is_nothing_to_go_back_to(step: int, told: str, folder: RunFolder) -> None:
    with pytest.raises(JobError, match=told):
        choose_state(folder, make_job(resume_from=step))
    assert steps(folder) == [250, 500, 750, 1000]


def test_a_damaged_state_is_not_gone_back_to_and_nothing_moves(folder: RunFolder) -> None:
    flip_a_bit(folder.states / folder_name(500) / "model.safetensors", 7)
    with pytest.raises(JobError, match="cannot go back to 500: step-000500/model"):
        choose_state(folder, make_job(resume_from=500))
    assert steps(folder) == [250, 500, 750, 1000]


def test_a_job_that_does_not_fit_moves_nothing(folder: RunFolder) -> None:
    with pytest.raises(JobError, match="optimizer"):
        choose_state(folder, make_job(resume_from=500, optimizer="Adafactor"))
    assert steps(folder) == [250, 500, 750, 1000]


def test_nothing_beyond(folder: RunFolder) -> None:
    assert beyond(list_states(folder.states)[0], 1000) == []
    chosen = choose_state(folder, make_job(resume_from=1000))
    assert (chosen.state and chosen.state.step, chosen.notes) == (1000, ())


def test_an_adapter_to_start_from_must_be_there(tmp_path: Path) -> None:
    job = make_job(method="lora", lora={"start": "runs/a/output/a.safetensors"})
    with pytest.raises(JobError, match=r"lora\.start: there is no file .*/runs/a/output/a"):
        refuse_absent_adapter(job, Volume(tmp_path))


@pytest.mark.parametrize(("rank", "told"), [(4, ""), (8, "its rank is 4, not 8, in .*: write that in the job")])
def test_an_adapter_to_start_from_must_be_the_jobs(rank: int, told: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", tensors_of(make_adapter(targets="attention"), "kohya"))
    job = make_job(method="lora", lora={"rank": rank, "targets": "attention", "start": "a.safetensors"})
    with pytest.raises(JobError, match=told) if told else nullcontext():
        refuse_unlike_adapter(job, Volume(tmp_path), SMALL)


def test_what_is_no_adapter_to_start_from_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"a web page")
    job = make_job(method="lora", lora={"start": "a.safetensors"})
    with pytest.raises(JobError, match=r"lora\.start: .*a\.safetensors is not a whole safetensors file"):
        refuse_unlike_adapter(job, Volume(tmp_path), SMALL)
