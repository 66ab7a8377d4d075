"""Times one call by the profiler's kernel records beside CUDA events.

Each method has an overhead, measured with a tiny kernel and subtracted. The profiler records every stream, so
it also shows work outside the stream that the events time.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.measure.timing import timers
from tilewright.measure.timing.device_records import CYCLES_PER_US, Record, busy_us, device_records, is_mark, union
from tilewright.measure.timing.stopwatch import CudaStopwatch

AMBIGUOUS = 0.02
"""Times that differ by more than this share disagree."""
SHORTEST_US = 10.0
"""Shorter calls are not compared: the overhead is a large share of their time."""
_CALLS = 5
_MARK_US = 30.0
_AHEAD_US = 300.0
_RECORDING = 3.0
"""Upper bound of the slowdown of the host under the profiler."""


@dataclass(frozen=True)
class ProfiledCall:
    """One call in the profiler's records, in microseconds."""

    span_us: float
    """From the start of its first kernel to the end of its last, on any stream."""
    busy_us: float
    """Time during which at least one of its kernels ran."""
    outside_us: float
    """Part of `busy_us` before the call's own stream had reached the call, or after it had passed it."""


def profile(
    prepare: Callable[[], Callable[[], object]], watch: CudaStopwatch, lead_us: float = 0.0
) -> ProfiledCall | None:
    """Medians over five calls of the function that `prepare` returns, each after a flush; None if CUPTI records none.

    Spin kernels before and after each call delimit it in the records. The first runs from before the call to after the
    host has queued it, so a kernel that does not wait for the call's stream runs beside it, and one that the stream
    does not wait for runs beside the last. `lead_us` is the host time to queue a call without the profiler.
    """
    cuda = timers.cuda_timers()
    flushed = cuda.event()

    def call() -> None:
        function = prepare()
        watch.flush()
        cuda.record(flushed)
        cuda.spin(int((_RECORDING * lead_us + _AHEAD_US) * CYCLES_PER_US))
        cuda.wait(flushed)
        result = function()
        cuda.spin(int(_MARK_US * CYCLES_PER_US))
        cuda.synchronize()
        del result

    calls = between_marks(device_records(call, _CALLS))
    if len(calls) < _CALLS:
        return None
    spans, busy, outside = zip(*calls, strict=True)
    return ProfiledCall(statistics.median(spans), statistics.median(busy), max(outside))


def between_marks(records: Sequence[Record]) -> list[tuple[float, float, float]]:
    """(span, busy, outside) in microseconds of each call between two spin kernels; one without records is left out."""
    ordered = sorted(records, key=lambda record: record.start)
    marks = [record for record in ordered if is_mark(record)]
    calls = []
    for opening, closing in zip(marks[::2], marks[1::2], strict=False):
        kernels = [r for r in ordered if opening.start <= r.start < closing.end and not is_mark(r)]
        if kernels:
            inside = [(max(r.start, opening.end), min(r.end, closing.start)) for r in kernels]
            covered = union([(start, end) for start, end in inside if start < end])
            span = max(r.end for r in kernels) - min(r.start for r in kernels)
            calls.append((span / 1e3, busy_us(kernels), busy_us(kernels) - covered / 1e3))
    return calls


@functools.cache
def clock_overhead_us(device: str) -> float | None:
    """How many microseconds longer events make a kernel of one element than the profiler; None if that records none."""
    watch = CudaStopwatch(device)
    tiny = torch.zeros(1, device=device)

    def touch() -> None:
        tiny.add_(1.0)

    profiled = profile(lambda: touch, watch)
    if profiled is None:
        return None
    laps = []
    for _ in range(2 * _CALLS + 1):
        watch.lead(_MARK_US)
        laps.append(watch.time(touch).us)
    return statistics.median(laps) - profiled.span_us


def disagreement(event_us: float, profiled_us: float) -> str | None:
    """Both times of a call of at least 10 µs as text if they differ by more than 2 %, else None.

    >>> disagreement(100.0, 99.0)
    >>> disagreement(100.0, 90.0)
    'ambiguous: events 100.0 µs, profiler 90.0 µs'
    """
    least, most = sorted((event_us, profiled_us))
    if event_us < SHORTEST_US or most <= least * (1 + AMBIGUOUS):
        return None
    return f"ambiguous: events {event_us:.1f} µs, profiler {profiled_us:.1f} µs"
