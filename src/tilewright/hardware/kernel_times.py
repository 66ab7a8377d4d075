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

# Kernels of seven whole models on an H200, bf16, as the profiler recorded them in place.
H200: KernelTimes = {
    "pointwise": (1.5, 1.45, 1.05, 1.0, 1.0),
    "pointwise, transposed": (2.0, 2.5, 1.8, 1.0, 1.0),
    "rows": (2.5, 2.2, 1.2, 1.0, 1.0),
    "rows, transposed": (3.0, 9.0, 4.0, 1.0, 1.0),
    "columns": (4.0, 2.2, 1.35, 1.0, 1.0),
    "columns, transposed": (4.0, 9.0, 4.0, 1.0, 1.0),
    "product": (5.0, 0.0, 0.0, 1.15, 1.0),
    "tilewright.norm": (2.0, 1.5, 1.1, 0.0, 1.0),
    "tilewright.add_norm": (2.0, 1.5, 1.1, 0.0, 1.0),
    "tilewright.norm_backward": (4.0, 1.8, 1.15, 0.0, 1.0),
    "tilewright.cross_entropy": (4.0, 1.2, 1.05, 0.0, 1.0),
    "tilewright.cross_entropy_backward": (3.0, 1.2, 1.05, 0.0, 1.0),
}
"""Of the datasheets of all GPUs, since they are shares of a device's own ceilings."""
