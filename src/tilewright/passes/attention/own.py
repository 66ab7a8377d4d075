"""Replaces attention for which PyTorch has no fused kernel by a call of tilewright's, before autograd.

    s = 50 · tanh(q @ k.mT · scale / 50)                 [B, H, N, N]
    y = softmax(s.masked_fill(j > i, -inf), -1) @ v      →   y = attention(q, k, v, right=0, scale, softcap=50)[0]

    c = cat([q @ k.mT · scale, sink], -1)                    out, lse = attention(q, k, v, scale)
    y = softmax(c, -1)[..., :-1] @ v                     →   y = out · sigmoid(lse - sink)

An fp32 mask for 16-bit products is such a case: PyTorch's kernels would round it. Key heads that were repeated for the
query heads are read once. So is attention within windows, many short sequences that share a mask, which may be learned:

    s = q @ k.mT · scale + bias                         [B, H, N, N], bias [1, H, N, N]
    s = s.view(B / M, M, H, N, N) + mask                mask [M, 1, N, N]
    y = softmax(s.view(B, H, N, N), -1) @ v             →   y = window_attention(q, k, v, bias + mask, scale)

The mask [M, H, N, N] is small, and no tensor of the scores' size is written; PyTorch's fused kernels need a mask, and
its gradient, for every window (4,096 of 49 positions, 3 heads of 32, forward on an H200: cuDNN 674 µs, the
memory-efficient one 176, products and a softmax 533). Calls without a mask are offers (`choose/attention.py`).
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Iterator
from math import prod

import torch
from torch.fx import Node

from tilewright.graph.canonical import same_shape, static, tensor_of
from tilewright.graph.insert import Writer
from tilewright.hardware.target import Language, Target
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.mask import Masking, at_lead, multiplied
from tilewright.passes.attention.mask_parts import Band
from tilewright.passes.attention.match import Attention
from tilewright.passes.attention.spelling import unrepeated
from tilewright.records.errors import Refusal

WIDEST = 256
"""The largest head size of the kernels."""


def has_triton(target: Target, device: torch.device) -> bool:
    """Whether Triton's kernels run on `device`."""
    return target.language_of(device) == "triton" and importlib.util.find_spec("triton") is not None


def needs_own_kernel(attention: Attention, masking: Masking, language: Language) -> bool:
    """Whether PyTorch's fused kernels cannot compute this attention, or would round its mask."""
    if attention.softcap > 0 or attention.softmax.sink is not None:
        return True
    is_narrow = language == "triton" and tensor_of(attention.result).dtype in NARROW
    return is_narrow and any(tensor_of(term.mask).dtype == torch.float32 for term in masking.added)


def check_own(attention: Attention, target: Target) -> None:
    """Raise Refusal if tilewright's kernels do not support this attention, or were not measured for it."""
    result = tensor_of(attention.result)
    sink = attention.softmax.sink
    what = "a softmax over an attention sink" if sink is not None else "a mask in torch.float32"
    what = "tanh between the first product and the softmax" if attention.softcap else what
    if not has_triton(target, result.device):
        raise Refusal(f"{what}, which fused attention on a CPU does not know")
    if result.dtype not in NARROW:
        raise Refusal(f"{what} in {result.dtype}, and tilewright's kernels were measured in 16 bits")
    lead, weights = attention.lead, attention.weights_lead
    if sink is not None and not (len(lead) == 2 and same_shape(lead, weights) and tensor_of(sink).dim() == 4):
        raise Refusal("an attention sink of scores that are not [B, H, Nq, Nk]")


def write_own(
    write: Writer, operands: tuple[Node, Node, Node], mask: Node | None, band: Band, attention: Attention
) -> Node:
    """out [B, H, Nq, dv] of q, k and v [B, H, N, d], with `mask` on the scores."""
    q, k, v = operands
    if mask is not None:
        sizes = (*tensor_of(q).shape[:3], tensor_of(k).shape[2])
        if not static(sizes):
            raise Refusal("a mask whose sizes are dynamic")
        mask = write.method("expand", mask, *sizes)
    shared = unrepeated(k), unrepeated(v)
    if shared[0] is not k and shared[1] is not v:
        k, v = shared
    out, lse = call_attention(write, (q, k, v), mask, band, attention.scale, attention.softcap)
    if attention.softmax.sink is None:
        return out
    share = write.call(torch.sub, write.method("unsqueeze", lse, -1), attention.softmax.sink)
    share = write.method("sigmoid", share)
    return write.method("to", write.call(torch.mul, out, share), tensor_of(out).dtype)


def call_attention(
    write: Writer, operands: tuple[Node, Node, Node], mask: Node | None, band: Band, scale: float, softcap: float
) -> tuple[Node, Node]:
    """A call of tilewright's attention: out [B, H, Nq, dv] and the log-sum-exp [B, H, Nq]."""
    import tilewright.kernels.attention.registered  # noqa: F401, defines the operator

    deterministic = torch.are_deterministic_algorithms_enabled()
    options = (mask, None, None, None, scale, *band, softcap, 0.0, 0, 0, deterministic, "auto")
    results = write.call(torch.ops.tilewright.attention.default, *operands, *options)
    out, lse = (write.call(operator.getitem, results, index) for index in (0, 1))
    return out, lse


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


def write_windows(write: Writer, operands: tuple[Node, Node, Node], attention: Attention, masking: Masking) -> Node:
    """out [B, H, Nq, dv] of windows q, k and v [B, H, N, d]."""
    q, k, v = operands
    mask = _window_mask(write, attention, masking, int(tensor_of(q).shape[1])) if masking.added else None
    return write.call(torch.ops.tilewright.window_attention.default, q, k, v, mask, attention.scale)


def _window_mask(write: Writer, attention: Attention, masking: Masking, heads: int) -> Node:
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
