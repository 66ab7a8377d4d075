"""The guard: it interrupts after a time or a growth, knows what a program usually holds, and never within C."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.waiting import HANG_S, until
from tilewright.measure.recording import guard as guard_module
from tilewright.measure.recording.guard import RecordingGuard, held_bytes

MIB = 1 << 20


class Ended(BaseException):
    pass


class Process:
    """The clock and the heap as the guard's thread sees them: what the test says, on a machine as busy as it may be."""

    def __init__(self) -> None:
        self.now, self.nbytes, self.looks = 0.0, [0], 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def held_bytes(self) -> int:
        self.looks += 1
        return self.nbytes.pop(0) if len(self.nbytes) > 1 else self.nbytes[0]

    def is_at(self, now: float) -> None:
        self.now = now
        self._is_looked_at()

    def holds(self, *nbytes: int) -> None:
        """One amount a look, and the last one for many more."""
        self.nbytes = list(nbytes)
        until(lambda: len(self.nbytes) == 1)
        self._is_looked_at()

    def _is_looked_at(self) -> None:
        enough = self.looks + 5 * guard_module._POLLS_KEPT
        until(lambda: self.looks >= enough)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(guard_module, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(guard_module, "time", SimpleNamespace(monotonic=process.monotonic))
    monkeypatch.setattr(guard_module, "held_bytes", process.held_bytes)
    return process


def test_after_a_time_and_once(process: Process) -> None:
    calls: list[float] = []
    guard = RecordingGuard(lambda: calls.append(process.now))
    guard.watch(seconds=10)
    process.is_at(9.9)
    assert not calls
    process.now = 10.1
    until(lambda: bool(calls))
    process.now = 30
    guard.rest()
    assert calls == [10.1]


def test_what_it_calls_may_end_the_program() -> None:
    def end() -> None:
        raise Ended

    guard = RecordingGuard(end)
    guard.watch(seconds=0.05)
    with pytest.raises(Ended):
        until(lambda: False)
    guard.rest()


def test_what_ends_the_program_does_so_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised within the call, which Python ignores, it would leave an error without an exception."""

    begin = threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        begin(thread)
        thread.join(0.1)

    def end() -> None:
        monkeypatch.setattr(threading.Thread, "start", slowly)
        raise Ended

    guard = RecordingGuard(end)
    guard.watch(seconds=0.01)
    with pytest.raises(Ended):
        until(lambda: False)
    guard.rest()


def test_growth_beyond_what_is_usual(process: Process) -> None:
    calls: list[int] = []
    guard = RecordingGuard(lambda: calls.append(process.nbytes[0]))
    guard.learn()
    process.holds(200 * MIB)
    process.nbytes = [0]
    guard.watch(nbytes=50 * MIB)
    process.holds(200 * MIB)
    process.holds(*[300 * MIB] * (guard_module._POLLS_KEPT - 1), 200 * MIB)
    assert not calls
    process.nbytes = [300 * MIB]
    until(lambda: bool(calls))
    guard.rest()
    assert calls == [300 * MIB]


def test_at_rest_it_has_no_thread(process: Process) -> None:
    """PyTorch's profiler crashes if another thread runs Python while it starts or stops with stacks."""

    def threads() -> int:
        return sum(thread.name == "tilewright-guard" for thread in threading.enumerate())

    guard = RecordingGuard(lambda: None)
    guard.learn()
    assert threads() == 1
    guard.rest()
    assert threads() == 0
    guard.watch(seconds=10)
    assert threads() == 1
    process.now = 11
    until(lambda: threads() == 0)
    guard.rest()


def test_what_malloc_gave_is_held() -> None:
    before = held_bytes()
    block = bytearray(100 * MIB)
    assert held_bytes() - before > 0.99 * len(block)
    del block
    assert held_bytes() - before < 50 * MIB


IN_THE_TRACER = """
from torch.profiler import ProfilerActivity, profile
from tilewright.measure.recording.guard import RecordingGuard

words = [str(number) for number in range(200)]
for _ in range(10):
    stopped = []
    profiler = profile(activities=[ProfilerActivity.CPU], with_stack=True)
    guard = RecordingGuard(lambda: stopped.append(profiler.stop()))
    profiler.start()
    guard.watch(seconds=0.02)
    while not stopped:
        for word in words:
            word.isdigit()
    guard.rest()
print("alive")
"""


def test_a_profiler_of_calls_in_c_is_stopped_outside_of_them() -> None:
    """PyTorch's profiler asks each function in C for its name, and that looks for signals."""
    ran = subprocess.run(
        [sys.executable, "-c", IN_THE_TRACER], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ran.returncode, ran.stdout.strip()[-5:]) == (0, "alive"), ran.stderr
