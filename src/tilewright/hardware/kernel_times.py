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

# Fitted on an H200 (torch 2.11, Triton 3.6, bf16) to medians of the profiler's kernel times: launches of seven models,
# timed in place; generated kernels also to those of twelve others, by name. Kinds that none of them has keep an older
# fit: `benchmarks/models.py --launches` of eleven models and `tilewright doctor --kernels`.
H200: KernelTimes = {
    "attention": (5.26, 0.0, 1.27, 0.612, 3.29, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward": (11.6, 0.0, 1.69, 1.83, 3.28, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward, cudnn": (5.53, 0.0, 9.31, 2.17, 1.96, 1.0, 1.68, 1.0, 0.0, 0.0),
    "attention backward, efficient": (7.12, 0.0, 6.89, 6.76, 5.01, 1.0, 7.88, 1.0, 0.0, 0.0),
    "attention, cudnn": (4.73, 0.0, 3.99, 1.12, 1.41, 1.0, 1.9, 1.0, 0.0, 0.0),
    "attention, efficient": (4.01, 0.0, 8.21, 1.0, 5.47, 1.0, 3.72, 1.0, 0.0, 0.0),
    "columns": (3.89, 0.0, 1.98, 1.08, 0.0, 0.0, 1.38, 5.0, 1.55, 0.355),
    "columns and rows": (1.15, 0.0, 4.01, 2.0, 0.0, 0.0, 3.05, 4.83, 0.0, 0.542),
    "columns and rows, transposed": (4.72, 0.0, 16.5, 5.94, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "columns, sums alone": (2.06, 0.0, 2.3, 1.11, 0.0, 1.85, 1.0, 3.26, 2.86, 0.903),
    "columns, transposed": (1.66, 0.0, 6.57, 1.37, 0.0, 1.0, 1.0, 0.776, 2.15, 2.58),
    "convolution": (7.06, 0.0, 2.32, 0.3, 0.818, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward": (15.0, 0.0, 2.16, 0.61, 1.02, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, 1x1": (7.36, 0.0, 0.542, 0.759, 0.821, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, depthwise": (15.0, 0.0, 22.1, 10.8, 31.5, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, padded": (15.0, 0.0, 7.65, 4.2, 1.49, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, 1x1": (2.38, 0.0, 1.13, 0.65, 0.684, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, across": (15.0, 0.0, 5.05, 1.0, 1.85, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, depthwise": (15.0, 0.0, 6.69, 3.37, 32.9, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, padded": (4.38, 0.0, 5.72, 17.1, 0.87, 1.0, 1.0, 1.0, 0.0, 0.0),
    "copy": (2.13, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "cumsum": (2.14, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding": (1.75, 0.0, 2.07, 1.12, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding_dense_backward": (10.7, 0.0, 10.5, 2.32, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "gather": (1.29, 0.0, 1.41, 1.0, 3.51, 1.0, 0.796, 0.522, 0.442, 0.0),
    "index": (3.37, 0.0, 0.498, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "index_put": (5.58, 0.0, 22.8, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "keep_mask": (2.01, 0.3, 9.19, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, three passes": (15.0, 0.0, 1.6, 2.29, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, two passes": (15.0, 0.0, 1.6, 1.53, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_backward": (2.22, 0.0, 31.8, 1.49, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_forward": (2.82, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "pointwise": (0.685, 0.369, 1.53, 1.0, 1.59, 7.17, 1.08, 0.767, 0.0874, 2.52),
    "pointwise, narrow": (1.08, 0.0, 2.3, 1.12, 0.0, 1.0, 1.0, 0.0, 0.612, 0.0),
    "pointwise, transposed": (1.13, 0.0, 1.65, 1.18, 4.0, 1.0, 1.0, 5.0, 0.334, 1.06),
    "product": (2.14, 0.0, 0.962, 0.48, 0.879, 1.0, 1.0, 1.0, 0.0, 0.0),
    "rows, three passes": (1.64, 0.0, 3.75, 1.21, 0.0, 0.0, 0.688, 5.0, 0.0, 0.0),
    "rows, three passes, transposed": (2.54, 0.0, 7.9, 9.55, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "rows, two passes": (1.17, 0.0, 1.79, 1.0, 0.0, 1.12, 0.258, 2.36, 0.39, 0.53),
    "rows, two passes, transposed": (2.43, 0.0, 4.24, 2.0, 0.0, 1.0, 1.0, 1.0, 1.43, 0.735),
    "scatter": (7.42, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.add_norm": (0.5, 0.0, 1.49, 1.19, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention": (2.23, 0.0, 2.21, 2.55, 1.21, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention_backward": (0.5, 0.0, 6.85, 3.98, 1.41, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy": (4.54, 0.0, 1.6, 1.1, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy_backward": (2.05, 0.0, 1.99, 1.01, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.embedding_sums": (4.99, 0.0, 2.57, 1.91, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.linear_gelu": (0.5, 0.0, 0.3, 1.1, 0.824, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm": (1.6, 0.0, 1.93, 1.07, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm_backward": (6.77, 0.0, 3.76, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    # Of 33 launches a token in a decoder of width 2048, 1 and 32 rows: 349 and 449 µs.
    "tilewright.skinny_linear": (3.5, 0.0, 1.3, 1.15, 1.1, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax": (1.94, 0.0, 2.24, 0.982, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax_backward": (1.91, 0.0, 2.82, 0.984, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
}
"""Of the datasheets of all GPUs, since they are shares of a device's own ceilings."""
