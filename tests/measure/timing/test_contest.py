"""The race that settles choices: what is wrong takes no part, draws are the same, the generator stays."""

import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

from tilewright.kernels.convolution.offer import EPS_OF_TF32
from tilewright.measure.timing import contest as contest_module
from tilewright.measure.timing.contest import agree, contest, only_race
from tilewright.measure.timing.stopwatch import Lap

CPU = torch.device("cpu")
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest_module, "SECONDS", 0.01)


def test_the_alternative_that_does_a_hundred_times_the_work_loses() -> None:
    def often() -> torch.Tensor:
        for _ in range(99):
            X.exp()
        return X.exp()

    outcome = contest({"often": often, "once": X.exp}, CPU)
    assert outcome.fastest == "once" and set(outcome.times_us) == {"often", "once"}


def test_wrong_results_take_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = contest({"right": X.exp, "wrong": lambda: X.exp() * 1.01, "also right": X.exp}, CPU)
    assert set(outcome.times_us) == {"right", "also right"}
    assert "wrong was not raced: its results differ from those of right" in capsys.readouterr().err


def test_first_calls_wait_for_no_other_race(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextmanager
    def noted(gpu: str | None) -> Iterator[None]:
        seen.append("alone")
        yield

    monkeypatch.setattr(contest_module, "only_race", noted)
    contest({name: partial(seen.append, name) for name in ("one", "other")}, CPU)
    assert seen[:3] == ["one", "other", "alone"] and set(seen[3:]) == {"one", "other"}


def test_operands_rounded_to_tf32_are_no_wrong_results(capsys: pytest.CaptureFixture[str]) -> None:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    calls = {"fp32": lambda: X @ X.T, "tf32": lambda: rounded(X) @ rounded(X.T), "wrong": lambda: X @ X.T * 1.05}
    assert set(contest(calls, CPU).times_us) == {"fp32"}
    assert set(contest(calls, CPU, operand_eps=EPS_OF_TF32).times_us) == {"fp32", "tf32"}


def test_all_draw_the_same_numbers_and_the_generator_stays() -> None:
    before = torch.get_rng_state()
    outcome = contest({"one": lambda: torch.rand(9), "other": lambda: [torch.rand(3, 3).view(9)]}, CPU)
    assert set(outcome.times_us) == {"one", "other"}
    assert torch.equal(torch.get_rng_state(), before)


def test_rounding_is_no_difference_and_nan_is_one() -> None:
    narrow = X.bfloat16()
    assert agree([(narrow.float() * 1.01).bfloat16()], [narrow])
    assert not agree([narrow * 1.5], [narrow])
    hole = X.clone()
    hole[0, 0] = torch.nan
    assert agree([hole], [hole]) and not agree([X], [hole]) and not agree([hole], [X])
    assert not agree([X[:1]], [X]) and not agree([], [X])


def test_what_is_zero_but_for_rounding_agrees_with_zero() -> None:
    zero = torch.zeros_like(X)
    assert agree([X, zero], [X, 1e-7 * X]) and agree([X, 1e-7 * X], [X, zero])
    assert not agree([X, zero], [X, 1e-3 * X]) and not agree([zero], [1e-7 * X])


class Busy:
    """A device on which other programs add to seven calls of eight."""

    def __init__(self) -> None:
        self.calls, self.draws = 0, random.Random(0)

    def lead(self, us: float) -> None:
        pass

    def time(self, function: Callable[[], object]) -> Lap:
        function()
        self.calls += 1
        return Lap(function.us + (0.0 if self.calls % 8 == 0 else self.draws.uniform(1.0, 90.0)))  # type: ignore[attr-defined]

    def now(self) -> float:
        return self.calls * 1e-3


def test_calls_are_repeated_until_the_shortest_time_is_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(us: float) -> Callable[[], object]:
        def function() -> torch.Tensor:
            return X

        function.us = us  # type: ignore[attr-defined]
        return function

    monkeypatch.setattr(contest_module, "stopwatch_for", lambda device: Busy())
    monkeypatch.setattr(contest_module, "MOST_ROUNDS", 10_000)
    outcome = contest({"slow": call(12.0), "fast": call(10.0)}, CPU, seconds=0.005)
    assert outcome.times_us == {"slow": 12.0, "fast": 10.0}


HOLDER = """
import sys, torch
from tilewright.measure.timing.contest import only_race
with only_race(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_race_waits_for_that_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen([sys.executable, "-c", HOLDER, "gpu"], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin and other.stdout and other.stdout.readline() == "held\n"
        waiting = threading.Thread(target=lambda: order.append(enter()))
        order: list[str] = []

        def enter() -> str:
            with only_race("gpu"):
                return "entered"

        waiting.start()
        waiting.join(0.2)
        assert order == []
        other.stdin.close()
        waiting.join(60)
    assert order == ["entered"]
