"""Times one call by CUDA events, by replaying it as a CUDA graph, and by the profiler's kernel records.

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
    early_us: float
    """Part of `busy_us` before the call's own stream had reached the call."""


@dataclass(frozen=True)
class CrossCheck:
    """The three times of one call, net of overhead; None for a method that failed."""

    event_us: float
    graph_us: float | None
    profiled_us: float | None

    def disagreement(self) -> str | None:
        """The three times as text if they differ by more than 2 % on a call of at least 10 µs, else None.

        >>> CrossCheck(100.0, 99.0, 100.5).disagreement()
        >>> CrossCheck(100.0, None, 90.0).disagreement()
        'ambiguous: events 100.0 µs, profiler 90.0 µs'
        """
        named = {"events": self.event_us, "graph": self.graph_us, "profiler": self.profiled_us}
        known = {name: us for name, us in named.items() if us is not None}
        least, most = min(known.values()), max(known.values())
        if self.event_us < SHORTEST_US or most <= least * (1 + AMBIGUOUS):
            return None
        return "ambiguous: " + ", ".join(f"{name} {us:.1f} µs" for name, us in known.items())


def profile(
    prepare: Callable[[], Callable[[], object]], watch: CudaStopwatch, lead_us: float = 0.0
) -> ProfiledCall | None:
    """Medians over five calls of the function that `prepare` returns, each after a flush; None if CUPTI records none.

    Spin kernels before and after each call delimit it in the records. `lead_us` is the host time to queue a
    call without the profiler.
    """
    spin = timers.cuda_timers().spin

    def call() -> None:
        function = prepare()
        watch.flush()
        spin(int((_RECORDING * lead_us + _AHEAD_US) * CYCLES_PER_US))
        result = function()
        spin(int(_MARK_US * CYCLES_PER_US))
        timers.cuda_timers().synchronize()
        del result

    calls = between_marks(device_records(call, _CALLS))
    if len(calls) < _CALLS:
        return None
    return ProfiledCall(*(statistics.median(values) for values in zip(*calls, strict=True)))


def between_marks(records: Sequence[Record]) -> list[tuple[float, float, float]]:
    """(span, busy, early) in microseconds of each call between two spin kernels; calls without records are omitted."""
    ordered = sorted(records, key=lambda record: record.start)
    marks = [record for record in ordered if is_mark(record)]
    calls = []
    for opening, closing in zip(marks[::2], marks[1::2], strict=False):
        kernels = [r for r in ordered if opening.start <= r.start < closing.start and not is_mark(r)]
        if kernels:
            early = union([(r.start, min(r.end, opening.end)) for r in kernels if r.start < opening.end])
            span = max(r.end for r in kernels) - min(r.start for r in kernels)
            calls.append((span / 1e3, busy_us(kernels), early / 1e3))
    return calls


def replay_us(function: Callable[[], object], watch: CudaStopwatch) -> float | None:
    """Median time of `function` replayed from a CUDA graph, cold; None where it cannot be captured."""
    try:
        graph, kept = _captured(function)
    except Exception:
        # A peer that synchronises or replays a graph of its own cannot be captured.
        torch.cuda.synchronize()
        # A failed capture leaves the default generator in capture mode; setting its state resets that.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        return None
    us = _median_us(graph.replay, watch)
    del kept
    return us


def _captured(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """`function` as a graph, and the results that its replays write.

    Unlike `torch.cuda.graph` this does not release cached memory first: the driver clears released memory, which
    takes a tenth of the bandwidth meanwhile (measured on an H200).
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        function()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            kept = function()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph, kept


def _median_us(function: Callable[[], object], watch: CudaStopwatch) -> float:
    laps = []
    for _ in range(2 * _CALLS + 1):
        watch.lead(_MARK_US)
        laps.append(watch.time(function).us)
    return statistics.median(laps)


@dataclass(frozen=True)
class Overheads:
    """The time that each method shows for a kernel of one element, in microseconds."""

    event_us: float
    graph_us: float
    profiled_us: float


@functools.cache
def clock_overheads(device: str) -> Overheads | None:
    """The overhead of each method on a device; None if the profiler records nothing."""
    watch = CudaStopwatch(device)
    tiny = torch.zeros(1, device=device)

    def touch() -> None:
        tiny.add_(1.0)

    event = _median_us(touch, watch)
    graph, profiled = replay_us(touch, watch), profile(lambda: touch, watch)
    if graph is None or profiled is None:
        return None
    return Overheads(event, graph, profiled.span_us)


def crosscheck(
    event_us: float, graph_us: float | None, profiled: ProfiledCall | None, overheads: Overheads
) -> CrossCheck:
    """The three times of a call, each corrected to the overhead of the events."""
    return CrossCheck(
        event_us,
        None if graph_us is None else graph_us + overheads.event_us - overheads.graph_us,
        None if profiled is None else profiled.span_us + overheads.event_us - overheads.profiled_us,
    )
