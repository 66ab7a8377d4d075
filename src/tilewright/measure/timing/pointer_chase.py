"""Pointer chasing on a GPU, which measures memory latency."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _chase(chain, last, steps):  # type: ignore[no-untyped-def]
    place = tl.load(chain)
    for _ in range(steps):
        # .cg bypasses L1.
        place = tl.load(chain + place, cache_modifier=".cg")
    tl.store(last, place)


def chase(chain: torch.Tensor, steps: int) -> torch.Tensor:
    """Follow `chain` (int32, each element the index of the next) from element 0 for `steps` loads, in one warp.

    Returns the last index, one int32 on the chain's device.
    """
    last = torch.empty(1, dtype=torch.int32, device=chain.device)
    _chase[(1,)](chain, last, steps, num_warps=1)
    return last
