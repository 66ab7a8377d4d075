"""Attention that no kernel computes: PyTorch's fused operator, or the formula written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright.kernels.attention import reference
from tilewright.kernels.attention.reference import Window


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts_q: torch.Tensor | None, starts_k: torch.Tensor | None,
    band: Window, scale: float, softcap: float, mask: torch.Tensor | None, slopes: torch.Tensor | None, dropout: float,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """out [B, H, Sq, Dv] and lse [B, H, Sq], None unless `with_lse`; arguments as of `Request`."""
    if starts_q is not None and starts_k is not None:
        parts = []
        queries, keys = starts_q.tolist(), starts_k.tolist()
        for n, (q0, q1, k0, k1) in enumerate(zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)):
            slope = None if slopes is None else slopes[n : n + 1]
            one = q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], None, None
            parts.append(attention(*one, band, scale, softcap, mask, slope, dropout, with_lse))
        sums = [lse for _, lse in parts if lse is not None]
        return torch.cat([out for out, _ in parts], 2), torch.cat(sums, 2) if with_lse else None
    whole = band == (None, None) and mask is None
    # Branches, since PyTorch's operator does not take the symbol that a comparison of dynamic sizes gives.
    causal = shared = False
    if band == (None, 0) and mask is None and q.shape[2] == k.shape[2]:
        causal = True
    if q.shape[1] != k.shape[1]:
        shared = True
    # PyTorch's CPU kernel multiplies masked scores, -inf, by the scale: NaN for 0, +inf for less.
    fused = (whole or causal) and scale > 0.0 and not with_lse and not softcap and slopes is None
    # One query in fp32 on a GPU is computed here: sums of matrix-vector products are more exact than that operator.
    fused = fused and (q.shape[2] > 1 or q.device.type == "cpu")
    # For one key the score's gradient is zero; that operator gives rounding errors.
    fused = fused and k.shape[2] > 1
    if fused and 0 not in (*q.shape, *k.shape):
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=shared
        )
        return out, None
    keep = None
    if dropout:
        keep = torch.rand(*q.shape[:3], k.shape[2], device=q.device) >= dropout
    at_least_fp32 = torch.promote_types(q.dtype, torch.float32)
    out, lse = reference.attention(
        *(x.to(at_least_fp32) for x in (q, k, v)), window=band, scale=scale, softcap=softcap, mask=mask,
        alibi_slopes=slopes, kept=keep, dropout_p=dropout,
    )  # fmt: skip
    return out.to(q.dtype), lse.to(torch.promote_types(torch.float32, lse.dtype))
