"""The timing logic on a fake clock; the real clocks only for what holds on any machine."""

import gc
import json
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from tilewright.measure.racing.results import Environment, environment, measurement, read_results, write_results
from tilewright.measure.timing.benchmark import Timing, benchmark, median_spread
from tilewright.measure.timing.stopwatch import CpuStopwatch, Lap, stopwatch_for
from tilewright.records.atomic_file import write_atomically
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Measurement


class FakeStopwatch:
    """Each call takes what its own list says, and the clock moves by that."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: list[str] = []
        self.overheads: dict[str, Iterator[float]] = {}

    def implementation(self, name: str, costs_us: Iterator[float]) -> Callable[[], object]:
        self.overheads[name] = costs_us
        return lambda: name

    def lead(self, us: float) -> None:
        pass

    def time(self, function: Callable[[], object], inspect: Callable[[object], None] | None = None) -> Lap:
        name = str(function())
        self.calls.append(name)
        cost = next(self.overheads[name])
        self.seconds += cost / 1e6
        return Lap(cost)

    def now(self) -> float:
        return self.seconds


def timed(costs_us: Mapping[str, Iterable[float]], **options: float) -> tuple[dict[str, Timing], FakeStopwatch]:
    """The timings of implementations whose calls take `costs_us`, and the watch that they were timed with."""
    watch = FakeStopwatch()
    runs = {name: watch.implementation(name, iter(costs)) for name, costs in costs_us.items()}
    return benchmark(runs, **{"max_seconds": 100, **options}, stopwatch=watch), watch  # type: ignore[arg-type]


def test_steady_times_converge_with_the_fewest_repeats() -> None:
    timings, _ = timed({"a": repeat(2e4), "b": repeat(5e4)}, min_repeats=8)
    assert timings == {"a": Timing(2e4, 2e4, 2e4, 8, True), "b": Timing(5e4, 5e4, 5e4, 8, True)}


def test_rounds_are_interleaved_and_rotate() -> None:
    _, watch = timed({name: repeat(1e5) for name in "abc"}, min_repeats=4)
    assert "".join(watch.calls[-12:]) == "abcbcacababc"


def test_warm_up_lasts_until_calls_stop_getting_faster() -> None:
    slow_start = [9e5, 5e5, 3e5, 2e5, 1e5]
    timings, watch = timed({"a": chain(slow_start, repeat(1e5))}, min_repeats=5)
    assert (timings["a"].median_us, timings["a"].p80_us, timings["a"].repeats) == (1e5, 1e5, 5)
    assert len(watch.calls) == len(slow_start) + 3 + 5


def test_short_calls_are_warmed_up_for_a_least_time() -> None:
    _, watch = timed({"a": repeat(1e3)}, min_repeats=5)
    assert 50 <= len(watch.calls) - 5 <= 52


def test_a_spread_that_stays_wide_runs_out_of_time_and_says_so() -> None:
    wobble = chain.from_iterable(repeat([1e4, 3e4]))
    timings, watch = timed({"steady": repeat(2e4), "wild": wobble}, min_repeats=5, max_seconds=2)
    assert timings["steady"].converged and not timings["wild"].converged
    assert timings["wild"].repeats == timings["steady"].repeats > 5
    assert watch.seconds == pytest.approx(2, abs=0.06)
    assert timings["wild"].p20_us < timings["wild"].median_us < timings["wild"].p80_us


def test_more_repeats_narrow_a_noisy_median_until_it_is_known() -> None:
    noise = chain.from_iterable(repeat([1e4, 1.1e4, 1.04e4, 1.06e4, 1.05e4, 1.02e4, 1.08e4]))
    timing = timed({"a": noise}, min_repeats=5, max_seconds=900)[0]["a"]
    assert timing.converged and 20 < timing.repeats < 2000
    assert timing.median_us == 1.05e4


def test_a_median_is_known_no_closer_than_events_count() -> None:
    steps = chain.from_iterable(repeat([6.016, 6.048, 6.08]))
    timing = timed({"a": steps}, min_repeats=9, max_seconds=1, tolerance=0.0)[0]["a"]
    assert timing.converged and timing.repeats == 9


def test_the_fewest_repeats_run_even_when_time_is_out() -> None:
    assert timed({"a": repeat(7e6)}, min_repeats=4, max_seconds=1)[0]["a"].repeats == 4


def test_quantiles_are_those_of_the_repeats() -> None:
    warm_up, laps = [1e6] * 4, [30.0, 10.0, 50.0, 20.0, 40.0, 60.0]
    timing = timed({"a": chain(warm_up, laps)}, min_repeats=6, tolerance=10)[0]["a"]
    assert (timing.p20_us, timing.median_us, timing.p80_us) == (20.0, 35.0, 50.0)


@pytest.mark.parametrize("size", [19, 100, 1001])
def test_spread_is_that_of_medians_drawn_again_and_again(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    draws = 10 + torch.randn(2000, size, generator=generator, dtype=torch.float64)
    medians = draws.quantile(0.5, dim=1)
    # 95 % of a normal distribution lie within 1.96 standard deviations.
    expected = 1.96 * float(medians.std()) / 10
    spread = statistics.mean(median_spread(samples) for samples in draws[:100].tolist())
    assert 0.9 * expected < spread < 1.4 * expected


def test_spread_of_a_zero_median_is_no_success() -> None:
    assert median_spread([0.0, 0.0, 1.0, 1.0, -1.0, -1.0] * 3) == float("inf")


def test_garbage_collection_is_off_while_timing_and_back_on_after_a_failure() -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        benchmark({"a": fail})
    assert gc.isenabled()


class Output:
    """Something a weak reference can watch."""


def test_an_output_is_released_before_the_next_call() -> None:
    made: list[weakref.ref[Output]] = []

    def make() -> Output:
        assert all(reference() is None for reference in made)
        output = Output()
        made.append(weakref.ref(output))
        return output

    benchmark({"a": make, "b": make}, min_repeats=3, max_seconds=0.2)
    assert len(made) > 6


def test_the_cpu_stopwatch_does_not_time_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def clock() -> int:
        events.append("clock")
        return 1000 * len(events)

    class Result:
        def __init__(self) -> None:
            events.append("made")

        def __del__(self) -> None:
            events.append("released")

    monkeypatch.setattr("tilewright.measure.timing.timers.now_ns", clock)
    assert CpuStopwatch().time(Result).us == 2
    assert events == ["clock", "made", "clock", "released"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: benchmark({}), "no implementation"),
        (lambda: benchmark({"a": list}, min_repeats=2), "at least 3 repeats"),
        (lambda: stopwatch_for("tpu"), "'tpu'; known: cpu, cuda"),
    ],
)
def test_misuse_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.gpu
def test_cuda_events_time_the_device_and_not_the_host() -> None:
    square = torch.randn(4096, 4096, device="cuda")
    runs = {"one": lambda: square @ square, "four": lambda: [square @ square for _ in range(4)]}
    timings = benchmark(runs, device="cuda")
    assert 2.5 < timings["four"].median_us / timings["one"].median_us < 6
    assert timings["four"].host_us is not None and timings["four"].host_us < timings["four"].median_us


TIMING = Timing(median_us=20.0, p20_us=19.0, p80_us=22.0, repeats=50, converged=True, host_us=3.0)
WHERE = Environment("NVIDIA H200", 2, "2.13.0", "3.6.0", "abc", "2026-01-02T03:04:05+00:00")


def row(**changes: object) -> Measurement:
    made = measurement(
        TIMING,
        WHERE,
        suite="softmax",
        case="4096x4096 bf16",
        impl="eager",
        direction="fwd",
        nbytes=80_000_000,
        flops=4_000_000,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_row_carries_rates_and_environment() -> None:
    assert row().GBps == pytest.approx(4000.0)
    assert row().TFLOPs == pytest.approx(0.2)
    assert (row().device, row().host_us, row().commit) == ("NVIDIA H200", 3.0, "abc")
    bare = measurement(TIMING, WHERE, suite="s", case="c", impl="i", direction="bwd")
    assert bare.GBps is None and bare.TFLOPs is None


def test_environment_names_this_process() -> None:
    here = environment("some CPU")
    assert here.device == "some CPU" and here.torch == torch.__version__
    assert here.threads == torch.get_num_threads()
    assert here.date.endswith("+00:00")
    assert len(here.commit) in (0, 40)


def test_results_are_one_sorted_object_a_line_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "softmax.jsonl"
    rows = [row(impl="inductor"), row(case="1x1 fp32"), row()]
    write_results(path, rows)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["case"], line["impl"]) for line in lines] == [
        ("1x1 fp32", "eager"),
        ("4096x4096 bf16", "eager"),
        ("4096x4096 bf16", "inductor"),
    ]
    assert sorted(map(repr, read_results(path))) == sorted(map(repr, rows))
    before = path.read_bytes()
    write_results(path, reversed(rows))
    assert path.read_bytes() == before


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_results(path, [row()])
    with path.open("a") as file:
        file.write('{"suite": "x"}\n')
    with pytest.raises(UsageError, match=r"x\.jsonl:2 is not a bench result"):
        read_results(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_results(path, [row()])
    before = path.read_bytes()
    with pytest.raises(ValueError):
        write_results(path, [row(error=float("nan"))])
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half\ud800")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
