"""The launch of the textbook product in CUDA C++ (`cuda.cu`)."""

from __future__ import annotations

from pathlib import Path

import torch

from tilewright.kernels.device import current
from tilewright.kernels.nvrtc import available, kernel
from tilewright.records.suite import Workload

SOURCE = Path(__file__).parent / "cuda.cu"
TILE = 128
THREADS = 256


def refuses(workload: Workload) -> str | None:
    """Why the kernel does not take a workload: it shows tiling of fp32, without matrix instructions."""
    if workload.dtype != "float32":
        return f"fp32 only, not {workload.dtype}"
    if not torch.cuda.is_available() or not available(torch.cuda.current_device()):
        return "CUDA C++ cannot be built: no GPU with clusters, or no cuda-bindings"
    return None


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] · b [K, N] in fp32 on a GPU; made contiguous if they are not. No gradient."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    c = a.new_empty(len(a), b.shape[1])
    blocks = -(-c.shape[0] // TILE) * -(-c.shape[1] // TILE)
    with current(a):
        built = kernel(SOURCE, "matmul", "PPPqqq", device=a.device.index, threads=THREADS)
        built((blocks,), a.data_ptr(), b.data_ptr(), c.data_ptr(), *c.shape, a.shape[1])
    return c
