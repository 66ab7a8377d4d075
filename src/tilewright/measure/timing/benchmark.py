"""Times several implementations interleaved, in rounds, until their medians are precise."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tilewright.measure.timing.stopwatch import Lap, Stopwatch, stopwatch_for
from tilewright.records.errors import UsageError

Timed = Callable[[int], Lap]
"""One timed call of an implementation in the round of that number; warm-up is round -1."""

WARM_UP = -1
WARM_UP_SECONDS = 0.05
"""Least warm-up time of an implementation: clocks rise and thread pools start."""
WARM_UP_STEADY = 3
"""Warm-up ends after this many calls in a row that do not beat the fastest by `WARM_UP_GAIN`."""
WARM_UP_GAIN = 0.05
RESOLUTION_US = 0.05
"""A little more than the resolution of CUDA events, 32 ns."""


@dataclass(frozen=True)
class Timing:
    """Quantiles over the repeats of one implementation, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    repeats: int
    converged: bool
    """True: stopped because the median reached the tolerance. False: stopped because time ran out."""
    host_us: float | None = None
    """Median host time of the call, on a device that runs asynchronously."""
    late_us: float = 0.0
    """Median time that other streams kept the device busy after the call had ended on its own stream."""


def benchmark(
    implementations: Mapping[str, Callable[[], object]], *, device: str = "cpu", min_repeats: int = 20,
    max_seconds: float = 10.0, tolerance: float = 0.01, stopwatch: Stopwatch | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time every implementation in one interleaved run.

    Each is warmed up until its calls stop getting faster. Then each round calls every implementation once,
    in a rotating order, so that drift of the machine affects all alike. Rounds stop when each median is
    within `tolerance` (half the width of its 95 % confidence interval, relative), or `max_seconds` after the
    start, warm-up included; at least `min_repeats` rounds run. Garbage collection is off meanwhile.

    Results are released before the next call, outside the timed region. To include the release in the time
    (a training step that frees its graph), let the callable release its result and return None.

    Raises UsageError for no implementation, fewer than 3 repeats, or an unknown device. An exception
    of an implementation passes through.
    """
    if not implementations:
        raise UsageError("nothing to time: no implementation was given")
    watch = stopwatch or stopwatch_for(device)

    def timed(function: Callable[[], object], _: int) -> Lap:
        return watch.time(function)

    calls = {name: partial(timed, function) for name, function in implementations.items()}
    return interleaved(calls, watch.now, min_repeats=min_repeats, max_seconds=max_seconds, tolerance=tolerance)


def interleaved(
    calls: Mapping[str, Timed],
    now: Callable[[], float],
    *,
    min_repeats: int = 20,
    max_seconds: float = 10.0,
    tolerance: float = 0.01,
) -> dict[str, Timing]:
    """`benchmark` for calls that time themselves, so that each can prepare its inputs outside the timed region.

    `now` returns seconds, for `max_seconds`. Raises UsageError for fewer than 3 repeats.
    """
    if min_repeats < 3:
        raise UsageError(f"min_repeats is {min_repeats}; quantiles need at least 3 repeats")
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        deadline = now() + max_seconds
        for call in calls.values():
            _warm_up(call, now, max_seconds / 4 / len(calls))
        laps = _rounds(calls, now, min_repeats, deadline, tolerance)
    finally:
        if collecting:
            gc.enable()
    return {name: timing_of(samples, tolerance) for name, samples in laps.items()}


def _warm_up(call: Timed, now: Callable[[], float], max_seconds: float) -> None:
    """Call until no call is clearly faster than the fastest so far, or `max_seconds` have passed."""
    start = now()
    fastest = math.inf
    steady = 0
    while steady < WARM_UP_STEADY or now() - start < WARM_UP_SECONDS:
        lap = call(WARM_UP).us
        steady = 0 if lap < fastest * (1 - WARM_UP_GAIN) else steady + 1
        fastest = min(fastest, lap)
        if now() - start >= max_seconds:
            return


def _rounds(
    calls: Mapping[str, Timed], now: Callable[[], float], min_repeats: int, deadline: float, tolerance: float
) -> dict[str, list[Lap]]:
    names = list(calls)
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    done = 0
    # A convergence check sorts all laps, so checks are spaced by an eighth of the rounds done.
    next_check = min_repeats
    while True:
        for offset in range(len(names)):
            name = names[(done + offset) % len(names)]
            laps[name].append(calls[name](done))
        done += 1
        if done < min_repeats:
            continue
        if now() >= deadline:
            return laps
        if done >= next_check:
            if all(_converged([lap.us for lap in samples], tolerance) for samples in laps.values()):
                return laps
            next_check = done + max(1, done // 8)


def median_spread(samples: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the median, relative to the median.

    The interval lies between order statistics (binomial ranks, normal approximation), so it assumes
    no distribution: https://en.wikipedia.org/wiki/Order_statistic#Confidence_intervals_for_quantiles.

    >>> median_spread([10.0] * 20)
    0.0
    """
    ordered = sorted(samples)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low = ordered[max(0, math.floor(len(ordered) / 2 - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))]
    middle = statistics.median(ordered)
    if high == low:
        return 0.0
    return (high - low) / 2 / middle if middle else math.inf


def _converged(samples: Sequence[float], tolerance: float) -> bool:
    """Whether the median is within `tolerance`, or within the resolution of CUDA events."""
    spread = median_spread(samples)
    return spread <= tolerance or spread * statistics.median(samples) <= RESOLUTION_US


def timing_of(laps: Sequence[Lap], tolerance: float) -> Timing:
    """The quantiles of these laps, and whether their median is within `tolerance`."""
    times = [lap.us for lap in laps]
    quintiles = statistics.quantiles(times, n=5, method="inclusive")
    host = [lap.host_us for lap in laps if lap.host_us is not None]
    return Timing(
        median_us=statistics.median(times),
        p20_us=quintiles[0],
        p80_us=quintiles[3],
        repeats=len(times),
        converged=_converged(times, tolerance),
        host_us=statistics.median(host) if host else None,
        late_us=statistics.median(lap.late_us for lap in laps),
    )
