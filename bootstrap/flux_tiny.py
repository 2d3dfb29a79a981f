"""flux-tiny: a FLUX of the real classes and file layouts with eight million weights, trained on drawn scenes.

It draws a few flat figures on a ground as its caption says, at 128 px, in a second on a CPU. ``tiny/recipe.py`` made
its weights; they lie beside this file, 20 MB in bf16. ``python -m bootstrap.flux_tiny FOLDER [--schnell]`` writes the
hub's layout: README.md, model_index.json, transformer/ in shards, vae/, text_encoder/, text_encoder_2/, tokenizer/,
tokenizer_2/, scheduler/, and the same transformer once more as BFL's single file, flux1-tiny.safetensors. Every call
writes the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import string
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bootstrap.bases import FLUX_TINY, FLUX_TINY_SCHNELL, scheduler_settings
from bootstrap.flux_shape import FluxShape
from bootstrap.layout import bfl_tensors, placements
from bootstrap.tensor_files import read_tensors, write_tensors
from bootstrap.volume import flush_folder

WEIGHTS = Path(__file__).with_name("flux_tiny_weights")
SINGLE_FILE = "flux1-tiny.safetensors"
TEXT_TOKENS = 32  # of T5: long enough for a caption, a sixteenth of FLUX.1-dev's work
CLIP_TOKENS = 77
SHARD = "8MB"  # small enough that the transformer comes in three shards, as FLUX.1-dev's does
SCHNELL_GUIDANCE = 3.5  # what flux-tiny-schnell has been given for good, as it cannot be told

# What captions of the drawn scenes are made of, each word one token. Everything else is spelt in letters.
WORDS = """
    a an the of on in at with and one two three small large soft outlined plain striped checkered red orange yellow
    green blue purple white black circle square triangle star cross ring circles squares triangles stars crosses rings
    left right top bottom middle background ground picture
""".split()  # noqa: SIM905 (a list of fifty quoted words is harder to read)


def make_flux_tiny(folder: Path, guidance: bool = True) -> None:
    """Writes flux-tiny (``guidance=False``: flux-tiny-schnell) to ``folder``, whole or not at all.

    Raises FileExistsError where there is something already. Two processes may race for the same folder: both make the
    same bytes, and one of the copies stays.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already. Delete it, or give another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _write(part, FLUX_TINY if guidance else FLUX_TINY_SCHNELL)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    flush_folder(folder.parent)


def _write(folder: Path, shape: FluxShape) -> None:
    from diffusers import FluxPipeline

    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
    clip = new_clip(len(clip_tokenizer), clip_tokenizer.eos_token_id, shape.pooled_size)
    transformer = _trained_transformer(shape)
    pipeline: Any = FluxPipeline(
        scheduler=make_scheduler(shape.guidance),
        vae=_trained(new_vae(), "vae"),
        text_encoder=_trained(clip, "text_encoder"),
        tokenizer=clip_tokenizer,
        text_encoder_2=_trained(new_t5(len(t5_tokenizer), shape.text_size), "text_encoder_2"),
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder, max_shard_size=SHARD)
    shutil.copyfile(WEIGHTS / "README.md", folder / "README.md")
    _write_single_file(folder / SINGLE_FILE, transformer, shape)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors makes them readable for their owner alone


def _trained(model: Any, name: str, change: dict[str, torch.Tensor] | None = None) -> Any:
    """``model`` in bf16 with its trained weights. T5's embedding has a second name, which no file holds."""
    model = model.to(torch.bfloat16)
    lacking, strange = model.load_state_dict(change or read_tensors(WEIGHTS / f"{name}.safetensors"), strict=False)
    assert set(lacking) <= {"encoder.embed_tokens.weight"}, lacking
    assert not strange, strange
    return model


def _trained_transformer(shape: FluxShape) -> Any:
    """The ``FluxTransformer2DModel``. Without guidance embedding: one guidance is added to the pooled text's bias, so
    that it draws what the other one draws with it."""
    full = _trained(new_transformer(FLUX_TINY), "transformer")
    if shape.guidance:
        return full
    embedding = full.time_text_embed
    with torch.no_grad():
        times = embedding.time_proj(torch.tensor([SCHNELL_GUIDANCE * 1000])).to(torch.bfloat16)
        embedding.text_embedder.linear_2.bias += embedding.guidance_embedder(times)[0]
    kept = {name: tensor for name, tensor in full.state_dict().items() if "guidance_embedder" not in name}
    return _trained(new_transformer(shape), "transformer", kept)


def _write_single_file(path: Path, transformer: nn.Module, shape: FluxShape) -> None:
    state = transformer.state_dict()
    tensors = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in bfl_tensors(shape).items()}
    for name, placement in placements(shape).items():
        for rows in placement:
            source = state[name][rows.first : rows.first + rows.count]
            tensors[rows.file_name][rows.file_first : rows.file_first + rows.count] = source
    write_tensors(path, tensors)


def new_transformer(shape: FluxShape) -> Any:
    """The ``FluxTransformer2DModel``, not trained; float32, as the others below."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(**shape.config())


def new_vae() -> Any:
    """The ``AutoencoderKL``: FLUX's (16 latent channels, factor 8, no quant convolutions) with few channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        act_fn="silu",
        latent_channels=16,
        norm_num_groups=8,
        sample_size=1024,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        force_upcast=True,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def new_clip(vocabulary: int, end_token: int, size: int) -> Any:
    """The ``CLIPTextModel`` that gives the pooled text."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=size,
        bos_token_id=end_token - 1,
        eos_token_id=end_token,
        pad_token_id=1,
    )
    return CLIPTextModel(config)


def new_t5(vocabulary: int, size: int) -> Any:
    """The ``T5EncoderModel`` (v1.1: gated GELU) that gives the text tokens."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=vocabulary,
        d_model=size,
        d_kv=32,
        d_ff=2 * size,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5EncoderModel(config)


def make_scheduler(guidance: bool) -> Any:
    """The ``FlowMatchEulerDiscreteScheduler`` with the published settings of FLUX.1-dev, or of -schnell."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**scheduler_settings(guidance))


def make_clip_tokenizer() -> Any:
    """``CLIPTokenizer``: the bytes, inside a word and at its end, and merges that build ``WORDS``; ids as in CLIP, the
    end token last."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    pieces = letters + [f"{letter}</w>" for letter in letters]
    merges: list[Any] = []  # pairs; the annotation of CLIPTokenizer asks for text, which tokenizers refuses
    for word in WORDS:
        merged = word[0]
        for i, letter in enumerate(word[1:], start=1):
            pair = (merged, letter if i + 1 < len(word) else f"{letter}</w>")
            merged = "".join(pair)
            if merged not in pieces:
                merges.append(pair)
                pieces.append(merged)
    start, end = "<|startoftext|>", "<|endoftext|>"
    vocabulary = {piece: i for i, piece in enumerate([*pieces, start, end])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_TOKENS)


def make_t5_tokenizer() -> Any:
    """``T5Tokenizer``: a unigram model of ``WORDS`` and of every printable ASCII character."""
    from transformers import T5Tokenizer

    space = "▁"
    characters = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation
    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, space: -4.0}
    for word in WORDS:
        pieces.setdefault(space + word, -5.0)
    for character in characters:
        pieces.setdefault(character, -7.0)
    return T5Tokenizer(vocab=list(pieces.items()), extra_ids=0, model_max_length=TEXT_TOKENS)


def _quiet() -> None:
    """Keeps the libraries' advice on what this program does on purpose, and their progress bars, out of the log."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bootstrap.flux_tiny", description="Makes flux-tiny.")
    parser.add_argument("folder", type=Path, help="where to; must not exist")
    parser.add_argument("--schnell", action="store_true", help="without guidance embedding, with schnell's scheduler")
    options = parser.parse_args(arguments)
    _quiet()
    try:
        make_flux_tiny(options.folder, guidance=not options.schnell)
    except OSError as error:
        print(f"flux-tiny was not made: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
