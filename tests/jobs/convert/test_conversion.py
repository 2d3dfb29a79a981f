"""Realistic files of the three tools, written for these tests, become jobs; no key of theirs is dropped in silence."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bootstrap.estimate import adapter_layers, linear_layers
from bootstrap.flux_shape import FluxShape
from bootstrap.lora_targets import adapters_of
from jobs.convert import ai_toolkit, kohya_gui, sd_scripts
from jobs.convert.conversion import Conversion, convert
from jobs.convert.draft import FATES, MAPPED, NOT_KNOWN, NOT_NEEDED, NOT_SUPPORTED
from jobs.load import parse_job
from jobs.problem import JobError

FILES = Path(__file__).parent / "files"
ALL = (
    "gui-lora.json",
    "gui-full.json",
    "scripts-lora.toml",
    "scripts-full.toml",
    "toolkit-lora.yaml",
    "toolkit-full.json",
)


def document(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)


def leaves(value: Any, place: str = "") -> Iterator[str]:
    """Every key of a document that holds a value, by its place; a list of groups is gone into, any other is a value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{place}.{key}" if place else str(key))
    elif place.rpartition(".")[2] in ("datasets", "subsets", "process") and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{place}[{index}]")
    else:
        yield place


def keys_of(name: str) -> list[str]:
    keys = [key.removeprefix("config.process[0].") for key in leaves(document(FILES / name))]
    if name == "scripts-lora.toml":
        keys += leaves(document(FILES / "scripts-datasets.toml"))
    return keys


def fates(done: Conversion) -> dict[str, str]:
    return {fate.given.key: fate.kind for fate in done.fates}


def told(done: Conversion, key: str) -> str:
    return next(fate.told for fate in done.fates if fate.given.key == key)


@pytest.mark.parametrize("name", ALL)
def test_every_key_has_one_fate_and_stands_in_the_report(name: str) -> None:
    done = convert(FILES / name)
    counts = Counter(fate.given.key for fate in done.fates)
    assert set(counts.values()) == {1}
    assert {fate.kind for fate in done.fates} <= set(FATES)
    for key in keys_of(name):
        # A group of options, written as one text, is told option by option.
        own = [told for told in counts if told == key or told.startswith((f"{key}.", f"{key}: "))]
        assert own, key
        assert all(told in done.report.replace("\n", " ").replace("       ", "") for told in own)


@pytest.mark.parametrize("name", ALL)
def test_no_real_key_is_unknown(name: str) -> None:
    unknown = [key for key, kind in fates(convert(FILES / name)).items() if kind == NOT_KNOWN]
    assert unknown == (["datasets[1].subsets[2].num_repaets"] if name == "scripts-lora.toml" else [])


@pytest.mark.parametrize("name", ALL)
def test_the_job_loads_and_reads_like_one(name: str) -> None:
    done = convert(FILES / name)
    assert parse_job(done.text).job == done.loaded.job
    assert all(len(line) <= 120 for line in done.text.splitlines())
    lines = [line for line in done.text.splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("name: ")
    assert lines[1].startswith("base: ")


@pytest.mark.parametrize(
    "table",
    [sd_scripts.TABLE, (*sd_scripts.TABLE, *kohya_gui.TABLE), ai_toolkit.TABLE],
    ids=["scripts", "gui", "toolkit"],
)
def test_a_single_keys_rule_stands_once(table: sd_scripts.Table) -> None:
    """Keys of several rules are those that one decides with, and another tells of where it does not."""
    counts = Counter(name for names, _ in table for name in names.split())
    shared = {"unet_lr", "full_bf16", "mixed_precision", "text_encoder_lr"}
    assert {name for name, count in counts.items() if count > 1} <= shared


# ---------------------------------------------------------------- the kohya_ss GUI


def test_a_lora_of_the_gui() -> None:
    job = convert(FILES / "gui-lora.json").loaded.job
    assert (job.name, job.base, job.method) == ("Blue-Ceramics-v2", "black-forest-labs/FLUX.1-dev", "lora")
    assert job.lora is not None
    assert (job.lora.rank, job.lora.alpha) == (32, 16)
    (entry,) = job.datasets
    assert (entry.path, entry.flip, entry.shuffle_tags, entry.keep_tags) == ("datasets/img", True, True, 1)
    assert (job.steps, job.epochs, job.images_per_step) == (1800, None, 2 * 2 * 2)
    assert (job.resolution, job.bucket_step, job.upscale) == (768, 64, False)
    assert job.learning_rate == 3e-4  # unet_lr wins
    assert (job.schedule, job.schedule_args, job.warmup) == ("cosine_with_restarts", {"cycles": 2}, 90)
    assert (job.optimizer, job.optimizer_args, job.weight_decay) == ("AdamW8bit", {"betas": [0.9, 0.95]}, 0.1)
    assert (job.timestep_sampling, job.discrete_flow_shift, job.sigmoid_scale) == ("shift", 3.1582, 1.2)
    assert (job.guidance, job.caption_dropout, job.seed, job.t5_mask) == (1, 0.1, 1234, False)
    assert (job.save.every, job.save.weights, job.save.states) == (300, 4, 2)
    assert job.sample.prompts == ("a vase in blue ceramics", "blue ceramics: a teapot on a window sill --steps 30")
    assert (job.sample.width, job.sample.height, job.sample.steps, job.sample.seed) == (832, 1216, 24, 7)


def test_a_full_model_of_the_gui() -> None:
    done = convert(FILES / "gui-full.json")
    job = done.loaded.job
    assert job.method == "full"
    assert job.base == "/workspace/models/my-finetune-v3.safetensors"
    assert job.text_encoders is not None
    assert (job.steps, job.epochs, job.images_per_step) == (None, 200, 4)
    assert job.optimizer == "transformers.optimization.Adafactor"
    assert job.optimizer_args == {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    assert job.max_grad_norm is None  # fused there
    assert job.warmup == 0  # constant has none there
    assert (job.guidance, job.t5_mask, job.upscale) == (3.5, True, True)
    assert (job.timestep_sampling, job.discrete_flow_shift) == ("shift", 3)  # nearest to sigma
    assert fates(done)["model_prediction_type"] == NOT_SUPPORTED
    assert [entry.path for entry in job.datasets] == ["/workspace/datasets/img", "/workspace/reg"]
    assert (job.vae, job.text_encoders.clip) == (
        "/workspace/models/ae.safetensors",
        "/workspace/models/clip_l.safetensors",
    )
    assert fates(done)["clip_l"] == NOT_NEEDED  # SD3's


def test_a_rate_found_with_plain_bf16_is_flagged() -> None:
    done = convert(FILES / "gui-full.json")
    assert done.loaded.job.learning_rate == 2e-5
    (line,) = [line for line in done.text.splitlines() if line.startswith("learning_rate")]
    assert "plain bf16" in line
    assert "try 1e-5" in line
    assert "0.0078" in done.report  # where 2e-5 is lost


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "Adafactor", "flux_fused_backward_pass": True},  # rounds stochastically there too
        {"full_bf16": False, "mixed_precision": "no"},
    ],
)
def test_a_rate_found_otherwise_is_not(tmp_path: Path, change: dict[str, Any]) -> None:
    assert "plain bf16" not in convert(changed(tmp_path, "gui-full.json", change)).text


def changed(tmp_path: Path, name: str, change: Mapping[str, Any], *without: str) -> Path:
    """A JSON file of the GUI with some keys changed, or without some."""
    keys = {key: value for key, value in (document(FILES / name) | change).items() if key not in without}
    file = tmp_path / name
    file.write_text(json.dumps(keys), encoding="utf-8")
    return file


def test_no_secret_leaves_the_file(tmp_path: Path) -> None:
    secret = "hf_" + "abcdefghij" * 3 + "klmn"
    change = {
        "huggingface_token": secret,
        "wandb_api_key": "0123456789" * 4,
        "training_comment": f"with {secret}",
        "additional_parameters": f"--huggingface_token {secret} --notes {secret}",
        "sample_prompts": f"a picture of {secret}",
    }
    done = convert(changed(tmp_path, "gui-lora.json", change))
    assert secret not in done.text + done.report
    assert "0123456789" not in done.text + done.report


def test_gpus_multiply_what_a_step_holds(tmp_path: Path) -> None:
    one = changed(tmp_path, "gui-full.json", {"gradient_accumulation_steps": 2})
    assert convert(one).loaded.job.images_per_step == 8
    done = convert(one, gpus=4)
    assert done.loaded.job.images_per_step == 32
    assert "4 x 2 accumulated x 4 GPUs" in done.text
    assert "--gpus N" in convert(one).report
    assert "--gpus N" not in done.report
    assert convert(FILES / "gui-lora.json", gpus=1).loaded.job.images_per_step == 4  # wins over num_processes


def test_epochs_become_steps_where_the_pictures_are(tmp_path: Path) -> None:
    change = {"save_last_n_epochs": 3, "lr_scheduler": "cosine", "lr_warmup": 10}
    drawn = {"sample_every_n_epochs": 2, "sample_prompts": "a cat"}
    file = changed(tmp_path, "gui-full.json", change | drawn)
    seen: list[list[str]] = []

    def count(paths: Any) -> int:
        seen.append(list(paths))
        return 50

    done = convert(file, count=count)
    assert seen == [[path, path] for path in ("/workspace/datasets/img", "/workspace/reg")]
    assert done.loaded.job.sample.every == 2 * 25  # 50 pictures twice, 4 a step
    assert (done.loaded.job.save.every, done.loaded.job.save.weights) == ("25 epochs", 3)
    assert done.loaded.job.warmup == 500  # a tenth of 200 epochs of 25 steps
    without = convert(file)
    assert without.loaded.job.sample.every == 250
    assert without.loaded.job.save.every == "25 epochs"
    assert fates(without)["sample_every_n_epochs"] == NOT_SUPPORTED
    assert "images x repeats / images_per_step" in told(without, "sample_every_n_epochs")


def test_what_our_own_loader_refuses_is_told_and_left_out(tmp_path: Path) -> None:
    change = {"network_dim": 5000, "caption_dropout_rate": 1.5, "learning_rate": "fast", "unet_lr": 0, "seed": 1e30}
    done = convert(changed(tmp_path, "gui-lora.json", change))
    kinds = fates(done)
    assert [kinds[key] for key in ("network_dim", "caption_dropout_rate", "learning_rate")] == [NOT_SUPPORTED] * 3
    assert kinds["seed"] == NOT_SUPPORTED
    assert "5000" in told(done, "network_dim")


def test_options_in_additional_parameters_count() -> None:
    done = convert(FILES / "gui-lora.json")
    assert fates(done)["additional_parameters: --sigmoid_scale"] == MAPPED
    assert fates(done)["additional_parameters: --log_prefix"] == NOT_NEEDED


def test_the_options_of_an_optimizer_go_with_it(tmp_path: Path) -> None:
    change = {"optimizer": "DAdaptAdam", "optimizer_args": "decouple=True weight_decay=0.2"}
    done = convert(changed(tmp_path, "gui-lora.json", change))
    assert (done.loaded.job.optimizer, done.loaded.job.optimizer_args) == ("AdamW", {})
    assert done.loaded.job.weight_decay == 0.01
    assert {fates(done)[key] for key in ("optimizer", "optimizer_args.decouple")} == {NOT_SUPPORTED}


def test_another_kind_of_adapter_is_told(tmp_path: Path) -> None:
    done = convert(changed(tmp_path, "gui-lora.json", {"LoRA_type": "LyCORIS/LoKr"}))
    assert done.loaded.job.method == "lora"
    assert fates(done)["LoRA_type"] == NOT_SUPPORTED


@pytest.mark.parametrize(
    ("args", "some", "none"),
    [
        ({}, "transformer_blocks.0.norm1.linear", "x_embedder"),
        ({"train_blocks": "double"}, "transformer_blocks.18.attn.to_q", "single_transformer_blocks.0.proj_out"),
        ({"train_blocks": "single"}, "single_transformer_blocks.37.norm.linear", "transformer_blocks.0.attn.to_q"),
        ({"img_attn_dim": "0"}, "transformer_blocks.3.attn.add_q_proj", "transformer_blocks.3.attn.to_out.0"),
        ({"txt_attn_dim": "0"}, "transformer_blocks.3.attn.to_out.0", "transformer_blocks.3.attn.to_add_out"),
        ({"single_dim": "0"}, "single_transformer_blocks.5.norm.linear", "single_transformer_blocks.5.attn.to_q"),
        ({"img_mlp_dim": "0"}, "transformer_blocks.5.ff_context.net.2", "transformer_blocks.5.ff.net.0.proj"),
        (
            {"train_double_block_indices": "0,4-5"},
            "transformer_blocks.5.ff.net.2",
            "transformer_blocks.6.ff.net.2",
        ),
    ],
)
def test_layers_are_those_that_the_gui_trains(tmp_path: Path, args: dict[str, str], some: str, none: str) -> None:
    dims = ("img_mod_dim", "txt_mod_dim", "single_mod_dim")
    job = convert(changed(tmp_path, "gui-lora.json", dict.fromkeys(dims, "") | args)).loaded.job
    assert job.lora is not None
    layers = adapter_layers(FluxShape(), job.lora.targets)
    assert some in layers
    assert none not in layers
    for pattern in job.lora.targets:
        assert adapter_layers(FluxShape(), (pattern,)), pattern
    if not args:
        everything = set(adapter_layers(FluxShape(), "all-linear"))
        assert {name for name in everything if "transformer_blocks." in name} == set(layers)


def test_parts_of_another_rank_dropout_and_a_start_go_with_it(tmp_path: Path) -> None:
    change = {"img_mlp_dim": "8", "network_dropout": 0.1, "network_weights": "C:\\loras\\old.safetensors"}
    done = convert(changed(tmp_path, "gui-lora.json", change))
    lora = done.loaded.job.lora
    assert lora is not None
    layers = adapters_of(linear_layers(FluxShape()), lora)
    plain, special = layers["transformer_blocks.0.attn.to_q"], layers["transformer_blocks.0.ff.net.2"]
    assert (plain.rank, special.rank) == (32, 8)
    assert special.scale * 8 == plain.scale * 32, "one alpha"
    assert (lora.dropout, lora.start) == (0.1, "models/old.safetensors")
    assert {fates(done)[key] for key in change} == {MAPPED}


# ---------------------------------------------------------------- sd-scripts


def test_a_lora_of_sd_scripts_with_its_datasets() -> None:
    done = convert(FILES / "scripts-lora.toml")
    job = done.loaded.job
    assert job.base == "black-forest-labs/FLUX.1-schnell"
    assert [(entry.path, entry.repeats, entry.caption, entry.resolution) for entry in job.datasets] == [
        ("/data/otter", 3, "an otter", (512, 1024)),  # the same folder at two resolutions
        ("datasets/water", 1, None, (512, 1024)),
        ("/data/animals", 1, None, 1024),
    ]
    assert [(entry.prefix, entry.weight, entry.wildcards, entry.multiline) for entry in job.datasets] == [
        (None, 1, False, False),
        ("photo of", 1, True, True),
        (None, 0.5, False, False),
    ]
    assert job.images_per_step == 16  # 4 in the first dataset x 4 accumulated
    assert (job.epochs, job.steps) == (40, None)
    assert (job.optimizer, job.learning_rate, job.weight_decay) == ("Prodigy", 1, 0.01)
    assert job.optimizer_args["d_coef"] == 2
    assert job.lora is not None
    assert job.lora.targets == tuple(f"single_transformer_blocks.{number}.*" for number in (7, 20, 21, 22))
    assert job.sample.prompts == ("an otter on a surfboard", "an otter reading a newspaper --seed 2")
    assert (job.sample.guidance, job.sample.seed) == (3.5, 1)
    kinds = fates(done)
    assert kinds["general.caption_extension"] == NOT_NEEDED
    assert kinds["training.resolution"] == NOT_NEEDED  # every dataset has its own
    assert kinds["datasets[1].batch_size"] == NOT_SUPPORTED
    assert kinds["datasets[1].subsets[1].is_reg"] == MAPPED
    assert kinds["general.keep_tokens_separator"] == NOT_NEEDED  # nothing is shuffled
    assert any("regularisation" in line for line in done.text.splitlines() if "animals" in line)
    assert kinds["logging.wandb_api_key"] == NOT_NEEDED


def test_a_full_model_of_sd_scripts() -> None:
    job = convert(FILES / "scripts-full.toml").loaded.job
    assert job.datasets[0].path == "datasets/paintings"
    assert (job.optimizer, job.optimizer_args, job.weight_decay) == ("PagedAdamW8bit", {"eps": 1e-7}, 0.01)
    assert (job.schedule, job.schedule_args, job.warmup) == ("polynomial", {"power": 0.5}, 100)
    assert (job.timestep_sampling, job.resolution, job.save.weights) == ("sigmoid", 768, 2)
    assert job.sample.prompts == ()


def test_the_dataset_file_may_be_given_or_be_absent(tmp_path: Path) -> None:
    text = (FILES / "scripts-lora.toml").read_text(encoding="utf-8").replace("scripts-datasets", "elsewhere")
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    assert convert(tmp_path / "a.toml", datasets=FILES / "scripts-datasets.toml").loaded.job.datasets[0].repeats == 3
    absent = convert(tmp_path / "a.toml")
    assert absent.loaded.job.datasets[0].path == "datasets/my-pictures"
    assert "--dataset" in told(absent, "training.dataset_config")


def test_prompts_of_toml_and_json(tmp_path: Path) -> None:
    toml = "[prompt]\nwidth = 640\nsample_steps = 12\n" + "".join(
        f'[[prompt.subset]]\nprompt = "{prompt}"\n' for prompt in ("one", "two")
    )
    (tmp_path / "p.toml").write_text(toml, encoding="utf-8")
    (tmp_path / "p.json").write_text('[{"prompt": "three", "scale": 4, "seed": 5}]', encoding="utf-8")
    found = []
    for name in ("p.toml", "p.json"):
        text = (FILES / "scripts-full.toml").read_text(encoding="utf-8").replace("prompts-that-are-not-here.txt", name)
        (tmp_path / "a.toml").write_text(text, encoding="utf-8")
        found.append(convert(tmp_path / "a.toml").loaded.job.sample)
    assert (found[0].prompts, found[0].width, found[0].steps) == (("one", "two"), 640, 12)
    assert (found[1].prompts, found[1].guidance, found[1].seed) == (("three",), 4, 5)
    assert found[0].every == 500


# ---------------------------------------------------------------- ai-toolkit


def test_a_lora_of_ai_toolkit() -> None:
    done = convert(FILES / "toolkit-lora.yaml")
    job = done.loaded.job
    assert (job.name, job.base, job.method) == ("p3r5on_v1", "black-forest-labs/FLUX.1-dev", "lora")
    assert [(entry.path, entry.trigger, entry.repeats, entry.resolution) for entry in job.datasets] == [
        ("/workspace/ai-toolkit/datasets/person", "p3r5on", 1, (512, 768, 1024)),
        ("datasets/clothes", "p3r5on", 2, 1024),
    ]
    assert (job.datasets[1].caption, job.datasets[1].flip) == ("a dress", True)
    # gradient_accumulation_steps counts every part as a step there
    assert (job.images_per_step, job.steps, job.save.every, job.sample.every, job.warmup) == (2, 2000, 125, 125, 50)
    assert (job.timestep_sampling, job.caption_dropout, job.weight_decay) == ("uniform", 0.05, 1e-4)
    assert job.sample.prompts[0] == "p3r5on holding a sign that says 'I LOVE PROMPTS!'"
    assert (job.sample.guidance, job.sample.seed) == (4, 42)
    assert job.lora is not None
    assert set(adapter_layers(FluxShape(), job.lora.targets)) == {
        f"single_transformer_blocks.{number}.proj_out" for number in (7, 20)
    }
    kinds = fates(done)
    assert kinds["train.ema_config.use_ema"] == kinds["train.ema_config.ema_decay"] == MAPPED
    assert job.ema is not None
    assert (job.ema.decay, job.ema.every) == (0.99, 1)
    assert kinds["model.quantize"] == NOT_NEEDED


def test_a_full_model_of_ai_toolkits_web_page() -> None:
    job = convert(FILES / "toolkit-full.json").loaded.job
    assert (job.method, job.images_per_step, job.steps) == ("full", 4, 3000)
    assert (job.timestep_sampling, job.resolution) == ("flux_shift", (512, 768))
    assert job.optimizer_args == {"relative_step": False, "scale_parameter": False}
    assert job.sample.prompts == ("a cat in a hat", "a house by the sea --width 768 --seed 9")
    assert (job.sample.width, job.sample.seed) == (1024, 42)


# ---------------------------------------------------------------- any file at all


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "0", "1e-4", "512,512", "a=b", "C:\\x", "none", "all", "--w 5"]),
    st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(name=st.sampled_from(ALL), data=st.data())
def test_whatever_the_values_are_the_job_loads_and_nothing_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    source = document(FILES / name)
    flat = source if "config" not in source else source["config"]["process"][0]["train"]
    if name == "scripts-lora.toml":
        flat = source["training"]
    for key in data.draw(st.lists(st.sampled_from(sorted(flat)), max_size=6, unique=True)):
        flat[key] = data.draw(VALUES)
    flat[data.draw(st.text("abc_.", min_size=1, max_size=8))] = data.draw(VALUES)
    file = tmp_path_factory.mktemp("any") / "a.json"
    file.write_text(json.dumps(source), encoding="utf-8")
    try:
        done = convert(file)
    except JobError:  # another model, by its switch
        return
    assert parse_job(done.text).job == done.loaded.job
    counts = Counter(fate.given.key for fate in done.fates)
    assert set(counts.values()) == {1}
    for key in leaves(source):
        key = key.removeprefix("config.process[0].")
        assert any(told.startswith((f"{key}.", f"{key}: ")) or key.startswith(told) for told in counts), key


# ---------------------------------------------------------------- files that cannot be converted


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "is empty"),
        ("a.json", '{"LoRA_type": "Flux1",', "this is not JSON"),
        ("a.json", "[1, 2]", "not keys with values"),
        ("a.json", '{"a": 1}', "is no training file of a tool known here"),
        ("a.json", '{"training_method": 1, "model_type": 2, "concepts": 3}', "OneTrainer"),
        ("a.yaml", "name: a\nbase: b\nmethod: lora\ndatasets: []\n", "a job of fluxpod already"),
        ("a.yaml", "a: b\n\tc: d\n", "tab"),
        ("a.yaml", "job: extension\nconfig: {name: a, process: []}\n", "no process"),
        ("a.yaml", "job: extension\nconfig: {process: [{type: slider}]}\n", "slider"),
        ("a.yaml", "job: extension\nconfig: {process: [{type: sd_trainer, model: {is_xl: true}}]}\n", "SDXL"),
        ("a.yaml", "job: extension\nconfig: {process: [{type: sd_trainer, model: {arch: wan21}}]}\n", "wan21"),
        ("a.toml", "a = ", "is not TOML"),
        ("a.toml", 'x = "C:\\pictures"\n', "single quotes"),
        ("a.toml", "[[datasets]]\nresolution = 512\n", "datasets only"),
        ("a.toml", 'output_name = "a"\nnetwork_module = "networks.lora"\n', "Stable Diffusion"),
        ("a.toml", 'output_name = "a"\nmodel_type = "chroma"\nae = "x"\n', "chroma"),
        ("a.png", "\x89", "ends with .png"),
    ],
)
def test_what_cannot_be_converted_is_told(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(JobError) as caught:
        convert(tmp_path / name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "model"),
    [
        ({"sdxl": True}, "SDXL"),
        ({"sd3_checkbox": True}, "Stable Diffusion 3"),
        ({"flux1_checkbox": False}, "Stable Diffusion"),
        ({"v2": True}, "Stable Diffusion 2"),
    ],
)
def test_another_model_is_told(tmp_path: Path, change: dict[str, Any], model: str) -> None:
    with pytest.raises(JobError) as caught:
        convert(changed(tmp_path, "gui-lora.json", change))
    assert model in str(caught.value)
    assert "FLUX.1 only" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is not there"):
        convert(tmp_path / "absent.json")
    with pytest.raises(JobError, match="is a folder"):
        convert(tmp_path)
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError):
        convert(tmp_path / "a.toml")


def test_a_share_held_out_becomes_validation(tmp_path: Path) -> None:
    held = {"validation_split": 0.7, "validate_every_n_steps": 100, "validation_seed": 3}
    validation = convert(changed(tmp_path, "gui-lora.json", held)).loaded.job.validation
    assert validation is not None
    assert (validation.fraction, validation.every) == (0.5, 100)
    none = changed(tmp_path, "gui-lora.json", {"validation_split": 0.0, "validate_every_n_steps": 100})
    assert convert(none).loaded.job.validation is None
