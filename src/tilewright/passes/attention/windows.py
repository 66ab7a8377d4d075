"""Fuses attention within windows: many short sequences that share a mask, which may be learned.

    s = q @ k.mT · scale + bias                         [B, H, N, N], bias [1, H, N, N]
    s = s.view(B / M, M, H, N, N) + mask                mask [M, 1, N, N]
    y = softmax(s.view(B, H, N, N), -1) @ v             →   y = window_attention(q, k, v, bias + mask, scale)

The mask [M, H, N, N] is small, and no tensor of the scores' size is written; PyTorch's fused kernels need a mask, and
its gradient, for every window (4,096 of 49 positions, 3 heads of 32, forward on an H200: cuDNN 674 µs, the
memory-efficient one 176, products and a softmax 533). Calls without a mask are offers (`choose/attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch.fx import Graph, Node

from tilewright.graph.canonical import static, tensor_of
from tilewright.graph.insert import Writer
from tilewright.hardware.target import Target
from tilewright.passes.attention.form import operands, restored
from tilewright.passes.attention.mask import Masking, at_lead, multiplied
from tilewright.passes.attention.match import Attention
from tilewright.passes.attention.own import has_triton

FEWEST = 128
"""The fewest windows times heads: one program each must fill a large GPU."""


def in_windows(attention: Attention, masking: Masking, target: Target) -> bool:
    """Whether the kernel for windows supports an attention."""
    result, scores = tensor_of(attention.result), tensor_of(attention.scores)
    given = (attention.q, attention.k, attention.v)
    depths = [tensor_of(x.node).shape[-1 if x.order is None else x.order[-1]] for x in given]
    sizes = (*attention.lead, *attention.weights_lead, *scores.shape, *depths)
    if not static(sizes) or attention.softcap or attention.softmax.sink is not None or masking.causal or masking.filled:
        return False
    if prod(attention.lead) < FEWEST or len(attention.lead) not in (1, 2, 3):
        return False
    queries, keys = scores.shape[-2:]
    if not has_triton(target, result.device):
        return False
    from tilewright.kernels.attention.window.triton import refuses

    return refuses(result.dtype, queries, keys, int(depths[0]), int(depths[2])) is None


def write_windows(graph: Graph, attention: Attention, masking: Masking) -> Node:
    """Write the fused form before `attention.result`; returns the node that replaces it."""
    write = Writer(graph, attention.result)
    q, k, v = operands(write, attention)
    mask = _mask(write, attention, masking, int(tensor_of(q).shape[1])) if masking.added else None
    out = write.call(torch.ops.tilewright.window_attention.default, q, k, v, mask, attention.scale)
    return restored(write, out, attention)


def _mask(write: Writer, attention: Attention, masking: Masking, heads: int) -> Node:
    """The sum of the added masks, fp32 [M, H, Nq, Nk]; window b reads entry b modulo M."""

    def masks() -> Iterator[Node]:
        for term in masking.added:
            mask = write.method("to", at_lead(write, term.mask, term.lead, attention.lead), torch.float32)
            yield multiplied(write, mask, term.times)

    total = write.joined(torch.add, masks())
    matrix = tuple(tensor_of(attention.scores).shape[-2:])
    shape = tensor_of(total).shape[:-2]
    if len(shape) == 3 and shape[0] != 1:
        total = write.method("flatten", write.method("expand", total, *attention.lead[:2], shape[2], *matrix), 0, 1)
    elif len(shape) == 3:
        total = write.method("squeeze", total, 0)
    elif len(shape) == 1:
        total = write.method("unsqueeze", total, 1)
    return write.method("expand", total, tensor_of(total).shape[0], heads, *matrix)
