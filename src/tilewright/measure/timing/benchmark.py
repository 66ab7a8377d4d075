"""Several implementations timed side by side, in rounds, until their medians are known."""

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
"""Least time an implementation is warmed up for: clocks rise and thread pools start in it."""
WARM_UP_STEADY = 3
"""Calls in a row that must not beat the fastest by `WARM_UP_GAIN` before warm-up ends."""
WARM_UP_GAIN = 0.05
RESOLUTION_US = 0.05
"""A little more than the step in which CUDA events count, 32 ns on the cards seen so far."""


@dataclass(frozen=True)
class Timing:
    """Quantiles over the repeats of one implementation, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    repeats: int
    converged: bool
    """True: stopped because the median was known closely enough. False: stopped because time ran out."""
    host_us: float | None = None
    """Median time the call held the host, where that differs from the device's time."""
    late_us: float = 0.0
    """Median time that other streams kept the device busy after the call had ended on its own."""


def benchmark(
    implementations: Mapping[str, Callable[[], object]],
    *,
    device: str = "cpu",
    min_repeats: int = 20,
    max_seconds: float = 10.0,
    tolerance: float = 0.01,
    stopwatch: Stopwatch | None = None,
) -> dict[str, Timing]:
    """Time every implementation in one interleaved run.

    Each is warmed up until its calls stop getting faster. Then rounds follow, each calling every
    implementation once, in an order that rotates, so that drift of the machine meets all alike.
    Rounds stop when every median is known to `tolerance` (half the width of its 95 % confidence
    interval, relative), or `max_seconds` after the start, warm-up included; `min_repeats` rounds
    always run. Garbage collection is off meanwhile.

    What a callable returns is released before the next call and outside the timed region: the user
    pays for making an output, and whoever holds it pays for dropping it. A callable whose user does
    pay (a training step that drops its graph) drops it itself and returns None.

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
    """`benchmark` for calls that time themselves, so that each can prepare its inputs outside the time.

    `now` is the clock, in seconds, that `max_seconds` are counted on. Raises UsageError for fewer than 3
    repeats.
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
    return {name: timing_of(own, tolerance) for name, own in laps.items()}


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
    calls: Mapping[str, Timed],
    now: Callable[[], float],
    min_repeats: int,
    deadline: float,
    tolerance: float,
) -> dict[str, list[Lap]]:
    names = list(calls)
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    done = 0
    # Each look sorts every lap, so looks are spaced by a share of what is there.
    next_look = min_repeats
    while True:
        for offset in range(len(names)):
            name = names[(done + offset) % len(names)]
            laps[name].append(calls[name](done))
        done += 1
        if done < min_repeats:
            continue
        if now() >= deadline:
            return laps
        if done >= next_look:
            if all(_known([lap.us for lap in own], tolerance) for own in laps.values()):
                return laps
            next_look = done + max(1, done // 8)


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


def _known(samples: Sequence[float], tolerance: float) -> bool:
    """Whether the median is known to `tolerance`, or as closely as CUDA events tell times apart."""
    spread = median_spread(samples)
    return spread <= tolerance or spread * statistics.median(samples) <= RESOLUTION_US


def timing_of(laps: Sequence[Lap], tolerance: float) -> Timing:
    """The quantiles of these laps, and whether their median is known to `tolerance`."""
    times = [lap.us for lap in laps]
    quintiles = statistics.quantiles(times, n=5, method="inclusive")
    host = [lap.host_us for lap in laps if lap.host_us is not None]
    return Timing(
        median_us=statistics.median(times),
        p20_us=quintiles[0],
        p80_us=quintiles[3],
        repeats=len(times),
        converged=_known(times, tolerance),
        host_us=statistics.median(host) if host else None,
        late_us=statistics.median(lap.late_us for lap in laps),
    )
