"""A walk along a chain of pointers on a GPU: the latency of memory, nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _walk(chain, last, steps):  # type: ignore[no-untyped-def]
    place = tl.load(chain)
    for _ in range(steps):
        # .cg: the answer is to come from L2 or memory, not from the multiprocessor's own cache.
        place = tl.load(chain + place, cache_modifier=".cg")
    tl.store(last, place)


def walk(chain: torch.Tensor, steps: int) -> torch.Tensor:
    """Follow `chain` (int32, each element the index of the next) from element 0 for `steps` loads.

    Returns where it ended, one int32, on the chain's device. One thread walks: nothing overlaps.
    """
    last = torch.empty(1, dtype=torch.int32, device=chain.device)
    _walk[(1,)](chain, last, steps, num_warps=1)
    return last
