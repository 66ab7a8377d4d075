"""How long kernels take beside their floors, by kind: coefficients fitted to kernels that were timed on a device.

A kernel's time is predicted as a sum over `TERMS`, each of which follows from its cost and the device's ceilings
(`cost/work.py`), times the coefficients of its kind. `tilewright doctor --kernels` times and fits them (`cost/fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

TERMS = ("start", "cached", "DRAM", "arithmetic", "narrow")
"""1; the memory time where the last-level cache holds what is moved; where it does not; the time of the arithmetic;
the time of few programs, each with one SM's share. Microseconds but for the first."""
Coefficients = tuple[float, ...]
"""One for each of `TERMS`: microseconds for the first, numbers for the others."""
KernelTimes = Mapping[str, Coefficients]
"""By kind of kernel (`cost/work.py`)."""

UNFITTED: Coefficients = (1.0, 1.3, 1.1, 1.1, 1.0)
"""Of a kind that nobody timed."""

# `tilewright doctor --kernels` on an H200 (torch 2.11, Triton 3.6): medians of the profiler's kernel times, bf16.
H200: KernelTimes = {
    "attention": (3.04, 5.92, 1.78, 1.17, 1.0),
    "attention backward": (15.0, 6.82, 3.07, 1.33, 1.0),
    "columns": (4.62, 4.07, 1.18, 0.0, 1.0),
    "columns and rows": (5.45, 7.52, 1.63, 0.0, 1.0),
    "columns and rows, transposed": (4.57, 17.0, 8.03, 0.0, 1.0),
    "convolution": (5.32, 2.13, 2.44, 0.975, 1.0),
    "embedding": (1.76, 2.07, 1.13, 0.0, 1.0),
    "embedding_dense_backward": (7.84, 60.1, 19.6, 0.0, 1.0),
    "long rows, three passes": (15.0, 1.3, 2.28, 0.0, 1.0),
    "long rows, two passes": (15.0, 1.3, 1.52, 0.0, 1.0),
    "pointwise": (1.72, 2.1, 0.943, 0.733, 1.0),
    "pointwise, transposed": (1.77, 2.21, 1.19, 1.1, 1.0),
    "product": (3.11, 1.67, 0.749, 0.835, 1.0),
    "rows, three passes": (1.93, 3.77, 1.49, 0.0, 1.0),
    "rows, three passes, transposed": (1.9, 11.7, 7.96, 0.0, 1.0),
    "rows, two passes": (1.75, 2.95, 0.993, 0.0, 1.0),
    "tilewright.add_norm": (3.05, 1.85, 1.11, 0.0, 1.0),
    "tilewright.cross_entropy": (3.67, 2.83, 1.09, 0.0, 1.0),
    "tilewright.cross_entropy_backward": (2.08, 1.97, 1.01, 0.0, 1.0),
    # By its bench suite, not by this fit: 117 µs where cuBLAS takes 115 for the product alone (16384 × 3072 × 768).
    "tilewright.linear_gelu": (3.5, 1.67, 0.75, 0.86, 1.0),
    "tilewright.norm": (2.87, 2.05, 1.14, 0.0, 1.0),
    "tilewright.norm_backward": (6.33, 5.64, 1.22, 0.0, 1.0),
    # Of 33 launches a token in a decoder of width 2048, 1 and 32 rows: 349 and 449 µs.
    "tilewright.skinny_linear": (3.5, 1.3, 1.15, 1.1, 1.0),
    "tilewright.softmax": (1.95, 2.17, 0.995, 0.0, 1.0),
    "tilewright.softmax_backward": (1.92, 2.8, 0.986, 0.0, 1.0),
}
"""Of the datasheets of all GPUs, since they are shares of a device's own ceilings."""
