"""Pointer chasing on a GPU, which measures the latency of the memory that holds the pointers."""

from functools import partial

import torch
import triton
import triton.language as tl

from tilewright.measure.timing.stopwatch import CudaStopwatch


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


_LINE_BYTES = 128
_PROBE_BYTES = 8 * 2**20
_STEPS = 1024


def latencies_ns(device: str) -> tuple[float, float]:
    """Nanoseconds of one load right after the same chase, with the lines in L2, and after the flush before timed calls.

    The chain visits 1024 lines of 8 MiB in random order, so prefetching does not help and the time per step is
    the latency of the cache level that holds the lines.
    """
    run = partial(chase, chain().to(device), _STEPS)
    warm, cold = CudaStopwatch(device, flush_l2=False), CudaStopwatch(device)
    for _ in range(3):
        warm.time(run)
    first, second = (min(watch.time(run).us for _ in range(5)) * 1e3 / _STEPS for watch in (warm, cold))
    return first, second


def chain() -> torch.Tensor:
    """int32; the first element of each 128-byte line holds the index of the next line's first element: one cycle."""
    words = _LINE_BYTES // 4
    order = torch.randperm(_PROBE_BYTES // _LINE_BYTES) * words
    found = torch.zeros(_PROBE_BYTES // 4, dtype=torch.int32)
    found[order] = order.roll(-1).to(torch.int32)
    return found
