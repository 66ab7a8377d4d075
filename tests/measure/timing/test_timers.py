"""The clocks are the ones that were there first, whoever came later."""

import time

import pytest
import torch

from benchmarks.step_stopwatch import StepStopwatch
from tilewright.measure.timing import timers
from tilewright.measure.timing.stopwatch import CpuStopwatch


def test_nothing_is_replaced_in_an_honest_process() -> None:
    timers.cuda_timers()
    assert timers.replaced() == []


def test_what_was_replaced_is_named_and_put_back() -> None:
    timers.cuda_timers()
    clock, elapsed = time.monotonic, torch.cuda.Event.elapsed_time
    try:
        time.monotonic = lambda: 0.0
        torch.cuda.Event.elapsed_time = lambda *_: 0.0  # type: ignore[method-assign,assignment]
        assert timers.replaced() == ["time.monotonic", "torch.cuda.Event.elapsed_time"]
        assert time.monotonic is clock and torch.cuda.Event.elapsed_time is elapsed
    finally:
        time.monotonic, torch.cuda.Event.elapsed_time = clock, elapsed  # type: ignore[method-assign]
    assert timers.replaced() == []


def test_a_stopwatch_does_not_look_at_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    pause = timers._HOST_BY_NAME["time.sleep"]
    assert CpuStopwatch().time(lambda: pause(0.01)).us >= 1e4


def test_a_step_lasts_until_the_gpu_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def clock() -> int:
        events.append("clock")
        return 1000 * len(events)

    class Idle:
        @staticmethod
        def synchronize() -> None:
            events.append("synchronised")

    monkeypatch.setattr(timers, "now_ns", clock)
    monkeypatch.setattr(timers, "cuda_timers", Idle)
    lap = StepStopwatch().time(lambda: events.append("called"))
    assert events == ["synchronised", "clock", "called", "clock", "synchronised", "clock"]
    assert (lap.us, lap.host_us) == (4, 2)
