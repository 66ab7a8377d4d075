"""How long kernels take beside their floors, by kind: coefficients fitted to kernels that were timed on a device.

A kernel's time is predicted as a sum over `TERMS`, each of which follows from its cost and the device's ceilings
(`cost/work.py`), times the coefficients of its kind. `tilewright doctor --kernels` times and fits them (`cost/fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

TERMS = ("start", "load", "cached", "DRAM", "arithmetic", "doubles", "draws", "narrow", "filled", "combined")
"""start: 1. load: 1 if anything is read. cached: the memory time of bytes that the last-level cache holds. DRAM: that
of all others. arithmetic, doubles, draws: the times of arithmetic, of float64 operations and of random numbers.
narrow: the time of few programs, each with one SM's share. filled: the share of SMs that have a program. combined: the
time in which threads exchange values of rows that they sum. Microseconds but for start, load and filled."""
Coefficients = tuple[float, ...]
"""One for each of `TERMS`: microseconds for start, load and filled, numbers for the others."""
KernelTimes = Mapping[str, Coefficients]
"""By kind of kernel (`cost/work.py`)."""

UNFITTED: Coefficients = (1.0, 0.3, 1.6, 1.0, 1.1, 1.0, 1.0, 1.0, 0.0, 0.0)
"""For kinds of kernels that were not timed."""

# Fitted on an H200 (torch 2.11, Triton 3.6, bf16) to medians of the profiler's kernel times: the programs of
# `tilewright doctor --kernels` and the launches of eleven models of `benchmarks/models.py --launches`; generated
# kernels also to those of ten models by name.
H200: KernelTimes = {
    "attention": (5.26, 0.0, 1.27, 0.612, 3.29, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward": (11.6, 0.0, 1.69, 1.83, 3.28, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward, cudnn": (2.4, 0.0, 2.48, 8.74, 1.58, 1.0, 2.14, 1.0, 0.0, 0.0),
    "attention backward, efficient": (7.12, 0.0, 6.89, 6.76, 5.01, 1.0, 7.88, 1.0, 0.0, 0.0),
    "attention, cudnn": (1.54, 0.0, 7.71, 1.0, 1.7, 1.0, 0.0, 1.0, 0.0, 0.0),
    "attention, efficient": (4.01, 0.0, 8.21, 1.0, 5.47, 1.0, 3.72, 1.0, 0.0, 0.0),
    "columns": (4.2, 0.0, 2.45, 1.1, 0.0, 0.0, 1.56, 5.0, 1.34, 0.0),
    "columns and rows": (3.38, 0.0, 6.66, 1.56, 0.0, 1.0, 0.0, 2.1, 0.0, 0.0),
    "columns and rows, transposed": (4.72, 0.0, 16.5, 5.94, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "columns, sums alone": (2.1, 0.0, 2.26, 1.18, 0.0, 1.86, 1.0, 2.68, 2.93, 0.794),
    "columns, transposed": (2.81, 0.0, 2.22, 5.98, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution": (3.66, 0.0, 4.29, 4.51, 0.837, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward": (15.0, 0.0, 4.28, 1.65, 0.937, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, 1x1": (10.1, 0.0, 1.33, 0.789, 0.595, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, depthwise": (15.0, 0.0, 25.8, 9.45, 40.5, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, padded": (9.73, 0.0, 11.0, 3.74, 1.33, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, 1x1": (2.39, 0.0, 1.04, 1.51, 0.791, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, across": (15.0, 0.0, 5.05, 1.0, 1.85, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, depthwise": (15.0, 0.0, 8.58, 4.04, 25.1, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, padded": (0.0, 0.0, 7.05, 17.0, 1.03, 1.0, 1.0, 1.0, 0.0, 0.0),
    "copy": (2.13, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "cumsum": (2.14, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding": (1.75, 0.0, 2.07, 1.12, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding_dense_backward": (10.7, 0.0, 10.5, 2.32, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "gather": (1.29, 0.0, 1.31, 1.0, 3.56, 1.0, 0.729, 0.593, 0.608, 0.0),
    "index": (3.37, 0.0, 0.498, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "index_put": (5.58, 0.0, 22.8, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "keep_mask": (2.01, 0.3, 9.19, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, three passes": (15.0, 0.0, 1.6, 2.29, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, two passes": (15.0, 0.0, 1.6, 1.53, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_backward": (2.22, 0.0, 31.8, 1.49, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_forward": (2.82, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "pointwise": (0.65, 0.412, 1.55, 1.0, 0.753, 6.83, 1.05, 1.2, 0.0603, 2.35),
    "pointwise, transposed": (1.17, 0.0, 1.56, 1.18, 18.9, 1.0, 1.0, 5.0, 0.34, 1.07),
    "product": (2.41, 0.0, 0.839, 0.512, 0.868, 1.0, 1.0, 1.0, 0.0, 0.0),
    "rows, three passes": (1.41, 0.0, 3.53, 1.37, 0.0, 1.0, 1.35, 4.45, 0.0, 0.0),
    "rows, three passes, transposed": (2.54, 0.0, 7.9, 9.55, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "rows, two passes": (1.59, 0.0, 1.91, 1.0, 0.0, 1.0, 0.413, 5.0, 0.0, 0.0),
    "scatter": (7.42, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.add_norm": (0.76, 0.0, 1.81, 1.07, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention": (3.61, 0.0, 1.87, 2.08, 1.46, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention_backward": (15.0, 0.0, 8.74, 0.3, 2.92, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy": (3.67, 0.0, 3.03, 1.23, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy_backward": (2.05, 0.0, 1.99, 1.01, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.embedding_sums": (4.99, 0.0, 2.57, 1.91, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    # By hand, with a product's arithmetic: a fit starts at 12.6 µs, which no small call was timed to show.
    "tilewright.linear_gelu": (3.4, 0.0, 1.2, 1.0, 0.868, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm": (2.38, 0.0, 1.6, 1.13, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm_backward": (4.5, 0.0, 4.75, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    # Of 33 launches a token in a decoder of width 2048, 1 and 32 rows: 349 and 449 µs.
    "tilewright.skinny_linear": (3.5, 0.0, 1.3, 1.15, 1.1, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax": (1.94, 0.0, 2.24, 0.982, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax_backward": (1.91, 0.0, 2.82, 0.984, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
}
"""Of the datasheets of all GPUs, since they are shares of a device's own ceilings."""
