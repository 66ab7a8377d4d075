"""Fits the coefficients of kernel times to kernels that were timed.

For each kind it minimises the sum of absolute relative errors over non-negative coefficients: it repeats least squares,
each time with a kernel's weight divided by its last error (Holland and Welsch, "Robust regression using iteratively
reweighted least-squares", 1977), and solves each by coordinate descent (Lawson and Hanson, "Solving Least Squares
Problems", chapter 23). A term that no kernel of the kind shows keeps its coefficient of `UNFITTED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from tilewright.cost.work import Work, predicted_us, terms
from tilewright.hardware.kernel_times import TERMS, UNFITTED, Coefficients
from tilewright.hardware.profiles import DeviceProfile

Range = tuple[float, float]
"""The least and the most that a coefficient may be."""
PULL = 0.03
"""Weight of `UNFITTED` in the fit, as a share of the kernels' weight; it decides alone on terms that no kernel has."""
LOAD = TERMS.index("load")
START = TERMS.index("start")
LEAST_START_US, MOST_START_US = 0.5, 15.0
"""Range of a start, at most twice the shortest kernel of its kind: what grows with the work is no start."""
LEAST_MEMORY = 0.3
"""The least coefficient of a memory term: some bytes may be in a nearer cache, but more bytes always take longer."""
CACHED, DRAM = TERMS.index("cached"), TERMS.index("DRAM")
ARITHMETIC = TERMS.index("arithmetic")
ALONE: Mapping[int, Range] = {
    CACHED: (LEAST_MEMORY, 8.0),
    DRAM: (1.0, 2.0),
    ARITHMETIC: (0.0, 4.0),
    TERMS.index("filled"): (0.0, 5.0),
}
"""Ranges for `OF_FEW_ROWS` and for kernels that run on no matrix unit: none beats DRAM, and one that takes twice DRAM's
time waits for something else. Other products hide their memory time behind their arithmetic."""
OF_FEW_ROWS = ("tilewright.skinny_linear",)
"""Matrix products whose time is that of reading their weights."""
NARROW = TERMS.index("narrow")
MOST_NARROW = 5.0
"""The largest multiple of the time at one SM's cache rate; any further wait of short rows counts as their start."""
SHORT_US = 1.5
"""The relative errors of shorter kernels weigh less, in proportion to their time."""
SMALL_ERROR = 0.03
"""Relative errors below this count by their squares, larger ones by their absolute values."""
ROUNDS = 12
SWEEPS = 300
SHOWN = 0.005
"""A term that is a smaller share of every kernel's time is not fitted: it would explain them by a huge coefficient."""
LEAST_KERNELS = 4
"""Kinds with fewer kernels are not fitted."""


@dataclass(frozen=True)
class Timed:
    """One kernel or library call as it was timed."""

    name: str
    work: Work
    measured_us: float


def fit(timed: Iterable[Timed], profile: DeviceProfile) -> dict[str, Coefficients]:
    """Coefficients for each kind of which at least `LEAST_KERNELS` were timed."""
    kinds: dict[str, list[Timed]] = {}
    for one in timed:
        kinds.setdefault(one.work.kind, []).append(one)
    return {kind: _fit(rows, profile) for kind, rows in kinds.items() if len(rows) >= LEAST_KERNELS}


def _fit(rows: list[Timed], profile: DeviceProfile) -> Coefficients:
    weights = [min(1.0, row.measured_us / SHORT_US) for row in rows]
    relative = [[term / row.measured_us for term in terms(row.work, profile)] for row in rows]
    # If every kernel reads, `load` is constant like `start`: fit `start` alone.
    constant = {LOAD} if all(row.work.bytes_read for row in rows) else set()
    unpriced = constant if rows[0].work.is_priced_by_arithmetic else constant | {ARITHMETIC}
    found = [0.0 if j in unpriced else c for j, c in enumerate(UNFITTED)]
    shown = {START} | {j for j in range(len(TERMS)) if max(row[j] for row in relative) > SHOWN}
    is_fitted = [j in shown - unpriced for j in range(len(TERMS))]
    bounds = _bounds(rows)
    for _ in range(ROUNDS):
        errors = [abs(sum(c * x for c, x in zip(found, row, strict=True)) - 1) for row in relative]
        shares = [w / max(e, SMALL_ERROR) for w, e in zip(weights, errors, strict=True)]
        _descend(found, relative, shares, [j for j, fits in enumerate(is_fitted) if fits], bounds)
    return tuple(float(f"{c:.3g}") for c in found)


def _bounds(rows: list[Timed]) -> list[Range]:
    """The range of each term's coefficient."""
    bounds = [(0.0, math.inf) for _ in TERMS]
    bounds[START] = (LEAST_START_US, min(MOST_START_US, 2 * min(row.measured_us for row in rows)))
    bounds[NARROW] = (0.0, MOST_NARROW)
    if rows[0].work.is_matrix and rows[0].work.kind not in OF_FEW_ROWS:
        bounds[CACHED] = bounds[DRAM] = (LEAST_MEMORY, math.inf)
    else:
        for j, allowed in ALONE.items():
            bounds[j] = allowed
    return bounds


def _descend(
    found: list[float], relative: list[list[float]], shares: list[float], fitted: list[int], bounds: list[Range]
) -> None:
    """Minimise the squares of `relative` · `found` - 1, with rows weighted by `shares`, updating `found` in place."""
    size = len(found)
    products = [
        [sum(s * row[i] * row[j] for s, row in zip(shares, relative, strict=True)) for j in range(size)]
        for i in range(size)
    ]
    sums = [sum(s * row[j] for s, row in zip(shares, relative, strict=True)) for j in range(size)]
    for _ in range(SWEEPS):
        for j in fitted:
            pull = PULL * products[j][j]
            slope = sums[j] - sum(products[j][i] * found[i] for i in range(size)) + pull * (UNFITTED[j] - found[j])
            least, most = bounds[j]
            found[j] = min(max(found[j] + slope / ((products[j][j] + pull) or 1.0), least), most)


def errors(timed: Iterable[Timed], profile: DeviceProfile) -> Mapping[str, tuple[int, float, float]]:
    """For each kind: how many kernels, and the median and the 95th percentile of |predicted / measured - 1|."""
    found: dict[str, list[float]] = {}
    for one in timed:
        found.setdefault(one.work.kind, []).append(abs(predicted_us(one.work, profile) / one.measured_us - 1))
    return {
        kind: (len(values), median(values), sorted(values)[min(int(0.95 * len(values)), len(values) - 1)])
        for kind, values in sorted(found.items())
    }
