"""flux-tiny is a FLUX as stock libraries know it, and the same bytes every time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.bases import EMBEDDED, FLUX_TINY
from bootstrap.flux_shape import FluxShape
from bootstrap.flux_tiny import SINGLE_FILE, make_flux_tiny
from bootstrap.layout import bfl_tensors, placements
from bootstrap.tensor_files import read_header, read_tensors


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
        "a red circle", width=64, height=64, num_inference_steps=2, max_sequence_length=64, generator=generator
    )
    low, high = drawn.images[0].convert("L").getextrema()
    assert high - low > 30


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
    assert (pipeline.tokenizer.model_max_length, pipeline.tokenizer_2.model_max_length) == (77, 64)


def test_text_changes_what_the_encoders_say(pipeline: Any) -> None:
    with torch.no_grad():
        one, pooled_one, _ = pipeline.encode_prompt("a red circle", None, max_sequence_length=64)
        two, pooled_two, _ = pipeline.encode_prompt("a blue star", None, max_sequence_length=64)
    for a, b in ((one, two), (pooled_one, pooled_two)):
        assert 0.3 < a.float().std() < 3
        assert (a - b).float().std() > 0.3


def test_loads_again_as_fast_tokenizers(flux_tiny: Path) -> None:
    from transformers import AutoTokenizer, T5TokenizerFast

    fast = T5TokenizerFast.from_pretrained(flux_tiny / "tokenizer_2")
    auto = AutoTokenizer.from_pretrained(flux_tiny / "tokenizer_2")
    assert fast("a red circle").input_ids == auto("a red circle").input_ids
