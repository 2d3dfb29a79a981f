from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from bootstrap.bases import FLUX_TINY
from bootstrap.cache import Cache, ShardWriter
from bootstrap.dataset import Item, scan
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume
from bootstrap.wanted import Crop, CroppedItem, Wanted, crops_of, latent_key, text_key
from jobs.schema import Job
from tests.runs import PLAN, make_weights
from trainer import encode
from trainer.encode import TextEncoders, encode_part, encode_pixels, load_vae, main, read_crops, read_masks

CPU = torch.device("cpu")
TEXTS = ["a red circle on a white background", "", "a blue star, 100% {wool|cotton}\nin two lines " * 20]


@pytest.fixture(scope="module")
def pipeline(flux_tiny: Path) -> FluxPipeline:
    return FluxPipeline.from_pretrained(flux_tiny, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def encoders(flux_tiny: Path) -> TextEncoders:
    return TextEncoders(make_weights(flux_tiny), CPU)


def test_texts_come_out_as_diffusers_pipeline_makes_them(pipeline: FluxPipeline, encoders: TextEncoders) -> None:
    outputs = encoders.encode(TEXTS, t5_mask=False)
    with torch.no_grad():  # as the pipeline's own call does
        embeds, pooled, _ = pipeline.encode_prompt(TEXTS, max_sequence_length=64)
    for row, output in enumerate(outputs):
        assert torch.equal(output["prompt_embeds"], embeds[row])
        assert torch.equal(output["pooled"], pooled[row])
        assert output["prompt_embeds"].dtype == output["pooled"].dtype == torch.bfloat16
        assert output["prompt_embeds"].shape == (64, FLUX_TINY.text_size)


def test_the_mask_is_kept_and_with_t5_mask_t5_is_told(encoders: TextEncoders) -> None:
    (plain,), (masked,) = encoders.encode(TEXTS[:1], False), encoders.encode(TEXTS[:1], True)
    count = int(plain["mask"].sum())
    assert plain["mask"].dtype == torch.bool
    assert plain["mask"].tolist() == [True] * count + [False] * (64 - count)
    assert 1 < count < 64
    assert torch.equal(plain["mask"], masked["mask"])
    assert torch.equal(plain["pooled"], masked["pooled"])
    tokens = encoders.t5_tokenizer(TEXTS[0], return_tensors="pt").input_ids
    with torch.inference_mode():
        alone = encoders.t5(tokens)[0][0]  # without padding there is nothing to look at
    assert torch.allclose(masked["prompt_embeds"][:count].float(), alone.float(), atol=0.05)
    assert not torch.allclose(plain["prompt_embeds"][:count].float(), alone.float(), atol=0.05)


def test_only_texts_beyond_t5s_length_are_too_long(encoders: TextEncoders) -> None:
    assert [encoders.too_long(text) for text in TEXTS] == [False, False, True]


def test_latents_are_the_mean_and_spread_that_the_vae_gives(pipeline: FluxPipeline, flux_tiny: Path) -> None:
    pixels = torch.randint(0, 256, (2, 64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    outputs = encode_pixels(load_vae(flux_tiny / "vae", CPU), pixels)
    images = pipeline.image_processor.preprocess([Image.fromarray(picture.numpy()) for picture in pixels])
    vae = pipeline.vae.to(torch.float32)
    with torch.inference_mode():
        posterior = vae.encode(images).latent_dist
    pipeline.vae.to(torch.bfloat16)
    for row, output in enumerate(outputs):
        assert output["mean"].shape == (16, 8, 12)
        assert output["mean"].dtype == output["spread"].dtype == torch.float16
        # float16 keeps 11 bits; bfloat16 weights of the pipeline, turned to float32, 8
        assert torch.allclose(output["mean"].float(), posterior.mean[row], rtol=0.02, atol=0.02)
        assert torch.allclose(output["spread"].float(), posterior.std[row], rtol=0.02, atol=0.02)


@pytest.fixture
def prepared(tmp_path: Path, flux_tiny: Path) -> Callable[..., RunFile]:
    """A function that scans the dataset as it is now and writes run.json."""
    volume = Volume(tmp_path)
    volume.create()
    folder = volume.datasets / "d"
    folder.mkdir()
    for index, size in enumerate([(128, 128), (160, 96), (128, 128)]):
        Image.new("RGB", size, (80 * index, 90, 100)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"picture {index}")

    def prepare(**keys: object) -> RunFile:
        wanted: dict[str, object] = {
            "name": "t",
            "base": "flux-tiny",
            "method": "full",
            "datasets": [{"path": "datasets/d"}],
            "resolution": 128,
            "bucket_step": 16,
            "caption_dropout": 0.1,
            "sample": {"prompts": ["a prompt"], "width": 128, "height": 128},
        }
        job = Job(**(wanted | keys))
        run = RunFile(job=job, plan=PLAN, weights=make_weights(flux_tiny), volume=tmp_path)
        run.write(scan(job, volume).items)
        return run

    return prepare


def all_keys(run: RunFile) -> list[str]:
    items = run.read_items()
    wanted = Wanted.of(run.job, run.plan, items, run.weights)
    return [*wanted.texts, *wanted.crops]


def test_the_command_encodes_what_is_missing_and_then_nothing(
    prepared: Callable[..., RunFile], capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared()
    assert main([str(run.folder.run_file)]) == 0
    assert "encoded 5/5 captions\n" in (told := capsys.readouterr().out)
    assert "encoded 3/3 images\n" in told
    cache = Cache(run.cache)
    assert cache.missing(all_keys(run)) == []
    item = run.read_items()[1]
    assert item.bucket == (160, 96)
    (crop,) = crops_of(item, run.job.datasets[0])
    assert cache.read(latent_key(item, crop, run.weights))["mean"].shape == (16, 12, 20)
    assert cache.read(text_key(item.caption, run.weights, False)).keys() == {"prompt_embeds", "mask", "pooled"}
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.cache.iterdir())
    assert main([str(run.folder.run_file)]) == 0
    assert capsys.readouterr().out == ""
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.cache.iterdir()) == before


def test_only_what_was_edited_is_computed_anew(
    prepared: Callable[..., RunFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encode_part(prepared(), 0, 1)
    capsys.readouterr()

    def told() -> list[str]:
        encode_part(prepared(), 0, 1)
        return capsys.readouterr().out.splitlines()

    folder = tmp_path / "datasets" / "d"
    (folder / "1.txt").write_text("another picture")
    assert told() == ["encoded 1/1 captions"]
    Image.new("RGB", (128, 128), "yellow").save(folder / "2.png")
    assert told() == ["encoded 1/1 images"]
    os.rename(folder / "0.png", folder / "first.png")
    os.rename(folder / "0.txt", folder / "first.txt")
    assert told() == []
    encode_part(prepared(bucket_step=64), 0, 1)  # 160 x 96 becomes 128 x 64; the squares stay as they are
    assert capsys.readouterr().out.splitlines() == ["encoded 1/1 images"]
    encode_part(prepared(t5_mask=True), 0, 1)  # the prompt of the sample is not concerned
    assert capsys.readouterr().out.splitlines() == ["encoded 4/4 captions"]


def test_two_parts_make_the_same_as_one(prepared: Callable[..., RunFile], tmp_path: Path) -> None:
    run = prepared()
    encode_part(run, 1, 2)
    assert 0 < len(Cache(run.cache).missing(all_keys(run))) < len(all_keys(run))
    encode_part(run, 0, 2)
    halves = Cache(run.cache)
    assert halves.missing(all_keys(run)) == []
    first = {key: halves.read(key) for key in all_keys(run)}
    for path in run.cache.glob("shard-*"):
        path.unlink()
    encode_part(run, 0, 1)
    whole = Cache(run.cache)
    for key, tensors in first.items():
        assert all(torch.equal(whole.read(key)[name], tensor) for name, tensor in tensors.items())


def test_a_part_goes_by_all_that_is_wanted_not_by_what_the_others_left(prepared: Callable[..., RunFile]) -> None:
    """Part 0 may have written everything of its own before part 1 looks: nothing may fall between them."""
    run = prepared()
    encode_part(run, 0, 2)
    encode_part(run, 1, 2)
    assert Cache(run.cache).missing(all_keys(run)) == []


def test_a_picture_that_changed_meanwhile_is_named(
    prepared: Callable[..., RunFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared()
    Image.new("RGB", (128, 128), "black").save(tmp_path / "datasets" / "d" / "0.png")
    assert main([str(run.folder.run_file)]) == 64
    assert "datasets/d/0.png: has changed" in capsys.readouterr().err


def test_a_full_volume_is_told(
    prepared: Callable[..., RunFile], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(writer: ShardWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "flush", full)
    assert main([str(prepared().folder.run_file)]) == 65
    assert "volume is full" in capsys.readouterr().err


def test_captions_that_are_cut_are_named_once(
    prepared: Callable[..., RunFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "datasets" / "d" / "2.txt").write_text("a very long caption " * 50)
    encode_part(prepared(), 0, 1)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "T5" in line]
    assert line == "encoded up to 64 T5 tokens only, 1 long captions: datasets/d/2.png"


def test_numbers_that_are_not_finite_are_refused(
    prepared: Callable[..., RunFile], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = encode.encode_pixels

    def broken(vae: object, pixels: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [{name: tensor / 0 for name, tensor in each.items()} for each in real(vae, pixels)]

    monkeypatch.setattr(encode, "encode_pixels", broken)
    assert main([str(prepared().folder.run_file)]) == 64
    assert "not finite" in capsys.readouterr().err


def test_a_text_encoder_that_lacks_tensors_is_refused(flux_tiny: Path, tmp_path: Path) -> None:
    from bootstrap.tensor_files import read_tensors, write_tensors
    from jobs.problem import JobError

    weights = make_weights(flux_tiny)
    (tmp_path / "config.json").write_bytes((weights.clip / "config.json").read_bytes())
    tensors = read_tensors(weights.clip / "model.safetensors")
    tensors.popitem()
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(JobError, match="lacks tensors of CLIPTextModel"):
        encode._load(encode.CLIPTextModel, tmp_path, CPU)


def test_the_empty_caption_is_there_for_dropout(prepared: Callable[..., RunFile]) -> None:
    run = prepared()
    encode_part(run, 0, 1)
    empty = Cache(run.cache).read(text_key("", run.weights, False))
    assert int(empty["mask"].sum()) <= 2


# ---------------------------------------------------------------- crops, mirrored pictures, masks


def test_crops_are_the_pictures_parts_mirrored_as_wanted(tmp_path: Path) -> None:
    """A picture with a colour in each quarter, twice as wide as its bucket."""
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, :, 0] = np.arange(128)
    picture = tmp_path / "a.png"
    Image.fromarray(pixels).save(picture)
    item = Item("a.png", hashlib.sha256(picture.read_bytes()).hexdigest(), "", 1, 128, 64, (64, 64))
    left, right = Crop((0.0, 0.0, 64.0, 64.0), False), Crop((64.0, 0.0, 128.0, 64.0), True)
    one, other = read_crops([CroppedItem(item, crop) for crop in (left, right)], Volume(tmp_path))
    assert one[5, :, 0].tolist() == list(range(64))
    assert other[5, :, 0].tolist() == list(range(127, 63, -1))
    assert one.is_contiguous()
    assert other.is_contiguous()


def test_masks_are_the_mean_of_the_pixels_of_each_place(tmp_path: Path) -> None:
    alpha = np.zeros((64, 64), np.uint8)
    alpha[:, :20] = 255  # two places and a half
    picture = np.dstack([np.full((64, 64, 3), 90, np.uint8), alpha])
    Image.fromarray(picture, "RGBA").save(tmp_path / "a.png")
    digest = hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    item = Item("a.png", digest, "", 1, 64, 64, (64, 64), mask="alpha")
    crops = [CroppedItem(item, Crop((0.0, 0.0, 64.0, 64.0), mirrored)) for mirrored in (False, True)]
    one, other = read_masks(crops, Volume(tmp_path))
    assert one.dtype == torch.uint8
    assert one.tolist() == [[255, 255, 128, 0, 0, 0, 0, 0]] * 8
    assert torch.equal(other, one.flip(1))


def test_every_crop_and_mask_is_cached_and_decoded_once(
    prepared: Callable[..., RunFile], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared(datasets=[{"path": "datasets/d", "flip": True, "random_crops": 2}], bucket_step=64)
    run.write(tuple(replace(item, mask="alpha") for item in run.read_items()))
    decoded: list[str] = []
    real = encode.read_item
    monkeypatch.setattr(encode, "read_item", lambda item, volume: (decoded.append(item.path), real(item, volume))[1])
    encode_part(run, 0, 1)
    # The squares fill their bucket, so that their two crops are one; 160 x 96 is cropped to 128 x 64.
    told = capsys.readouterr().out
    assert "encoded 8/8 images" in told
    assert "encoded 8/8 masks" in told
    assert len(decoded) == 2 * 3
    wanted = Wanted.of(run.job, run.plan, run.read_items(), run.weights)
    cache = Cache(run.cache)
    assert not wanted.beyond(cache)
    for key in wanted.masks:
        assert cache.read(key)["mask"].unique().tolist() == [255]
    one, mirrored = [key for key, crop in wanted.crops.items() if crop.item.bucket == (128, 128)][:2]
    assert cache.read(one)["mean"].shape == cache.read(mirrored)["mean"].shape


def test_captions_with_choices_are_encoded_once_each(
    prepared: Callable[..., RunFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "datasets" / "d" / "0.txt").write_text("a {red|blue} one\nanother")
    run = prepared(datasets=[{"path": "datasets/d", "wildcards": True, "multiline": True}], steps=40)
    encode_part(run, 0, 1)
    assert "encoded 7/7 captions" in capsys.readouterr().out  # 3 and 2, the empty one, the prompt
    encode_part(prepared(datasets=[{"path": "datasets/d", "multiline": True}], steps=40), 0, 1)
    assert "encoded 1/1 captions" in capsys.readouterr().out  # the line with its braces
