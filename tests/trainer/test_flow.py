"""The mathematics of flow matching, by hand numbers and against diffusers' own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from bootstrap.draws import Use, draw
from bootstrap.flux_shape import shift_of_tokens
from trainer.flow import (
    TimestepSampling,
    image_ids,
    loss_sum,
    mask_weights,
    noise_level,
    pack,
    shifted,
)


@pytest.mark.parametrize(("size", "shift"), [(512, 1.878), (768, 2.332), (1024, 3.158), (1280, 4.665)])
def test_flux_shifts_by_the_number_of_patches(size: int, shift: float) -> None:
    tokens = (size // 16) ** 2
    assert shift_of_tokens(tokens) == pytest.approx(shift, abs=0.0005)
    assert shift_of_tokens(tokens) == pytest.approx(math.exp(calculate_shift(tokens)))


def test_shifting_by_hand_numbers() -> None:
    assert shifted(0.5, 3) == 0.75
    assert shifted(0.2, 1) == pytest.approx(0.2)
    assert shifted(0.25, 3) == 0.5
    assert [shifted(end, 3.158) for end in (0.0, 1.0)] == [0.0, 1.0]


def sigmas(sampling: TimestepSampling, *, shift: float = 3.0, scale: float = 1.0, tokens: int = 4096) -> np.ndarray:
    """As a run of 5000 steps draws them, 4 images each."""
    return np.array(
        [
            noise_level(
                draw(42, Use.NOISE_LEVEL, step, place),
                sampling,
                tokens,
                discrete_flow_shift=shift,
                sigmoid_scale=scale,
            )
            for step in range(5000)
            for place in range(4)
        ]
    )


QUANTILES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
NORMAL = np.array([-1.644854, -0.67449, 0.0, 0.67449, 1.644854])  # of the standard normal distribution


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("sampling", "keys", "expected"),
    [
        ("uniform", {}, QUANTILES),
        ("sigmoid", {}, sigmoid(NORMAL)),
        ("sigmoid", {"scale": 2.0}, sigmoid(2 * NORMAL)),
        # s x / (1 + (s - 1) x) of a sigmoid is the sigmoid moved by log s
        ("shift", {"shift": 3.0}, sigmoid(NORMAL + math.log(3))),
        ("shift", {"shift": 3.0, "scale": 0.5}, sigmoid(0.5 * NORMAL + math.log(3))),
        ("flux_shift", {"tokens": 1024}, sigmoid(NORMAL + math.log(1.878))),
        ("flux_shift", {"tokens": 4096}, sigmoid(NORMAL + math.log(3.158))),
        ("flux_shift", {"tokens": 4096, "shift": 9.0}, sigmoid(NORMAL + math.log(3.158))),
    ],
)
def test_drawn_levels_have_the_quantiles_of_their_formula(
    sampling: TimestepSampling, keys: dict[str, float], expected: np.ndarray
) -> None:
    drawn = sigmas(sampling, **keys)  # type: ignore[arg-type]
    assert np.quantile(drawn, QUANTILES) == pytest.approx(expected, abs=0.015)
    assert drawn.min() > 0
    assert drawn.max() < 1


def test_patches_are_those_of_the_pipeline() -> None:
    latents = torch.randn(2, 16, 6, 10)
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 16, 6, 10))


def test_positions_are_those_of_the_pipeline() -> None:
    for height, width in ((6, 10), (10, 6), (64, 64)):
        expected = FluxPipeline._prepare_latent_image_ids(
            1, height // 2, width // 2, torch.device("cpu"), torch.float32
        )
        assert torch.equal(image_ids(height, width), expected)


def test_positions_and_patches_are_in_the_same_order() -> None:
    rows = torch.arange(6).repeat_interleave(10).reshape(1, 1, 6, 10)
    columns = torch.arange(10).repeat(6).reshape(1, 1, 6, 10)
    ids = image_ids(6, 10)
    assert torch.equal(pack(rows)[0, :, 0] // 2, ids[:, 1].long())
    assert torch.equal(pack(columns)[0, :, 0] // 2, ids[:, 2].long())


def test_the_loss_weighs_images_and_averages_within_one() -> None:
    target = torch.zeros(3, 4, 8)
    prediction = torch.stack([torch.full((4, 8), value) for value in (1.0, 2.0, 100.0)])
    weights = torch.tensor([1.0, 0.5, 0.0])
    assert loss_sum(prediction, target, torch.ones(3, 4, 4), weights).item() == 1 + 0.5 * 4


def test_the_loss_is_computed_in_float32() -> None:
    prediction = torch.full((1, 4, 8), 256.0, dtype=torch.bfloat16)
    target = torch.full((1, 4, 8), 255.0)
    loss = loss_sum(prediction, target, torch.ones(1, 4, 4), torch.ones(1))
    assert loss.dtype == torch.float32
    assert loss.item() == 1  # in bf16, 255 minus 256 squared and summed would not be


def test_the_loss_of_parts_adds_up_to_that_of_the_whole() -> None:
    whole = (torch.randn(5, 4, 8), torch.randn(5, 4, 8), torch.rand(5, 4, 4), torch.rand(5))
    parts = sum(loss_sum(*part) for part in zip(*(tensor.split(2) for tensor in whole), strict=True))
    assert torch.allclose(torch.as_tensor(parts), loss_sum(*whole))


def test_a_mask_weighs_the_same_places_as_on_the_latent() -> None:
    """Of a latent that is wrong by another amount everywhere, what the mask shows is counted."""
    height, width = 6, 10
    error = torch.arange(16 * height * width).reshape(1, 16, height, width).float() / 100
    mask = torch.rand(height, width, generator=torch.Generator().manual_seed(1))
    patches = pack(error)
    loss = loss_sum(patches, torch.zeros_like(patches), mask_weights(mask, 0.0, False)[None], torch.ones(1))
    assert loss.item() == pytest.approx((error.square() * mask).mean().item(), rel=1e-5)


def test_the_floor_and_the_norm_of_a_mask() -> None:
    mask = torch.zeros(4, 4)
    mask[:, :2] = 1
    assert mask_weights(mask, 0.0, False).unique().tolist() == [0, 1]
    assert mask_weights(mask, 0.2, False).unique().tolist() == pytest.approx([0.2, 1])
    assert mask_weights(mask, 0.2, True).mean().item() == pytest.approx(1)
    assert mask_weights(mask, 0.2, True).unique().tolist() == pytest.approx([1 / 3, 5 / 3])
    assert (mask_weights(torch.zeros(4, 4), 0.0, True) == 0).all(), "nothing is left of it: it counts nothing"
    assert (mask_weights(torch.ones(4, 4), 0.3, True) == 1).all()
