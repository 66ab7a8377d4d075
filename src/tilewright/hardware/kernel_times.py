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

# Fitted on an H200 (torch 2.11, Triton 3.6, bf16) to medians of the profiler's kernel times: launches of 13 models,
# timed in place (of attention in windows and over a cache, of 16), and our kernels over sizes. Kinds that none of them
# has keep an older fit: `benchmarks/models.py --launches` of eleven models and `tilewright doctor --kernels`.
H200: KernelTimes = {
    "attention": (6.67, 0.0, 3.23, 1.31, 0.887, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward": (13.2, 0.0, 1.6, 2.74, 1.19, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward, cudnn": (9.43, 0.0, 1.22, 2.47, 1.45, 1.0, 0.888, 1.0, 0.0, 0.0),
    "attention backward, efficient": (10.8, 0.0, 8.28, 6.9, 7.23, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention, cudnn": (3.75, 0.0, 2.91, 0.927, 1.01, 1.0, 1.65, 1.0, 0.0, 0.0),
    "attention, efficient": (4.53, 0.0, 11.3, 1.0, 6.42, 1.0, 1.0, 1.0, 0.0, 0.0),
    "columns": (3.32, 0.0, 2.01, 1.02, 0.113, 0.106, 1.24, 0.0, 1.72, 0.495),
    "columns and rows": (1.15, 0.0, 4.01, 2.0, 0.0, 0.0, 3.05, 4.83, 0.0, 0.542),
    "columns and rows, transposed": (4.72, 0.0, 16.5, 5.94, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "columns, sums alone": (1.95, 0.0, 2.98, 1.27, 3.01, 1.07, 1.0, 5.0, 2.08, 1.02),
    "columns, transposed": (1.77, 0.0, 5.07, 1.79, 4.0, 1.0, 1.0, 0.0, 2.2, 1.86),
    "convolution": (4.61, 0.0, 2.12, 0.3, 0.943, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward": (9.19, 0.0, 2.71, 0.634, 1.11, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, 1x1": (5.48, 0.0, 0.772, 0.791, 0.891, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, depthwise": (15.0, 0.0, 22.5, 10.1, 31.5, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, padded": (13.0, 0.0, 8.31, 3.89, 1.6, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, 1x1": (1.86, 0.0, 1.04, 0.693, 0.762, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, across": (15.0, 0.0, 5.05, 1.0, 1.85, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, depthwise": (15.0, 0.0, 7.89, 4.07, 27.4, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, padded": (6.46, 0.0, 5.36, 16.6, 0.799, 1.0, 1.0, 1.0, 0.0, 0.0),
    "copy": (2.13, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "cumsum": (2.18, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding": (1.75, 0.0, 2.07, 1.12, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding_dense_backward": (13.8, 0.0, 8.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "gather": (1.17, 0.0, 1.97, 1.0, 2.62, 1.0, 0.955, 1.29, 0.0446, 0.0),
    "gather, trigonometric": (2.19, 0.0, 1.91, 1.0, 1.73, 1.0, 1.0, 5.0, 0.0413, 0.0),
    "index": (3.37, 0.0, 0.498, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "index_put": (5.36, 0.0, 8.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "keep_mask": (2.01, 0.3, 9.19, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, three passes": (15.0, 0.0, 1.6, 2.29, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, two passes": (15.0, 0.0, 1.6, 1.53, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_backward": (2.22, 0.0, 31.8, 1.49, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_forward": (2.82, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "pointwise": (0.734, 0.312, 1.51, 1.0, 1.46, 6.24, 1.08, 0.45, 0.122, 4.28),
    "pointwise, narrow": (3.24, 0.0, 2.67, 1.0, 0.0, 1.0, 1.0, 1.0, 2.24, 0.0),
    "pointwise, transposed": (1.16, 0.0, 1.85, 1.19, 4.0, 1.0, 0.0, 0.382, 0.229, 128.0),
    "product": (2.22, 0.0, 0.86, 0.603, 0.854, 1.0, 1.0, 1.0, 0.0, 0.0),
    "product, grouped": (5.57, 0.0, 3.99, 0.78, 0.884, 1.0, 1.0, 1.0, 0.0, 0.0),
    "rows, three passes": (1.64, 0.0, 3.75, 1.21, 0.0, 0.0, 0.688, 5.0, 0.0, 0.0),
    "rows, three passes, transposed": (2.54, 0.0, 7.9, 9.55, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "rows, two passes": (1.13, 0.0, 1.52, 1.0, 0.863, 0.0, 0.0, 5.0, 0.451, 0.0),
    "rows, two passes, transposed": (2.43, 0.0, 4.24, 2.0, 0.0, 1.0, 1.0, 1.0, 1.43, 0.735),
    "scatter": (7.15, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.add_embedding_sums_": (1.45, 0.0, 5.54, 1.14, 0.0, 1.0, 1.0, 1.0, 0.451, 43.0),
    "tilewright.add_norm": (1.0, 0.0, 1.37, 1.14, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention": (2.87, 0.0, 0.3, 0.571, 0.9, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention_backward": (2.56, 0.0, 5.39, 1.12, 1.27, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention_prefix": (2.56, 0.0, 0.3, 0.697, 0.296, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy": (4.47, 0.0, 1.6, 1.09, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy_backward": (2.05, 0.0, 1.99, 1.01, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.draw_philox": (0.733, 0.3, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.embedding_sums": (2.11, 0.0, 1.72, 1.52, 0.0, 1.0, 1.0, 1.0, 1.11, 20.3),
    "tilewright.linear_gelu": (0.5, 0.0, 2.11, 0.889, 0.878, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm": (1.45, 0.0, 1.89, 1.07, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm_backward": (6.29, 0.0, 4.09, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.scatter_sums": (1.8, 0.0, 2.86, 2.0, 0.0, 1.0, 1.0, 1.0, 0.797, 0.0486),
    # Of 33 launches a token in a decoder of width 2048, 1 and 32 rows: 349 and 449 µs.
    "tilewright.skinny_linear": (3.5, 0.0, 1.3, 1.15, 1.1, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax": (0.5, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax_backward": (1.91, 0.0, 2.82, 0.984, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.sorted_bounds": (2.26, 0.0, 6.72, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.window_attention": (7.36, 0.0, 3.47, 1.54, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.window_attention_backward": (15.0, 0.0, 8.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
}
"""Used for all GPUs with a datasheet, since they are shares of a device's own ceilings."""
