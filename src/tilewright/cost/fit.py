"""Coefficients of kernel times, fitted to kernels that were timed.

Per kind the sum of squared relative errors is least over coefficients that are not negative, by coordinate descent
(non-negative least squares: Lawson and Hanson, "Solving Least Squares Problems", chapter 23). A term that no kernel
shows keeps its coefficient of `UNFITTED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from tilewright.cost.work import Work, predicted_us, terms
from tilewright.hardware.kernel_times import TERMS, UNFITTED, Coefficients, KernelTimes
from tilewright.hardware.profiles import DeviceProfile

PULL = 0.01
"""Weight of `UNFITTED` beside the kernels, as a share of theirs; it alone decides on a term that none of them has."""
START = TERMS.index("start")
MOST_START_US = 15.0
"""What grows with the work is no start, also where only large kernels of a kind were timed."""
ARITHMETIC = TERMS.index("arithmetic")
SHORT_US = 4.0
"""Relative errors of shorter kernels count less."""
SWEEPS = 2000
LEAST_KERNELS = 4
"""Of a kind that is fitted."""


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
    relative = [
        [weight * term / row.measured_us for term in terms(row.work, profile)]
        for row, weight in zip(rows, weights, strict=True)
    ]
    found = list(UNFITTED)
    if not rows[0].work.is_priced_by_arithmetic:
        found[ARITHMETIC] = 0.0
    shown = [sum(row[j] ** 2 for row in relative) for j in range(len(found))]
    squares = [(1 + PULL) * square or 1.0 for square in shown]
    left = [
        weight - sum(c * x for c, x in zip(found, row, strict=True))
        for row, weight in zip(relative, weights, strict=True)
    ]
    fitted = [j for j in range(len(found)) if j != ARITHMETIC or rows[0].work.is_priced_by_arithmetic]
    for _ in range(SWEEPS):
        for j in fitted:
            square = squares[j]
            slope = sum(e * row[j] for e, row in zip(left, relative, strict=True))
            slope += PULL * shown[j] * (UNFITTED[j] - found[j])
            most = MOST_START_US if j == START else math.inf
            change = min(max(found[j] + slope / square, 0.0), most) - found[j]
            found[j] += change
            left = [e - change * row[j] for e, row in zip(left, relative, strict=True)]
    return tuple(round(c, 4) for c in found)


def errors(timed: Iterable[Timed], profile: DeviceProfile) -> Mapping[str, tuple[int, float, float]]:
    """For each kind: how many kernels, and the median and the 95th percentile of |predicted / measured - 1|."""
    found: dict[str, list[float]] = {}
    for one in timed:
        found.setdefault(one.work.kind, []).append(abs(predicted_us(one.work, profile) / one.measured_us - 1))
    return {
        kind: (len(values), median(values), sorted(values)[min(int(0.95 * len(values)), len(values) - 1)])
        for kind, values in sorted(found.items())
    }


__all__ = ["KernelTimes", "Timed", "errors", "fit"]
