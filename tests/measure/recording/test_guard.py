"""The guard: it interrupts after a time or a growth, knows what a program usually holds, and never within C."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tilewright.measure.recording.guard import Guard

MIB = 1 << 20


class Ended(BaseException):
    pass


def spin(seconds: float) -> int:
    until, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        count += 1
    return count


def test_after_a_time_and_once() -> None:
    calls: list[float] = []
    guard, began = Guard(lambda: calls.append(time.perf_counter())), time.perf_counter()
    guard.watch(seconds=0.1)
    spin(0.4)
    guard.close()
    assert len(calls) == 1 and 0.09 < calls[0] - began < 0.35


def test_what_it_calls_may_end_the_program() -> None:
    def end() -> None:
        raise Ended

    guard = Guard(end)
    guard.watch(seconds=0.05)
    with pytest.raises(Ended):
        spin(5)
    guard.close()


def test_growth_beyond_what_is_usual() -> None:
    calls: list[int] = []
    guard = Guard(lambda: calls.append(1))
    guard.learn()
    usual = bytearray(200 * MIB)
    spin(1.0)
    del usual
    guard.watch(nbytes=50 * MIB)
    usual = bytearray(200 * MIB)
    spin(0.3)
    assert not calls
    more = bytearray(100 * MIB)
    spin(0.3)
    guard.close()
    assert calls == [1] and len(usual) + len(more) == 300 * MIB


IN_THE_TRACER = """
from torch.profiler import ProfilerActivity, profile
from tilewright.measure.recording.guard import Guard

words = [str(number) for number in range(200)]
for _ in range(10):
    stopped = []
    profiler = profile(activities=[ProfilerActivity.CPU], with_stack=True)
    guard = Guard(lambda: stopped.append(profiler.stop()))
    profiler.start()
    guard.watch(seconds=0.02)
    while not stopped:
        for word in words:
            word.isdigit()
    guard.close()
print("alive")
"""


def test_a_profiler_of_calls_in_c_is_stopped_outside_of_them() -> None:
    """PyTorch's profiler asks each function in C for its name, and that looks for signals."""
    ran = subprocess.run(
        [sys.executable, "-c", IN_THE_TRACER], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout.strip()[-5:]) == (0, "alive"), ran.stderr
