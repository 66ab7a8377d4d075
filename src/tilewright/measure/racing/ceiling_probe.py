"""Ceiling probes: plain copies, reads, writes or matrix products, timed interleaved with the implementations.

The rate that a device reaches varies with temperature and load, so a race reports the share of the rate that
these calls reached in the same rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

Limit = Literal["copy", "read", "write", "matmul"]

_GPU_BYTES = 2**30
_CPU_BYTES = 2**28
_MATMUL_SIZE = 8192
_CPU_MATMUL_SIZE = 1024


@dataclass(frozen=True)
class CeilingProbe:
    """A call and the bytes it moves or the FLOPs it computes."""

    call: Callable[[], object]
    nbytes: int = 0
    flops: int = 0

    def rate(self, us: float) -> float:
        """GB/s, or TFLOP/s of a product, if the call took `us`."""
        return self.nbytes / us / 1e3 if self.nbytes else self.flops / us / 1e6


@functools.lru_cache(maxsize=4)
def ceiling_probe(limit: Limit, dtype: str, device: str) -> CeilingProbe:
    """The probe of a limit: 1 GiB moved on a GPU (256 MiB on a CPU), or a square product of `dtype`.

    A copy reads one half and writes the other. Values are random; the pages of the target are mapped. A GPU of
    less than 16 GiB moves a sixteenth of its memory. The buffers are cached for the next race.
    """
    if limit == "matmul":
        size = _CPU_MATMUL_SIZE if device == "cpu" else _MATMUL_SIZE
        factors = torch.randn(2, size, size, device=device).to(getattr(torch, dtype))
        return CeilingProbe(partial(torch.mm, *factors, out=torch.zeros_like(factors[0])), flops=2 * size**3)
    nbytes = _CPU_BYTES
    if device != "cpu":
        nbytes = min(_GPU_BYTES, int(torch.cuda.get_device_properties(device).total_memory) // 16)
    numbers = torch.randn(nbytes // 4 // (2 if limit == "copy" else 1), device=device)
    if limit == "copy":
        return CeilingProbe(partial(torch.zeros_like(numbers).copy_, numbers), nbytes)
    if limit == "read":
        total = torch.zeros((), device=device)
        return CeilingProbe(partial(torch.sum, numbers, dim=0, out=total), nbytes)
    return CeilingProbe(partial(numbers.fill_, 1.0), nbytes)
