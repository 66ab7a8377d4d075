"""Attention written out in plain PyTorch operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

Window = tuple[int | None, int | None]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, H, Sq, Dv] in q's dtype and the natural log-sum-exp [B, H, Sq] of q [B, H, Sq, D] with k and v.

    Arguments as of `tilewright.functional.attention`; `kept` [B, H, Sq, Sk] is the dropout mask, True where a
    weight stays. Everything is computed in q's dtype, step by step, as eager would.
    """
    heads = q.shape[1]
    k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = distances(q.shape[2], k.shape[2], q.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).expand(q.shape[:2])
        scores = scores - slopes[:, :, None, None] * distance.abs().to(q.dtype)
    hidden = ~visible_keys(distance, causal, window).expand(scores.shape)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.to(q.dtype)
    scores = scores.masked_fill(hidden, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    # Softmax of a row of -inf is NaN, and so is its gradient, even where the result is masked.
    whole = scores.masked_fill(empty, 0.0)
    weights = torch.softmax(whole, -1).masked_fill(empty, 0.0)
    if kept is not None:
        weights = torch.where(kept, weights, 0.0) * (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)
    lse = torch.logsumexp(whole, -1).masked_fill(empty.squeeze(-1), -math.inf) if scores.shape[-1] else scores.sum(-1)
    return weights @ v, lse if scores.shape[-1] else lse - math.inf


MOST_SCORES = 2**27
"""Scores, and numbers of repeated keys, in memory at once where attention is computed in pieces."""


class _ByPiece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for own, shared in _pieces(q, k, causal):
            out[own] = attention(q[own], k[shared], v[shared], causal=causal)[0]
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        gradients = [torch.zeros_like(x) for x in (q, k, v)]
        for own, shared in _pieces(q, k, ctx.causal):
            one = [x[at].detach().requires_grad_() for x, at in ((q, own), (k, shared), (v, shared))]
            with torch.enable_grad():
                out = attention(*one, causal=ctx.causal)[0]
            for whole, at, part in zip(
                gradients, (own, shared, shared), torch.autograd.grad(out, one, dout[own]), strict=True
            ):
                whole[at] += part
        return *gradients, None


Slices = tuple[slice, slice, slice]


def _pieces(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[Slices, Slices]]:
    """Pieces of q, of heads that share heads of k and v, each with the keys that any of its queries sees."""
    batches, kv_heads, keys = k.shape[:3]
    group, queries = q.shape[1] // max(kv_heads, 1), q.shape[2]
    step = min(max(1, MOST_SCORES // max(1, group * keys)), max(queries, 1))
    # Keys are repeated for every head of their group, which takes more than the scores where queries are few.
    one_head = max(1, group * keys * max(queries, k.shape[3]))
    heads = min(max(1, MOST_SCORES // one_head), max(kv_heads, 1))
    batch = max(1, MOST_SCORES // (one_head * max(kv_heads, 1)))
    starts = itertools.product(range(0, batches, batch), range(0, kv_heads, heads), range(0, queries, step))
    for entry, head, first in starts:
        end = min(first + step, queries)
        # The piece's last query is aligned to its last visible key.
        visible = max(0, keys - (queries - end)) if causal else keys
        entries, own = slice(entry, entry + batch), slice(head * group, (head + heads) * group)
        yield (entries, own, slice(first, end)), (entries, slice(head, head + heads), slice(0, visible))


def by_piece(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """out of `attention`, at most MOST_SCORES scores at a time; the backward computes them again."""
    out: torch.Tensor = _ByPiece.apply(q, k, v, causal)  # type: ignore[no-untyped-call]
    return out


def distances(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[Sq, Sk]: how far key j is after query i, with both aligned to their ends: j - (i + Sk - Sq)."""
    i, j = torch.arange(queries, device=device), torch.arange(keys, device=device)
    return j - (i[:, None] + keys - queries)


def visible_keys(distance: torch.Tensor, causal: bool, window: Window) -> torch.Tensor:
    """bool [Sq, Sk]: whether a query sees a key, from their `distances`."""
    left, right = window
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    return visible & (distance <= 0) if causal else visible
