"""Compares the step times of two programs: a ratio with a confidence interval, and a verdict.

Step times are neither independent nor normal: their noise has long tails, and most of it is slow (clocks,
neighbours, the allocator's state), so that more steps of the same minute teach little. Two ways, by what there is:

- *Several runs a side* (`MANY_RUNS` or more): a run counts as one figure, its 20th percentile, since what
  interferes with a step only adds to it. The difference is a trimmed mean with its winsorised standard error
  (K. K. Yuen, "The two-sample trimmed t for unequal population variances", Biometrika 61, 1974). Runs that were
  made in turns (before, after, before, ...) are compared in pairs, which removes slow drift.
- *One run a side*: noise is taken for white plus flicker. Its two parts are fitted to the Allan variance of both
  runs (D. W. Allan, "Statistics of Atomic Frequency Standards", Proc. IEEE 54, 1966): of averages over m steps it
  is w / m + f, and f, which no length of the run averages out, is what two runs of one program differ by.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tilewright.measure.recording.plan import FEW_STEPS
from tilewright.records.counted import counted

LEAST = 0.01
"""Differences below 1 % count as the same: restarting a program may change its time as much."""
LEVEL = 0.01
"""The probability that an interval misses the true ratio, under the noise model."""
MANY_RUNS = 5
SHORT_US = 2e6
"""A single run shorter than two seconds does not show the slow noise of a shared machine."""
_TRIMMED = 0.2
_WINSOR = 3.0

Verdict = Literal["slower", "faster", "the same", "cannot tell"]
Floats: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"


@dataclass(frozen=True)
class Change:
    """After over before; `low` to `high` is the interval of the ratio, at the level 1 − `LEVEL`."""

    ratio: float
    low: float
    high: float
    verdict: Verdict
    method: str
    """The comparison's method; for the verdict "cannot tell", the reason."""

    @property
    def resolution(self) -> float:
        """The smallest detectable change, as a share: 0.03 is 3 %."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf


def compare(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    in_turns: bool = False,
    shared_machine: bool = True,
    disturbed: str = "",
) -> Change:
    """Compare step times in microseconds, positive, one sequence per run; runs in the order of recording.

    `in_turns`: run i of both sides were recorded one after the other. `shared_machine`: other programs disturb the
    times, as on most hosts, so a single short run gives no verdict. `disturbed` says how they did, if they are known to
    have: then single runs give none.

    >>> compare([[100.0 + i % 7 for i in range(99)]], [[104.0 + i % 7 for i in range(99)]],
    ...         shared_machine=False).verdict
    'slower'
    """
    first, second = ([np.log(np.asarray(run, float)) for run in side if len(run)] for side in (before, after))
    if not first or not second:
        return Change(math.nan, 0.0, math.inf, "cannot tell", "a side has no steps")
    if min(len(first), len(second)) >= MANY_RUNS:
        return _of_runs(first, second, in_turns and len(first) == len(second))
    return _of_steps(np.concatenate(first), np.concatenate(second), shared_machine, disturbed)


def _of_runs(first: Sequence[Floats], second: Sequence[Floats], in_turns: bool) -> Change:
    levels = [np.array([np.percentile(run, 20) for run in side]) for side in (first, second)]
    if in_turns:
        shift, variance, left = _trimmed(levels[1] - levels[0])
        return _change(shift, variance, left - 1, f"{len(first)} pairs of interleaved runs")
    (low, low_variance, low_left), (high, high_variance, high_left) = map(_trimmed, levels)
    variance = low_variance + high_variance
    # Welch's degrees of freedom; without any variance, the number of runs.
    freedom = float(low_left + high_left - 2)
    if variance > 0:
        freedom = variance**2 / (low_variance**2 / (low_left - 1) + high_variance**2 / (high_left - 1))
    return _change(high - low, variance, freedom, f"{len(first)} and {len(second)} runs")


def _trimmed(values: Floats) -> tuple[float, float, int]:
    """The trimmed mean, its squared standard error, and the number of values left."""
    ordered = np.sort(values)
    cut = int(_TRIMMED * len(ordered))
    left = len(ordered) - 2 * cut
    winsorised = np.clip(ordered, ordered[cut], ordered[-1 - cut])
    spread = float(winsorised.var(ddof=1))
    return float(ordered[cut : len(ordered) - cut].mean()), (len(ordered) - 1) * spread / (left * (left - 1)), left


def _of_steps(first: Floats, second: Floats, shared_machine: bool, disturbed: str) -> Change:
    length_us = min(float(np.exp(run).sum()) for run in (first, second))
    first, second = _winsorised(first), _winsorised(second)
    shift = float(second.mean() - first.mean())
    fewest = min(len(first), len(second))
    problem = ""
    if disturbed:
        problem = disturbed
    elif fewest < FEW_STEPS:
        problem = (
            f"a run has {fewest} timed steps and needs {FEW_STEPS} (`tilewright profile` times the steps after those "
            "that it records: let the program make more)"
        )
    elif shared_machine and length_us < SHORT_US:
        needed = f"{SHORT_US / 1e6:.0f}"
        problem = (
            f"a run timed {length_us / 1e6:.2g} s of steps, and slow noise of the machine shows only in {needed} s "
            f"(--timed {needed})"
        )
    if problem:
        ratio = math.exp(shift)
        return Change(ratio, 0.0, math.inf, "cannot tell", f"{problem}; or record {MANY_RUNS} runs per side")
    white, flicker, octaves = _noise(first, second)
    variance = white / len(first) + white / len(second) + 2 * flicker
    return _change(shift, variance, octaves, f"{len(first)} and {counted(len(second), 'step')} of single runs")


def _winsorised(values: Floats) -> Floats:
    """Values clipped to three robust standard deviations around the median."""
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return np.clip(values, middle - _WINSOR * spread, middle + _WINSOR * spread) if spread else values


def _noise(first: Floats, second: Floats) -> tuple[float, float, float]:
    """White and flicker variance of one step, fitted to both runs, and degrees of freedom.

    Each averaging length m gives f = (m · A(m) − A(1)) / (m − 1). The larger of the two longest counts, since
    noise slower than flicker (a drift) shows only there.
    """
    longest = min(len(first), len(second)) // 4
    lengths = [m for m in (2, 3, *(2**k * n for k in range(1, 30) for n in (2, 3))) if m <= longest]
    white = (_allan(first, 1) + _allan(second, 1)) / 2
    flicker = [((m * (_allan(first, m) + _allan(second, m)) / 2) - white) / (m - 1) for m in lengths]
    # Two runs of at least four overlapping blocks each: about nine independent differences.
    return white, max(0.0, *flicker[-2:]), 9.0


def _allan(values: Floats, length: int) -> float:
    """Overlapping Allan variance of averages over `length` values."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    averages = (sums[length:] - sums[:-length]) / length
    return float(np.mean((averages[length:] - averages[:-length]) ** 2) / 2)


def _change(shift: float, variance: float, freedom: float, method: str) -> Change:
    half = student(1 - LEVEL / 2, freedom) * math.sqrt(variance)
    low, high, ratio = (math.exp(value) for value in (shift - half, shift + half, shift))
    verdict: Verdict = "cannot tell"
    if low > 1 and ratio >= 1 + LEAST:
        verdict = "slower"
    elif high < 1 and ratio <= 1 / (1 + LEAST):
        verdict = "faster"
    elif (low > 1 or high < 1) or (low >= 1 / (1 + LEAST) and high <= 1 + LEAST):
        verdict = "the same"
    return Change(ratio, low, high, verdict, method)


@functools.cache
def student(probability: float, freedom: float) -> float:
    """Quantile of Student's t above the median; fewer than two degrees of freedom count as two.

    >>> round(student(0.995, 14), 2)
    2.98
    """
    from mpmath import betainc, findroot

    n = max(freedom, 2.0)

    def miss(t: float) -> float:
        # The tail beyond t is half the regularised incomplete beta function at n / (n + t²).
        return float(betainc(n / 2, 0.5, 0, n / (n + t * t), regularized=True)) / 2 - (1 - probability)

    return float(findroot(miss, 3.0))
