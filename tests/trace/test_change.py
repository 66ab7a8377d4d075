"""When is a difference real? False alarms and misses counted, on noise by formula and on recorded step times."""

import gzip
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tilewright.trace.compare.change import Floats, compare, student

FIXTURE = Path(__file__).parent / "fixtures" / "step_times.gz"
STEPS = 100
COMPARISONS = 200
SLOWER = 1.03

Noise = Callable[[np.random.Generator], Floats]


def correlated(draw: np.random.Generator, memory: float) -> Floats:
    """An autoregressive process of standard deviation 1."""
    values = np.zeros(STEPS + 50)
    for i in range(1, len(values)):
        values[i] = memory * values[i - 1] + math.sqrt(1 - memory**2) * draw.standard_normal()
    return values[50:]


def flicker(draw: np.random.Generator) -> Floats:
    """1/f noise of standard deviation 1, cut out of a series four times as long."""
    frequencies = np.fft.rfftfreq(4 * STEPS)
    frequencies[0] = 1
    spectrum = draw.standard_normal((2, len(frequencies))) / np.sqrt(frequencies)
    spectrum[:, 0] = 0
    values = np.fft.irfft(spectrum[0] + 1j * spectrum[1])
    begin = draw.integers(0, 3 * STEPS)
    cut: Floats = values[begin : begin + STEPS] / values.std()
    return cut


NOISES: dict[str, Noise] = {
    "white": lambda draw: 0.015 * draw.standard_normal(STEPS),
    "heavy tails": lambda draw: 0.01 * draw.standard_t(2, STEPS),
    "one step in ten up to half as long again": lambda draw: (
        0.01 * draw.standard_normal(STEPS) + (draw.random(STEPS) < 0.1) * 0.4 * draw.random(STEPS)
    ),
    "correlated": lambda draw: 0.005 * correlated(draw, 0.9),
    "drift of 3 %": lambda draw: 0.03 * np.linspace(0, 1, STEPS) + 0.005 * draw.standard_normal(STEPS),
    "warm-up of 5 %": lambda draw: 0.05 * np.exp(-np.arange(STEPS) / 10) + 0.005 * draw.standard_normal(STEPS),
    "flicker": lambda draw: 0.005 * flicker(draw) + 0.003 * draw.standard_normal(STEPS),
}


def steps(noise: Noise, draw: np.random.Generator) -> list[list[float]]:
    """One run of 100 ms steps."""
    return [(1e5 * np.exp(noise(draw))).tolist()]


@pytest.mark.parametrize("name", NOISES)
def test_single_runs(name: str) -> None:
    draw = np.random.default_rng(list(NOISES).index(name))
    noise = NOISES[name]
    pairs = [(steps(noise, draw), steps(noise, draw)) for _ in range(COMPARISONS)]
    alarms = sum(compare(a, b).verdict in ("slower", "faster") for a, b in pairs)
    assert alarms <= 0.02 * COMPARISONS
    found = sum(compare(a, [[us * SLOWER for us in b[0]]]).verdict == "slower" for a, b in pairs)
    assert found >= 0.95 * COMPARISONS


def recorded(name: str) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Runs of 40 steps each, one after the other, in microseconds."""
    return [np.asarray(run, float) for run in json.loads(gzip.decompress(FIXTURE.read_bytes()))[name]]


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("H200, a Transformer layer of 1024 channels, eager", 20),
        # Ten times the noise, since other programs came and went: it takes more runs to see through.
        ("two busy cores, an MLP of 256 and 1024 channels, eager", 80),
    ],
)
def test_runs_made_in_turns(name: str, pairs: int) -> None:
    """200 stretches of recorded runs, the two runs of each neighbouring pair dealt to the sides by a coin."""
    runs = recorded(name)
    draw = np.random.default_rng(7)
    alarms = found = 0
    for _ in range(COMPARISONS):
        first = draw.integers(0, len(runs) - 2 * pairs + 1)
        coins = draw.integers(0, 2, pairs)
        before = [runs[first + 2 * i + coins[i]] for i in range(pairs)]
        after = [runs[first + 2 * i + 1 - coins[i]] for i in range(pairs)]
        alarms += compare(before, after, in_turns=True).verdict in ("slower", "faster")
        found += compare(before, [run * SLOWER for run in after], in_turns=True).verdict == "slower"
    assert alarms <= 0.02 * COMPARISONS
    assert found >= 0.95 * COMPARISONS


@pytest.mark.parametrize("name", json.loads(gzip.decompress(FIXTURE.read_bytes())))
def test_short_single_runs_of_a_shared_machine_tell_nothing(name: str) -> None:
    """A tenth of a second, taken at its word, would call one comparison in twenty a change where nothing did."""
    runs = recorded(name)
    found = [compare([a], [b]) for a, b in pairwise(runs)]
    assert {change.verdict for change in found} == {"cannot tell"}
    assert "slow noise" in found[0].method
    trusted = [compare([a], [b], shared_machine=False) for a, b in pairwise(runs)]
    assert sum(change.verdict in ("slower", "faster") for change in trusted) > 0.02 * len(trusted)


def test_runs_apart_in_time_are_compared_too() -> None:
    draw = np.random.default_rng(3)
    noise = NOISES["white"]
    before, after = ([steps(noise, draw)[0] for _ in range(8)] for _ in range(2))
    assert compare(before, after).verdict in ("the same", "cannot tell")
    slower = [[us * SLOWER for us in run] for run in after]
    change = compare(before, slower)
    assert change.verdict == "slower" and change.low < SLOWER < change.high
    assert compare(slower, before).verdict == "faster"


def test_a_difference_below_one_percent_is_the_same() -> None:
    quiet = [[1e5 + i % 3 for i in range(STEPS)]]
    change = compare(quiet, [[us * 1.005 for us in quiet[0]]])
    assert change.verdict == "the same" and change.low > 1


def test_what_cannot_be_told_says_why_and_what_could_be() -> None:
    assert compare([[1e6, 1e6]], [[2e6, 2e6]]).method.startswith("a run has 2 timed steps and needs 20")
    assert compare([], [[1.0]]).verdict == compare([[]], [[1.0]]).verdict == "cannot tell"
    draw = np.random.default_rng(1)
    noisy = [compare([1e5 * np.exp(0.2 * draw.standard_normal(30))], [1e5 * np.ones(30)]) for _ in range(5)]
    assert all(change.verdict == "cannot tell" and change.resolution > 0.03 for change in noisy)


@pytest.mark.parametrize("sides", [(1, 1), (5, 5), (5, 9)])
def test_times_without_any_spread(sides: tuple[int, int]) -> None:
    before, after = ([[1e5] * 30] * count for count in sides)
    assert compare(before, after).verdict == "the same"
    assert compare(before, [[1.1e5] * 30] * sides[1]).verdict == "slower"


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # Tables of Student's t, 99.5 %.
    [(2, 9.925), (3, 5.841), (5, 4.032), (9, 3.250), (30, 2.750), (120, 2.617), (1e9, 2.576)],
)
def test_students_quantiles(freedom: float, quantile: float) -> None:
    assert student(0.995, freedom) == pytest.approx(quantile, rel=2e-3)
