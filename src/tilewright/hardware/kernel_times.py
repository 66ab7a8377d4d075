"""How long kernels take beside their floors, by kind: coefficients fitted to kernels that were timed on a device.

A kernel's time is predicted as a sum over `TERMS`, each of which follows from its cost and the device's ceilings
(`cost/work.py`), times the coefficients of its kind. `tilewright doctor --kernels` times and fits them (`cost/fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

TERMS = ("start", "load", "cached", "DRAM", "arithmetic", "doubles", "draws", "narrow")
"""1; 1 if anything is read; the memory time of what the last-level cache holds; of what it does not; the time of the
arithmetic; of the operations in float64; of random numbers; of few programs, each with one SM's share. Microseconds
but for the first two."""
Coefficients = tuple[float, ...]
"""One for each of `TERMS`: microseconds for the first two, numbers for the others."""
KernelTimes = Mapping[str, Coefficients]
"""By kind of kernel (`cost/work.py`)."""

UNFITTED: Coefficients = (1.0, 0.3, 1.6, 1.0, 1.1, 1.0, 1.0, 1.0)
"""Of a kind that nobody timed."""

# Fitted on an H200 (torch 2.11, Triton 3.6, bf16) to medians of the profiler's kernel times: the programs of
# `tilewright doctor --kernels` and the launches of ten models of `benchmarks/models.py --launches`.
H200: KernelTimes = {
    "attention backward, cudnn": (5.27, 0.0, 3.62, 1.95, 3.37, 1.0, 1.0, 1.0),
    "attention backward, efficient": (10.2, 0.0, 9.57, 9.03, 8.47, 1.0, 1.0, 1.0),
    "attention, cudnn": (3.95, 0.0, 4.05, 0.899, 2.62, 1.0, 1.0, 1.0),
    "attention, efficient": (4.31, 0.0, 11.7, 1.0, 11.5, 1.0, 1.0, 1.0),
    "columns": (2.83, 0.0, 6.17, 1.35, 0.0, 0.0, 0.112, 1.0),
    "columns and rows": (3.6, 0.0, 6.74, 1.69, 0.0, 1.0, 0.0, 1.81),
    "columns and rows, transposed": (4.65, 0.0, 16.8, 6.21, 0.0, 1.0, 1.0, 1.0),
    "convolution": (5.65, 0.0, 4.25, 4.7, 0.836, 1.0, 1.0, 1.0),
    "convolution backward": (15.0, 0.0, 4.19, 1.96, 1.1, 1.0, 1.0, 1.0),
    "convolution backward, 1x1": (11.6, 0.0, 1.6, 0.976, 0.65, 1.0, 1.0, 1.0),
    "convolution backward, depthwise": (1.0, 0.0, 1.6, 17.2, 1.1, 1.0, 1.0, 1.0),
    "convolution backward, padded": (0.0, 0.0, 17.3, 3.72, 8.81, 1.0, 1.0, 1.0),
    "convolution, 1x1": (2.53, 0.0, 1.35, 1.52, 0.881, 1.0, 1.0, 1.0),
    "convolution, depthwise": (15.0, 0.0, 14.5, 7.14, 1.1, 1.0, 1.0, 1.0),
    "convolution, padded": (0.0, 0.0, 7.65, 17.5, 1.05, 1.0, 1.0, 1.0),
    "copy": (2.17, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0),
    "cumsum": (2.25, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0),
    "embedding": (1.75, 0.0, 2.07, 1.12, 0.0, 1.0, 1.0, 1.0),
    "embedding_dense_backward": (13.8, 0.0, 9.97, 23.3, 0.0, 1.0, 1.0, 1.0),
    "gather": (1.19, 0.0, 1.84, 0.961, 4.53, 1.0, 1.0, 2.14),
    "index": (3.37, 0.0, 0.498, 1.0, 0.0, 1.0, 1.0, 1.0),
    "index_put": (5.93, 0.0, 22.6, 1.0, 0.0, 1.0, 1.0, 1.0),
    "long rows, three passes": (1.0, 0.0, 1.6, 2.35, 0.0, 1.0, 1.0, 1.0),
    "long rows, two passes": (1.0, 0.0, 1.6, 1.61, 0.0, 1.0, 1.0, 1.0),
    "nll_loss_backward": (3.05, 0.0, 1.6, 1.48, 0.0, 1.0, 1.0, 1.0),
    "nll_loss_forward": (2.83, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0),
    "pointwise": (0.693, 0.445, 1.72, 0.958, 0.677, 1.0, 0.826, 0.506),
    "pointwise, transposed": (1.44, 0.0, 2.32, 1.11, 0.0421, 1.0, 1.0, 0.0),
    "product": (2.77, 0.0, 1.11, 0.597, 0.906, 1.0, 1.0, 1.0),
    "rows, three passes": (1.47, 0.0, 3.92, 1.37, 0.0, 1.0, 1.0, 1.0),
    "rows, three passes, transposed": (1.86, 0.0, 14.6, 8.24, 0.0, 1.0, 1.0, 1.0),
    "rows, two passes": (1.62, 0.0, 2.03, 0.982, 0.0, 27.2, 0.158, 1.0),
    "tilewright.add_norm": (0.76, 0.0, 1.81, 1.07, 0.0, 1.0, 1.0, 1.0),
    "tilewright.attention": (3.17, 0.0, 3.81, 2.3, 1.4, 1.0, 1.0, 1.0),
    "tilewright.attention_backward": (15.0, 0.0, 0.0, 0.263, 2.95, 1.0, 1.0, 1.0),
    "tilewright.cross_entropy": (3.57, 0.0, 3.16, 1.1, 0.0, 1.0, 1.0, 1.0),
    "tilewright.cross_entropy_backward": (2.05, 0.0, 1.99, 1.01, 0.0, 1.0, 1.0, 1.0),
    "tilewright.embedding_sums": (15.0, 0.0, 1.58, 1.41, 0.0, 1.0, 1.0, 1.0),
    # By its bench suite: 117 µs where cuBLAS takes 115 for the product alone (16384 × 3072 × 768).
    "tilewright.linear_gelu": (3.5, 0.0, 1.67, 0.75, 0.86, 1.0, 1.0, 1.0),
    "tilewright.norm": (2.37, 0.0, 1.68, 1.13, 0.0, 1.0, 1.0, 1.0),
    "tilewright.norm_backward": (5.68, 0.0, 8.44, 1.38, 0.0, 1.0, 1.0, 1.0),
    # Of 33 launches a token in a decoder of width 2048, 1 and 32 rows: 349 and 449 µs.
    "tilewright.skinny_linear": (3.5, 0.0, 1.3, 1.15, 1.1, 1.0, 1.0, 1.0),
    "tilewright.softmax": (1.94, 0.0, 2.24, 0.982, 0.0, 1.0, 1.0, 1.0),
    "tilewright.softmax_backward": (1.91, 0.0, 2.82, 0.984, 0.0, 1.0, 1.0, 1.0),
}
"""Of the datasheets of all GPUs, since they are shares of a device's own ceilings."""
