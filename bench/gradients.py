"""Whether one double and one single block of full width get right gradients on this card, in bf16, as in training.

The reference is the same model in float32 with plain matrix attention. Fast and wrong was met once: see
trainer/train.py.
"""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel

from bootstrap.flux_shape import FluxShape
from trainer.flow import image_ids

# ||gradient - reference|| / ||reference|| of the whole gradient: bf16 arithmetic alone gives about 1e-2.
TOLERANCE = 3e-2


def gradient(model: FluxTransformer2DModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**inputs, return_dict=False)[0]
    output.float().square().mean().backward()
    return torch.cat([p.grad.float().reshape(-1) for p in model.parameters() if p.grad is not None])


def check(size: int, text_tokens: int = 512) -> tuple[bool, float]:
    """Whether the gradient is right for an image of ``size`` pixels squared, and its relative error."""
    import trainer.train  # noqa: F401 - sets the attention the trainer uses

    torch.manual_seed(0)
    shape = FluxShape(double_blocks=1, single_blocks=1)
    with torch.device("cuda"):
        reference = FluxTransformer2DModel(**shape.config())
        tokens = (size // 16) ** 2
        inputs = {
            "hidden_states": torch.randn(1, tokens, 64),
            "encoder_hidden_states": torch.randn(1, text_tokens, 4096),
            "pooled_projections": torch.randn(1, 768),
            "timestep": torch.tensor([0.5]),
            "guidance": torch.tensor([1.0]),
            "txt_ids": torch.zeros(text_tokens, 3),
            "img_ids": image_ids(size // 8, size // 8).cuda(),
        }
    with sdpa_kernel(SDPBackend.MATH):
        right = gradient(reference, inputs)
    model = reference.to(torch.bfloat16)
    model.zero_grad(set_to_none=True)
    model.compile_repeated_blocks(fullgraph=True)
    floats = {k: v if k.endswith("ids") else v.bfloat16() for k, v in inputs.items()}
    error = float((gradient(model, floats) - right).norm() / right.norm())
    return error < TOLERANCE, error
