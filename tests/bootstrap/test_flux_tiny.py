"""flux-tiny is a FLUX as stock libraries know it, and the same bytes every time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bootstrap.bases import EMBEDDED, FLUX_TINY
from bootstrap.flux_shape import FluxShape
from bootstrap.flux_tiny import SCHNELL_GUIDANCE, SINGLE_FILE, WEIGHTS, make_flux_tiny
from bootstrap.layout import bfl_tensors, placements
from bootstrap.tensor_files import read_header, read_tensors
from tests.loopback_hub import LoopbackHub, Repo
from tiny.judge import load_judge
from tiny.scenes import draw, random_scenes
from tiny.score import draw_prompts, known_prompts, load_pipeline, score_prompts


def sums(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def pipeline(flux_tiny: Path) -> Any:
    from diffusers import FluxPipeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FluxPipeline.from_pretrained(flux_tiny, dtype=torch.bfloat16)


def test_every_make_gives_the_same_bytes(flux_tiny: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "bootstrap.flux_tiny", str(tmp_path / "again")], timeout=120)
    assert done.returncode == 0
    assert sums(tmp_path / "again") == sums(flux_tiny)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_what_exists_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="exists already"):
        make_flux_tiny(tmp_path / "mine", guidance=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_real_classes(pipeline: Any) -> None:
    names = {name: type(part).__name__ for name, part in pipeline.components.items() if part is not None}
    assert names == {
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "T5Tokenizer",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    }


def test_draws_a_picture(pipeline: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = pipeline(
        "a large white circle on a black background",
        width=128,
        height=128,
        num_inference_steps=6,
        max_sequence_length=32,
        generator=generator,
    )
    low, high = drawn.images[0].convert("L").getextrema()
    assert high - low > 30


def test_its_vae_gives_drawings_back(pipeline: Any) -> None:
    """And their latents have the spread that FLUX expects, once shifted and scaled."""
    scenes = random_scenes(np.random.default_rng(3), 8, unseen=True)
    values = {name: torch.from_numpy(value) for name, value in scenes.values.items()}
    pictures = draw(values, torch.rand(8, 32, generator=torch.Generator().manual_seed(3)), 128, 128)
    with torch.no_grad():
        latents = pipeline.vae.encode(pictures.bfloat16()).latent_dist
        again = pipeline.vae.decode(latents.mean).sample.float().clamp(-1, 1)
    assert 10 * torch.log10(4 / (again - pictures).square().mean()) > 23
    config = pipeline.vae.config
    scaled = (latents.sample().float() - config.shift_factor) * config.scaling_factor
    assert abs(scaled.mean()) < 0.15
    assert 0.85 < scaled.std() < 1.15


@pytest.mark.parametrize(("name", "guidance"), [("flux-tiny", 3.5), ("flux-tiny-schnell", 0.0)])
def test_both_draw_what_the_judge_reads_in_their_prompts(
    name: str, guidance: float, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name.replace("-", "_"))
    prompts = known_prompts(12)
    pictures = draw_prompts(load_pipeline(folder), prompts, guidance=guidance)
    score = score_prompts(load_judge(), pictures, prompts)
    assert min(score.shares[name] for name in ("count", "colour", "ground")) >= 0.8, score.shares


def test_schnell_is_the_other_one_with_its_guidance_for_good(flux_tiny: Path, flux_tiny_schnell: Path) -> None:
    from diffusers import FluxTransformer2DModel

    def velocity(folder: Path, guidance: torch.Tensor | None) -> torch.Tensor:
        model: Any = FluxTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
        random = torch.Generator().manual_seed(0)
        x, text = torch.randn(1, 16, 64, generator=random), torch.randn(1, 8, 128, generator=random)
        pooled, places = torch.randn(1, 64, generator=random), torch.zeros(16, 3)
        with torch.no_grad():
            return model(x, text, pooled, torch.tensor([0.5]), places, places[:8], guidance, return_dict=False)[0]

    told, built_in = velocity(flux_tiny, torch.tensor([SCHNELL_GUIDANCE])), velocity(flux_tiny_schnell, None)
    assert (told - built_in).abs().max() < 0.02 * told.abs().max()  # a bias rounded to bf16


@pytest.mark.slow
def test_a_gated_repository_gives_it_to_stock_diffusers_and_to_nobody_else(flux_tiny: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from diffusers import FluxPipeline\n"
        "pipeline = FluxPipeline.from_pretrained('painter/flux-tiny', token=sys.argv[1] or False)\n"
        "print(type(pipeline.transformer).__name__, pipeline.transformer.num_parameters())"
    )
    with LoopbackHub() as hub:
        hub.repos["painter/flux-tiny"] = Repo(flux_tiny, gated=True, readers=("hf_reader",))
        hub.tokens |= {"hf_reader", "hf_stranger"}
        said = {}
        for token in ("hf_reader", "hf_stranger"):
            environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / token)}
            environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
            said[token] = subprocess.run(
                [sys.executable, "-c", program, token], env=environment, capture_output=True, text=True, timeout=120
            )
    assert said["hf_reader"].stdout.split() == ["FluxTransformer2DModel", str(FLUX_TINY.parameters())], said
    assert said["hf_stranger"].returncode
    assert "restricted" in said["hf_stranger"].stderr


def test_the_card_is_one_as_the_hub_reads_it(flux_tiny: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(flux_tiny / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "diffusers"
    assert "FluxPipeline.from_pretrained" in card.text


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) < 24e6


@pytest.mark.parametrize("name", EMBEDDED)
def test_shape_and_tensors(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name.replace("-", "_"))
    shape = FluxShape.from_config_file(folder / "transformer" / "config.json")
    assert shape == EMBEDDED[name]
    assert shape.width % 256 == 0
    single = read_header(folder / SINGLE_FILE).tensors
    assert {name: entry.shape for name, entry in single.items()} == bfl_tensors(shape)
    assert {entry.dtype for entry in single.values()} == {torch.bfloat16}


def test_both_layouts_hold_the_same_numbers(flux_tiny: Path) -> None:
    shards = sorted((flux_tiny / "transformer").glob("*.safetensors"))
    assert len(shards) == 3
    parts = {name: tensor for shard in shards for name, tensor in read_tensors(shard).items()}
    single = read_tensors(flux_tiny / SINGLE_FILE)
    assert parts.keys() == FLUX_TINY.tensors().keys()
    for name, placement in placements(FLUX_TINY).items():
        for rows in placement:
            here = parts[name][rows.first : rows.first + rows.count]
            there = single[rows.file_name][rows.file_first : rows.file_first + rows.count]
            assert torch.equal(here, there), name


def test_settings_of_the_real_one(pipeline: Any, flux_tiny_schnell: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    vae = pipeline.vae.config
    assert (vae.latent_channels, vae.scaling_factor, vae.shift_factor) == (16, 0.3611, 0.1159)
    assert (vae.use_quant_conv, vae.use_post_quant_conv) == (False, False)
    assert pipeline.vae_scale_factor == 8
    assert (pipeline.scheduler.config.use_dynamic_shifting, pipeline.scheduler.config.shift) == (True, 3.0)
    schnell = FlowMatchEulerDiscreteScheduler.from_pretrained(flux_tiny_schnell / "scheduler")
    assert (schnell.config.use_dynamic_shifting, schnell.config.shift) == (False, 1.0)


def test_any_caption_has_words(pipeline: Any) -> None:
    text = "pprflwr: a RED circle (no. 7), on {white|grey} paper, 100% 'wool'"
    t5 = pipeline.tokenizer_2(text).input_ids
    assert pipeline.tokenizer_2.unk_token_id not in t5
    assert t5[-1] == 1
    assert pipeline.tokenizer_2("red circle").input_ids == pipeline.tokenizer_2("red  circle").input_ids
    clip = pipeline.tokenizer(text).input_ids
    assert (clip[0], clip[-1]) == (pipeline.tokenizer.bos_token_id, pipeline.tokenizer.eos_token_id)
    assert pipeline.tokenizer.decode(clip, skip_special_tokens=True).startswith("pprflwr : a red circle")
    assert (pipeline.tokenizer.model_max_length, pipeline.tokenizer_2.model_max_length) == (77, 32)


def test_text_changes_what_the_encoders_say(pipeline: Any) -> None:
    with torch.no_grad():
        one, pooled_one, _ = pipeline.encode_prompt("a red circle", None, max_sequence_length=32)
        two, pooled_two, _ = pipeline.encode_prompt("a blue star", None, max_sequence_length=32)
    for a, b in ((one, two), (pooled_one, pooled_two)):
        assert 0.3 < a.float().std() < 3
        assert (a - b).float().std() > 0.3


def test_loads_again_as_fast_tokenizers(flux_tiny: Path) -> None:
    from transformers import AutoTokenizer, T5TokenizerFast

    fast = T5TokenizerFast.from_pretrained(flux_tiny / "tokenizer_2")
    auto = AutoTokenizer.from_pretrained(flux_tiny / "tokenizer_2")
    assert fast("a red circle").input_ids == auto("a red circle").input_ids
