"""Attention by cuDNN's kernels, which on Hopper take half the time of flash attention 2, made safe.

Left to itself the FLUX model's backward pass gives NaN, or a fault, with cuDNN. The cause: torch (2.11 at least) keeps
cuDNN's plans by the layouts of query, key, value and output, but not of the gradient that comes back, and a plan reads
that gradient with the strides of the one it was made for. In a double block it is dense; in a single block it is cut
from a wider tensor. Whichever came first spoils the other, which is why each alone is right. So here forward and
backward are one operation of our own that hands over everything dense, whatever comes.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Two = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("fluxpod::cudnn_attention", mutates_args=())
def cudnn_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Two:
    """The output, like query, and for the backward pass the logarithms of the softmax' denominators.

    query, key, value: [batch, tokens, heads, size of a head], 16-bit.
    """
    q, k, v = (tensor.contiguous().transpose(1, 2) for tensor in (query, key, value))
    output, denominators, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return output.transpose(1, 2).contiguous(), denominators


@cudnn_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Two:
    batch, tokens, heads, _ = query.shape
    denominators = query.new_empty((batch, heads, tokens, 1), dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), denominators


@torch.library.custom_op("fluxpod::cudnn_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    denominators: torch.Tensor,
) -> Three:
    dense = (tensor.contiguous().transpose(1, 2) for tensor in (gradient, query, key, value, output))
    unused = torch.empty((), dtype=torch.int64, device=query.device)  # seed and offset of a dropout that is not there
    sizes = (query.shape[1], key.shape[1])
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *dense, denominators, unused, unused, None, None, None, *sizes, 0.0, False
    )
    q, k, v = (each.transpose(1, 2).contiguous() for each in gradients)
    return q, k, v


@_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    denominators: torch.Tensor,
) -> Three:
    q, k, v = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value))
    return q, k, v


def _keep(ctx: Any, inputs: Three, output: Two) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Three:
    return _backward(gradient, *ctx.saved_tensors)


cudnn_attention.register_autograd(_differentiate, setup_context=_keep)


class CudnnProcessor:
    """FLUX's joint attention for diffusers' blocks, without masks: text and image tokens attend to all of both."""

    def __call__(
        self,
        attn: Any,  # FluxAttention
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Two | None = None,
    ) -> torch.Tensor | Two:
        assert attention_mask is None
        query, key, value = self._heads(attn, hidden_states, "to_q", "to_k", "to_v", "norm_q", "norm_k")
        text = encoder_hidden_states
        if text is not None:
            names = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
            parts = zip(self._heads(attn, text, *names), (query, key, value), strict=True)
            query, key, value = (torch.cat(part, dim=1) for part in parts)
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        output = cudnn_attention(query, key, value)[0].flatten(2)
        if text is None:
            return output
        for_text, for_image = output[:, : text.shape[1]], output[:, text.shape[1] :]
        return attn.to_out[1](attn.to_out[0](for_image)), attn.to_add_out(for_text)

    @staticmethod
    def _heads(attn: Any, states: torch.Tensor, q: str, k: str, v: str, norm_q: str, norm_k: str) -> Three:
        query, key, value = (getattr(attn, name)(states).unflatten(-1, (-1, attn.head_dim)) for name in (q, k, v))
        return getattr(attn, norm_q)(query), getattr(attn, norm_k)(key), value


def use_cudnn(model: FluxTransformer2DModel) -> None:
    """Makes the model's attention this one."""
    for module in model.modules():
        if isinstance(module, FluxAttention):
            module.set_processor(CudnnProcessor())
