"""Attention that PyTorch has no fused kernel for is written as a call of tilewright's, before autograd.

    s = 50 · tanh(q @ k.mT · scale / 50)                 [B, H, N, N]
    y = softmax(s.masked_fill(j > i, -inf), -1) @ v      →   y = attention(q, k, v, right=0, scale, softcap=50)[0]

Heads of keys that were repeated for the heads of queries are read once.
"""

from __future__ import annotations

import importlib.util
import operator

import torch
from torch.fx import Node

from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.match import Attention
from tilewright.passes.attention.prefix import unrepeated
from tilewright.passes.attention.spelling import Refusal, static, tensor_of
from tilewright.passes.attention.visible import Band
from tilewright.passes.attention.writer import Writer

WIDEST = 256
"""Head size of the widest rows that the kernels take."""


def check_capped(attention: Attention, target: Target) -> None:
    """Refuse scores under a soft cap that tilewright's kernels do not take, or where they were not measured."""
    result = tensor_of(attention.result)
    if target.language_of(result.device) != "triton" or importlib.util.find_spec("triton") is None:
        raise Refusal("tanh between the first product and the softmax: fused attention on a CPU has no soft cap")
    if result.dtype not in NARROW:
        raise Refusal(f"tanh between the first product and the softmax in {result.dtype}: a soft cap is for 16 bits")
    for operand in (attention.q, attention.v):
        depth = tensor_of(operand.node).shape[-1 if operand.order is None else operand.order[-1]]
        if not isinstance(depth, int) or depth > WIDEST:
            raise Refusal(f"a head size of {depth}: tilewright's kernels take up to {WIDEST}")


def capped(
    write: Writer, operands: tuple[Node, Node, Node], mask: Node | None, band: Band, attention: Attention
) -> Node:
    """out [B, H, Nq, dv] of q, k and v [B, H, N, d], with `mask` added to the capped scores."""
    import tilewright.kernels.attention.registered  # noqa: F401, what defines the operator

    q, k, v = operands
    if mask is not None:
        sizes = (*tensor_of(q).shape[:3], tensor_of(k).shape[2])
        if not static(sizes):
            raise Refusal("a mask of capped scores whose sizes are dynamic")
        mask = write.method("expand", mask, *sizes)
    shared = unrepeated(k), unrepeated(v)
    if shared[0] is not k and shared[1] is not v:
        k, v = shared
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = (mask, None, None, None, attention.scale, *band, attention.softcap, 0.0, 0, 0, deterministic, "auto")
    return write.call(operator.getitem, write.call(torch.ops.tilewright.attention.default, q, k, v, *options), 0)
