"""Attention written out in plain PyTorch operators."""

from __future__ import annotations

import math

import torch

Window = tuple[int | None, int | None]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: Window = (None, None),
    scale: float | None = None, softcap: float = 0.0, mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, kept: torch.Tensor | None = None, dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
