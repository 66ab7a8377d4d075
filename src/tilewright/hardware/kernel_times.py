"""Coefficients that predict the times of kernels by kind, fitted to kernels that were timed on a device.

A kernel's time is predicted as a sum over `TERMS`, each of which follows from its cost and the device's ceilings
(`cost/work.py`), times the coefficients of its kind. `tilewright doctor --kernels` times and fits them (`cost/fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

TERMS = ("start", "load", "cached", "DRAM", "arithmetic", "doubles", "draws", "narrow", "filled", "combined")
"""start: 1. load: 1 if anything is read. cached: the memory time of bytes that the last-level cache holds. DRAM: that
of all others. arithmetic, doubles, draws: the times of arithmetic, of float64 operations and of random numbers.
narrow: the time of few programs, each with one SM's share. filled: the share of SMs that have a program. combined: the
time in which threads exchange values of rows that they sum. All but start, load and filled are in microseconds."""
Coefficients = tuple[float, ...]
"""One for each of `TERMS`: microseconds for start, load and filled, numbers for the others."""
KernelTimes = Mapping[str, Coefficients]
"""By kind of kernel (`cost/work.py`)."""

UNFITTED: Coefficients = (1.0, 0.3, 1.6, 1.0, 1.1, 1.0, 1.0, 1.0, 0.0, 0.0)
"""For kinds of kernels that were not timed."""

# Fitted on an H200 (torch 2.11, Triton 3.6, bf16) to medians of the profiler's kernel times: 7,345 launches of 33
# models, timed in place (`benchmarks/models.py --launches`). Kinds that none of them has keep an older fit. So do rows
# of over 1024 columns, where the prediction chooses between generated kernels and the norms'. Short rows, products of
# few rows and eight other kinds are fitted to 4,713 later launches of 19 models. Those hardly show two coefficients,
# set by hand: doubles of short columns and rows (the fit gave 47.9), cached bytes of products of few rows (8.0).
# FlashAttention-2, which no model ran, is fitted to its rows of `benchmarks/results/h200/attention.jsonl`.
H200: KernelTimes = {
    "attention": (6.67, 0.0, 3.23, 1.31, 0.887, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward": (13.2, 0.0, 1.6, 2.74, 1.19, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention backward, cudnn": (9.86, 0.0, 1.12, 2.57, 1.42, 1.0, 0.867, 1.0, 0.0, 0.0),
    "attention backward, efficient": (5.7, 0.0, 5.28, 5.31, 3.01, 1.0, 7.82, 1.0, 0.0, 0.0),
    "attention backward, flash": (15.0, 0.0, 1.6, 2.98, 2.09, 1.0, 1.0, 1.0, 0.0, 0.0),
    "attention, cudnn": (3.96, 0.0, 1.26, 0.972, 1.15, 1.0, 1.56, 1.0, 0.0, 0.0),
    "attention, efficient": (3.48, 0.0, 8.27, 5.72, 2.25, 1.0, 2.78, 1.0, 0.0, 0.0),
    "attention, flash": (0.5, 0.0, 1.6, 0.8, 1.46, 1.0, 1.0, 1.0, 0.0, 0.0),
    "columns": (2.57, 0.0, 2.62, 1.08, 0.137, 1.81, 1.81, 2.63, 1.61, 0.00289),
    "columns and rows": (1.15, 0.0, 4.01, 2.0, 0.0, 0.0, 3.05, 4.83, 0.0, 0.542),
    "columns and rows, short": (2.22, 0.0, 2.92, 1.11, 0.537, 16.0, 1.57, 3.96, 0.481, 0.276),
    "columns and rows, transposed": (4.72, 0.0, 16.5, 5.94, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "columns, sums alone": (1.46, 0.0, 2.88, 1.26, 0.0704, 1.15, 1.0, 1.03, 2.88, 0.774),
    "columns, transposed": (1.49, 0.0, 7.36, 2.0, 4.0, 0.0, 1.0, 3.34, 0.744, 0.0),
    "convolution": (4.43, 0.0, 2.97, 0.44, 0.837, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward": (8.23, 0.0, 7.37, 0.806, 0.944, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, 1x1": (6.34, 0.0, 1.28, 0.897, 0.753, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, across": (0.5, 0.0, 0.3, 1.0, 0.865, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, depthwise": (15.0, 0.0, 25.6, 12.8, 20.6, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution backward, padded": (12.6, 0.0, 13.3, 2.48, 0.598, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, 1x1": (2.48, 0.0, 1.12, 0.739, 0.666, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, across": (0.663, 0.0, 0.727, 1.0, 0.59, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, depthwise": (15.0, 0.0, 8.85, 4.52, 23.9, 1.0, 1.0, 1.0, 0.0, 0.0),
    "convolution, padded": (1.8, 0.0, 10.0, 16.3, 1.13, 1.0, 1.0, 1.0, 0.0, 0.0),
    "copy": (2.13, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "cumsum": (2.17, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding": (1.75, 0.0, 2.07, 1.12, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "embedding_dense_backward": (13.8, 0.0, 8.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "gather": (1.21, 0.0, 2.0, 1.0, 2.4, 1.0, 1.0, 0.876, 0.0323, 0.0),
    "gather, trigonometric": (2.24, 0.0, 1.6, 1.0, 1.34, 1.0, 1.0, 5.0, 0.0158, 0.0),
    "index": (3.37, 0.0, 0.498, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "index_put": (5.6, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "keep_mask": (1.97, 0.3, 8.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, three passes": (15.0, 0.0, 1.6, 2.29, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "long rows, two passes": (15.0, 0.0, 1.6, 1.53, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "native_layer_norm": (3.17, 0.0, 2.39, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_backward": (2.22, 0.0, 31.8, 1.49, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "nll_loss_forward": (2.7, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "pointwise": (0.74, 0.305, 1.59, 1.0, 1.45, 3.73, 1.08, 1.75, 0.0289, 6.2),
    "pointwise, narrow": (0.923, 0.0, 1.65, 1.17, 0.0, 1.0, 1.0, 3.09, 0.111, 0.0),
    "pointwise, transposed": (1.16, 0.0, 1.78, 1.14, 0.0, 1.0, 1.0, 2.11, 0.245, 0.0),
    "pointwise, trigonometric": (1.91, 0.304, 0.98, 1.0, 0.904, 1.0, 1.0, 5.0, 0.0, 0.0),
    "product": (2.29, 0.0, 0.955, 0.59, 0.834, 1.0, 1.0, 1.0, 0.0, 0.0),
    "product, grouped": (6.0, 0.0, 3.08, 0.616, 1.04, 1.0, 1.0, 1.0, 0.0, 0.0),
    "rows, three passes": (1.64, 0.0, 3.75, 1.21, 0.0, 0.0, 0.688, 5.0, 0.0, 0.0),
    "rows, three passes, short": (1.46, 0.0, 1.97, 1.0, 0.321, 2.0, 0.63, 5.0, 0.0, 0.243),
    "rows, three passes, transposed": (2.1, 0.0, 2.15, 1.59, 2.58, 11.3, 1.0, 5.0, 0.0, 5.07),
    "rows, two passes": (1.07, 0.0, 1.66, 1.0, 0.777, 0.0, 0.223, 5.0, 0.603, 0.0),
    "rows, two passes, transposed": (2.2, 0.0, 1.23, 2.0, 4.0, 1.0, 1.0, 5.0, 5.0, 18.6),
    "scatter": (7.1, 0.0, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.add_embedding_sums_": (4.06, 0.0, 2.51, 2.0, 0.0, 1.0, 1.0, 1.0, 3.06, 28.4),
    "tilewright.add_norm": (2.04, 0.0, 1.05, 1.1, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention": (2.7, 0.0, 0.3, 0.3, 0.935, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention_backward": (4.25, 0.0, 3.2, 0.857, 1.31, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.attention_prefix": (2.56, 0.0, 0.3, 0.697, 0.296, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy": (4.55, 0.0, 1.6, 1.18, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.cross_entropy_backward": (2.26, 0.0, 0.969, 1.02, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.draw_philox": (0.721, 0.3, 1.6, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.embedding_sums": (1.88, 0.0, 1.21, 1.41, 0.0, 1.0, 1.0, 0.85, 1.0, 19.5),
    "tilewright.index_sums": (4.99, 0.0, 4.3, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.linear_gelu": (0.5, 0.0, 1.59, 0.956, 0.878, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm": (1.65, 0.0, 1.81, 1.07, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.norm_backward": (3.25, 0.0, 2.23, 1.12, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.product": (2.5, 0.0, 1.6, 1.0, 1.5, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.scatter_sums": (9.76, 0.0, 1.6, 2.0, 0.0, 1.0, 1.0, 1.0, 5.0, 0.0279),
    "tilewright.skinny_linear": (2.44, 0.0, 1.6, 1.01, 4.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax": (1.08, 0.0, 8.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.softmax_backward": (1.91, 0.0, 2.82, 0.984, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.sorted_bounds": (2.8, 0.0, 7.22, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.window_attention": (7.36, 0.0, 3.47, 1.54, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.window_attention_backward": (15.0, 0.0, 8.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "tilewright.write_cache_": (1.38, 0.0, 8.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
}
"""Used for all GPUs with a datasheet, since they are shares of a device's own ceilings."""
