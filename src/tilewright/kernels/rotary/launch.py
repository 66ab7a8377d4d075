"""The launch of the rotation: heads of a program, warps, grid."""

from __future__ import annotations

import torch
import triton

from tilewright.kernels.device import current
from tilewright.kernels.launches import launch
from tilewright.kernels.rotary import triton as kernels

LEAST, MOST = 1024, 4096
"""Elements of a program's block of heads, if there are enough heads."""
WARP_ELEMENTS = 512
"""Elements of a warp: two vectors of 16 bytes for each thread in 16 bits."""


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q[B, H, S, D] and k[B, K, S, D] rotated, by the negative angles if `backward`; D has stride 1."""
    results = torch.empty_like(q), torch.empty_like(k)
    (batch, q_heads, length, width), k_heads = q.shape, k.shape[1]
    if batch * length * width == 0 or q_heads + k_heads == 0:
        return results
    pairs = triton.next_power_of_2(width // 2)
    heads = _heads(q_heads, k_heads, 2 * pairs)
    warps = min(max(heads * 2 * pairs // WARP_ELEMENTS, 1), 4)
    blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    with current(q):
        launch(
            kernels.rotate, (batch * length, blocks), q, k, *results, cos, sin, length, q_heads, k_heads, width // 2,
            *q.stride()[:3], *k.stride()[:3], *results[0].stride()[:3], *results[1].stride()[:3], cos.stride(0),
            SIGN=-1.0 if backward else 1.0, HEADS=heads, PAIRS=pairs, INTERLEAVED=interleaved, num_warps=warps,
        )  # fmt: skip
    return results


def _heads(q_heads: int, k_heads: int, width: int) -> int:
    """Heads of a block: as many as q and k both have, so that no block is mostly empty."""
    shared: int = triton.next_power_of_2(max(min(q_heads, k_heads), 1))
    wanted: int = min(max(shared, LEAST // width), triton.next_power_of_2(max(q_heads, k_heads)))
    return max(min(wanted, MOST // width), 1)
