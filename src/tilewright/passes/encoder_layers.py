"""Writes PyTorch's transformer layer for inference, a library kernel for each step, as the functions that it computes.

    y = torch._transformer_encoder_layer_fwd(x, …)
    →   a = layer_norm(x + linear(attention(linear(x))))
        y = layer_norm(a + linear(gelu(linear(a))))

`nn.TransformerEncoderLayer` calls it in eval mode without gradients. Only on a GPU: on a CPU short sequences are faster
in PyTorch's own (32 of 20 places, width 64: 2.8 against 3.2 ms for two layers) and others as fast.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.graph.canonical import example, tensor_of
from tilewright.graph.insert import Writer
from tilewright.passes.attention.form import in_old_layout
from tilewright.passes.rule import call, rule
from tilewright.records.errors import Refusal

KEYS = 1
"""PyTorch's kind of a mask [B, Sk] of padding; kind 0 is [Sq, Sk], and 2 is [B, H, Sq, Sk]."""


@rule(
    call("_transformer_encoder_layer_fwd", "x", ...),
    where=lambda node, target: (y := example(node)) is not None and target.runs_on_gpu(y.device),
    reason="a transformer layer written out: its steps are fused",
    refused="a transformer layer stays with PyTorch: ",
    by="encoder_layers",
)
def write_layers_out(node: Node) -> Node:
    if any(isinstance(size, int) and size == 0 for size in tensor_of(node).shape):
        raise Refusal("an empty tensor")
    write = Writer(node.graph, node)
    return in_old_layout(write, node, write.formula(_layer, *node.args, **node.kwargs))


def _layer(
    src: Tensor, embed_dim: int, num_heads: int,
    qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
    ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`transformer_encoder_layer_forward` of PyTorch's `transformer.cpp` (2.11 to 2.13)."""

    def one(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def two(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    qkv = F.linear(one(src) if norm_first else src, qkv_weight, qkv_bias)
    q, k, v = (
        qkv.narrow(-1, i * embed_dim, embed_dim).unflatten(-1, (num_heads, -1)).transpose(1, 2) for i in range(3)
    )
    scores = (q * (embed_dim // num_heads) ** -0.5) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_hidden(mask, mask_type), -math.inf)
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = F.linear(attended, proj_weight, proj_bias) + src
    x = x if norm_first else one(x)
    hidden = F.linear(two(x) if norm_first else x, ffn_weight_1, ffn_bias_1)
    # cuBLAS has no other GELU after a product.
    hidden = F.gelu(hidden, approximate="tanh") if use_gelu else F.relu(hidden)
    x = F.linear(hidden, ffn_weight_2, ffn_bias_2) + x
    return x if norm_first else two(x)


def _hidden(mask: Any, kind: int | None) -> Tensor:
    """Which scores [B, H, Sq, Sk] a mask hides: PyTorch makes it bool, even if it is a bias."""
    if kind is None:
        raise Refusal("its mask has no known kind")
    hidden: Tensor = mask.to(torch.bool)
    return hidden.unsqueeze(1).unsqueeze(1) if kind == KEYS else hidden
