"""The model as it is trained: filled from either layout, and told what the formulas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel

from bootstrap.bases import FLUX_TINY, FLUX_TINY_SCHNELL
from bootstrap.flux_shape import FluxShape
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.layout import bfl_tensors
from bootstrap.plan import Plan
from tests.runs import PLAN, make_job, make_world
from trainer.data import Batch
from trainer.flow import image_ids
from trainer.model import Layout, build_model, fill, predict, prepare, rows_in_bfl, sources
from trainer.world import World


@pytest.fixture
def world(control: dist.ProcessGroup) -> World:
    return make_world(control)


def files_of(folder: Path, layout: Layout) -> list[Path]:
    return [folder / SINGLE_FILE] if layout == "bfl" else sorted((folder / "transformer").glob("*.safetensors"))


def build(
    folder: Path, world: World, layout: Layout = "bfl", shape: FluxShape = FLUX_TINY, **keys: Any
) -> FluxTransformer2DModel:
    return build_by(PLAN, folder, world, layout, shape, **keys)


def build_by(
    plan: Plan, folder: Path, world: World, layout: Layout = "bfl", shape: FluxShape = FLUX_TINY, **keys: Any
) -> FluxTransformer2DModel:
    places = sources(shape, files_of(folder, layout), layout)
    return build_model(make_job(**keys), plan, shape, world, lambda model: fill(model, places, world))


def make_batch(images: int = 2, shape: FluxShape = FLUX_TINY, text_tokens: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    return Batch(
        noisy=normal(images, 6, shape.channels).bfloat16(),
        target=normal(images, 6, shape.channels),
        sigma=torch.linspace(0.25, 0.75, images),
        text=normal(images, text_tokens, shape.text_size).bfloat16(),
        pooled=normal(images, shape.pooled_size).bfloat16(),
        text_mask=torch.arange(text_tokens)[None] < torch.arange(2, images + 2)[:, None],
        mask=torch.ones(images, 6, 4),
        image_ids=image_ids(4, 6),
        weights=torch.ones(images),
    )


# ---------------------------------------------------------------- filling


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
def test_every_weight_is_the_files(layout: Layout, flux_tiny: Path, world: World) -> None:
    expected = FluxTransformer2DModel.from_pretrained(flux_tiny / "transformer", torch_dtype=torch.bfloat16)
    model = build(flux_tiny, world, layout)
    found = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found.pop(name), parameter), name
    assert not found


def test_schnell_has_no_guidance(flux_tiny_schnell: Path, world: World) -> None:
    model = build(flux_tiny_schnell, world, shape=FLUX_TINY_SCHNELL)
    assert not model.config.guidance_embeds
    assert predict(model, make_batch(), 1.0, False).isfinite().all()


def test_a_file_that_lacks_a_tensor_never_leaves_memory_as_it_was(flux_tiny: Path, world: World) -> None:
    places = sources(FLUX_TINY, files_of(flux_tiny, "diffusers")[1:], "diffusers")
    with pytest.raises(AssertionError):
        fill(FluxTransformer2DModel(**FLUX_TINY.config()), places, world)


def test_full_fine_tuning_trains_everything(flux_tiny: Path, world: World) -> None:
    assert all(parameter.requires_grad for parameter in build(flux_tiny, world).parameters())


def test_an_adapter_changes_nothing_until_it_is_trained(flux_tiny: Path, world: World) -> None:
    plain, adapted = build(flux_tiny, world), build(flux_tiny, world, method="lora", lora={"rank": 4})
    with torch.no_grad():
        assert torch.equal(predict(plain, make_batch(), 1.0, False), predict(adapted, make_batch(), 1.0, False))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)


def test_rows_in_the_single_file() -> None:
    """The last rows of q, the first of k: two runs of one tensor; and the last modulation in two places."""
    assert rows_in_bfl("transformer_blocks.1.attn.to_k.weight", 100, 56, FLUX_TINY) == [
        ("double_blocks.1.img_attn.qkv.weight", 356, slice(0, 56))
    ]
    assert rows_in_bfl("norm_out.linear.weight", 200, 112, FLUX_TINY) == [
        ("final_layer.adaLN_modulation.1.weight", 456, slice(0, 56)),
        ("final_layer.adaLN_modulation.1.weight", 0, slice(56, 112)),
    ]
    assert rows_in_bfl("proj_out.bias", 64, 0, FLUX_TINY) == []


def test_rows_of_all_processes_fill_the_file(flux_tiny: Path) -> None:
    sizes = bfl_tensors(FLUX_TINY)
    for processes in (1, 2, 3, 5):
        counted = dict.fromkeys(sizes, 0)
        for name, size in FLUX_TINY.tensors().items():
            chunk = -(-size[0] // processes)
            for first in range(0, size[0], chunk):
                for file_name, _, rows in rows_in_bfl(name, first, min(chunk, size[0] - first), FLUX_TINY):
                    counted[file_name] += rows.stop - rows.start
        assert counted == {name: size[0] for name, size in sizes.items()}


# ---------------------------------------------------------------- predicting


def plain_call(model: FluxTransformer2DModel, batch: Batch, guidance: float, mask: torch.Tensor | None) -> torch.Tensor:
    """diffusers' model as its own examples call it."""
    return model(
        hidden_states=batch.noisy,
        encoder_hidden_states=batch.text,
        pooled_projections=batch.pooled,
        timestep=batch.sigma.bfloat16(),
        img_ids=batch.image_ids,
        txt_ids=torch.zeros(batch.text.shape[1], 3),
        guidance=torch.full_like(batch.sigma, guidance).bfloat16() if model.config.guidance_embeds else None,
        joint_attention_kwargs=None if mask is None else {"attention_mask": mask},
    ).sample


@torch.no_grad()
def test_a_prediction_is_the_models_own(flux_tiny: Path, world: World) -> None:
    """Where bf16 has the levels exactly: 250 and 500 of a thousand."""
    model = build(flux_tiny, world)
    batch = replace(make_batch(), sigma=torch.tensor([0.25, 0.5]))
    assert torch.equal(predict(model, batch, 1.0, False), plain_call(model, batch, 1.0, None))


class Times:
    """What reaches the embeddings of time and guidance."""

    def __init__(self, model: FluxTransformer2DModel) -> None:
        self.seen: list[torch.Tensor] = []
        model.time_text_embed.time_proj.register_forward_pre_hook(lambda _, arguments: self.seen.append(arguments[0]))


@pytest.mark.parametrize("sigma", [0.75, 0.9375, 0.1, 0.123456])
@torch.no_grad()
def test_the_level_is_told_exactly(sigma: float, flux_tiny: Path, world: World) -> None:
    """P80: cast to bf16 first, as diffusers does, 750 becomes 752."""
    model = build(flux_tiny, world)
    times = Times(model)
    batch = replace(make_batch(), sigma=torch.tensor([sigma, 0.75]))
    plain_call(model, batch, 1.0, None)
    assert times.seen[0].tolist()[1] == 752, "or diffusers has put it right, and exact_times can go"
    times.seen.clear()
    predict(model, batch, 3.5, False)
    time, guidance = times.seen
    assert (time.dtype, guidance.dtype) == (torch.float32, torch.float32)
    assert torch.equal(time, 1000 * batch.sigma)
    assert guidance.tolist() == [3500, 3500]


@torch.no_grad()
def test_schnell_is_told_no_guidance(flux_tiny_schnell: Path, world: World) -> None:
    model = build(flux_tiny_schnell, world, shape=FLUX_TINY_SCHNELL)
    times = Times(model)
    predict(model, make_batch(), 3.5, False)
    (time,) = times.seen
    assert torch.equal(time, 1000 * make_batch().sigma)


@torch.no_grad()
def test_the_hook_is_gone_afterwards(flux_tiny: Path, world: World) -> None:
    model = build(flux_tiny, world)
    before = plain_call(model, make_batch(), 1.0, None)
    predict(model, make_batch(), 3.5, False)
    assert torch.equal(plain_call(model, make_batch(), 1.0, None), before)


@torch.no_grad()
def test_the_text_mask_hides_padding_text_first(flux_tiny: Path, world: World) -> None:
    """P58: what is masked makes no difference, what is not does."""
    model = build(flux_tiny, world)
    batch = make_batch()
    noise = torch.randn(batch.text.shape).bfloat16()
    padding = replace(batch, text=torch.where(batch.text_mask[..., None], batch.text, noise))
    words = replace(batch, text=torch.where(batch.text_mask[..., None], noise, batch.text))
    masked = predict(model, batch, 1.0, True)
    assert torch.equal(predict(model, padding, 1.0, True), masked)
    assert not torch.equal(predict(model, words, 1.0, True), masked)
    assert not torch.equal(predict(model, padding, 1.0, False), predict(model, batch, 1.0, False))


@torch.no_grad()
def test_a_mask_of_ones_is_no_mask(flux_tiny: Path, world: World) -> None:
    model = build(flux_tiny, world)
    batch = replace(make_batch(), text_mask=torch.ones(2, 5, dtype=torch.bool))
    masked, plain = predict(model, batch, 1.0, True), predict(model, batch, 1.0, False)
    assert torch.allclose(masked.float(), plain.float(), atol=0.02)


def test_checkpointing_changes_no_gradient(flux_tiny: Path, world: World) -> None:
    gradients = []
    for count in (0, 1, FLUX_TINY.blocks):
        model = build_by(replace(PLAN, checkpointed_blocks=count), flux_tiny, world)
        model.train()
        predict(model, make_batch(), 1.0, False).float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert torch.equal(gradient, gradients[1][name]), name
        assert torch.equal(gradient, gradients[2][name]), name


def test_a_plan_without_wishes_changes_nothing(flux_tiny: Path, world: World) -> None:
    model = build(flux_tiny, world)
    before = type(model), [type(block) for block in model.transformer_blocks]
    prepare(model, PLAN, world)
    assert (type(model), [type(block) for block in model.transformer_blocks]) == before
    assert not model.is_gradient_checkpointing


def test_blocks_are_compiled_for_more_kinds_of_passes_than_torch_allows(flux_tiny: Path, world: World) -> None:
    """With eight, a run of two sizes with samples and validation ended at the first pass of one image: it takes 16 of
    each kind of block with T5's mask."""
    model = build(flux_tiny, world)
    with torch._dynamo.config.patch(recompile_limit=8):
        prepare(model, replace(PLAN, compile=True), world)
        assert torch._dynamo.config.recompile_limit >= 32
