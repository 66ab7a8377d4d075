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
