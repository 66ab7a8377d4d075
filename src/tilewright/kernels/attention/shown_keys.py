"""`flex_attention` on a CPU whose mask is known only when it runs: blocks of queries with the keys that it shows them.

for each block of queries i:   shown = mask(b, h, i, j)                                  [.., block, Sk]
                               keys = those that some query of the block sees
                               y[i] = softmax(where(shown, score(q[i] @ k[keys].mT · scale), -inf)) @ v[keys]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.attention.dispatch import strides_like

BLOCK = 128
"""Queries of a block."""
DENSE = 0.5
"""Keys of which a larger share is shown are read in place, with those between them."""


def attend_to_shown_keys(
    q: Tensor, k: Tensor, v: Tensor, score: Callable[..., Tensor], block_mask: Sequence[Any], scale: float,
    options: Mapping[str, Any], score_reads: Sequence[Tensor] = (), mask_reads: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The arguments of PyTorch's operator, whose functions must compute each element from one of each tensor.

    Gives out [B, H, Sq, dv], laid out as q, and its log-sum-exps of base 2, [B, H, Sq], if the options ask for them.
    """
    (batch, heads, queries, _), (shared, keys) = q.shape, k.shape[1:3]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape, strides = strides_like(q, v.shape[3])
    out, lse = q.new_empty_strided(shape, strides), q.new_empty(q.shape[:3], dtype=exact)
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    j = torch.arange(keys)
    for first in range(0, queries, BLOCK):
        rows = slice(first, min(first + BLOCK, queries))
        i = torch.arange(rows.start, rows.stop).view(-1, 1)
        shown = block_mask[-1](b, h, i, j, *mask_reads)
        shown = shown.broadcast_to(torch.broadcast_shapes(shown.shape, (len(i), keys)))
        seen = _seen(shown)
        shown = shown[..., seen]
        s = _by_shared(q[:, :, rows].to(exact) * scale, shared) @ k[:, :, seen].to(exact).mT
        s = score(s.view(batch, heads, len(i), -1), b, h, i, j[seen], *score_reads).to(exact)
        s = s.masked_fill(~shown, -math.inf)
        weights = torch.softmax(s, -1)
        if not (sees := shown.any(-1, keepdim=True)).all():
            weights = weights.masked_fill(~sees, 0.0)
        weights = _by_shared(weights.to(q.dtype), shared)
        out[:, :, rows] = (weights @ v[:, :, seen].to(q.dtype)).view(batch, heads, len(i), -1)
        if options["OUTPUT_LOGSUMEXP"]:
            lse[:, :, rows] = torch.logsumexp(s, -1) / math.log(2)
    return out, lse


def _seen(shown: Tensor) -> slice | Tensor:
    """The keys that some row of a bool [.., rows, keys] shows, at least one; with those between if these are few."""
    seen = shown.flatten(0, -2).any(0).nonzero()[:, 0]
    if not len(seen):
        return slice(0, 1)
    first, last = int(seen[0]), int(seen[-1])
    return slice(first, last + 1) if len(seen) > DENSE * (last + 1 - first) else seen


def _by_shared(x: Tensor, shared: int) -> Tensor:
    """x [B, H, rows, d] with the heads that share keys as rows of one, [B, shared, H / shared · rows, d]."""
    return x.reshape(x.shape[0], shared, -1, x.shape[3])
