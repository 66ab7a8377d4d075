"""The comparison of clocks: records between waits, their union, the note about a disagreement."""

import random

import pytest
import torch

from tilewright.measure.racing.ceiling_probe import ceiling_probe
from tilewright.measure.timing.crosscheck import between_marks, disagreement
from tilewright.measure.timing.device_records import Record, union
from tilewright.measure.timing.gpu_state import SmClock, throttled


def test_a_call_is_what_stands_between_two_waits() -> None:
    records = [
        Record("fill", 0, 900),
        Record("spin_kernel(long)", 1000, 5000),
        Record("add", 6000, 8000),
        Record("mul", 9000, 12000),
        Record("spin_kernel(long)", 13000, 14000),
        Record("poison", 15000, 16000),
        Record("spin_kernel(long)", 20000, 25000),
        Record("spin_kernel(long)", 26000, 27000),
    ]
    assert between_marks(list(reversed(records))) == [(6.0, 5.0, 0.0)]


def test_work_beside_the_stream_is_seen() -> None:
    records = [
        Record("spin_kernel", 0, 5000),
        Record("beside", 1000, 4000),
        Record("beside too", 4500, 7000),
        Record("own", 6000, 6500),
        Record("spin_kernel", 7000, 8000),
        Record("not joined", 6900, 7200),
        Record("not joined either", 7500, 9000),
        Record("the next call's", 9500, 9900),
    ]
    assert between_marks(records) == [(8.0, 7.2, 5.2)]


def test_a_call_beside_its_stream_alone_is_seen() -> None:
    opening, closing = Record("spin_kernel", 0, 5000), Record("spin_kernel", 5100, 8000)
    assert between_marks([opening, Record("before", 1000, 4000), closing]) == [(3.0, 3.0, 3.0)]
    assert between_marks([opening, closing, Record("after", 5200, 5900)]) == [(0.7, 0.7, 0.7)]


def test_the_union_is_that_of_the_points() -> None:
    draws = random.Random(1)
    for _ in range(50):
        intervals = [(start, start + draws.randrange(9)) for start in (draws.randrange(40) for _ in range(6))]
        assert union(intervals) == len({point for start, end in intervals for point in range(start, end)})


@pytest.mark.parametrize(
    ("event_us", "profiled_us", "said"),
    [
        (100.0, 98.1, None),
        (100.0, 97.9, "ambiguous: events 100.0 µs, profiler 97.9 µs"),
        (98.0, 100.1, "ambiguous: events 98.0 µs, profiler 100.1 µs"),
        (9.9, 20.0, None),
    ],
)
def test_two_percent_from_ten_microseconds_on(event_us: float, profiled_us: float, said: str | None) -> None:
    assert disagreement(event_us, profiled_us) == said


def test_a_throttled_clock_is_named() -> None:
    full, capped = SmClock(1980, frozenset()), SmClock(1950, frozenset({"the power cap"}))
    assert throttled(full, full) is None and throttled(None, full) is None
    assert throttled(full, capped) == "the clock is held at 1950 MHz (the power cap)"
    assert throttled(full, SmClock(1500, frozenset())) == "the clock fell from 1980 to 1500 MHz"


@pytest.mark.parametrize("limit", ["copy", "read", "write", "matmul"])
def test_a_pace_moves_what_it_says(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.measure.racing.ceiling_probe._CPU_BYTES", 2**16)
    monkeypatch.setattr("tilewright.measure.racing.ceiling_probe._CPU_MATMUL_SIZE", 16)
    ceiling_probe.cache_clear()
    made = ceiling_probe(limit, "float32", "cpu")  # type: ignore[arg-type]
    result = made.call()
    ceiling_probe.cache_clear()
    assert isinstance(result, torch.Tensor)
    if limit == "matmul":
        assert made.flops == 2 * 16**3 and result.shape == (16, 16)
        assert made.rate(2.0) == pytest.approx(2 * 16**3 / 2e6)
    else:
        moved = {"copy": 2 * result.nbytes, "read": 2**16, "write": result.nbytes}[limit]
        assert made.nbytes == moved == 2**16
        assert made.rate(2.0) == pytest.approx(2**16 / 2e3)
