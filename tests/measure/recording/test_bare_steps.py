"""Steps that rush since what they wait for queued up while the profiler started."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.waiting import until
from tilewright.measure.recording import bare_steps
from tilewright.measure.recording.bare_steps import Rush
from tilewright.measure.recording.processor_time import threads_beside


@pytest.mark.parametrize(
    ("steps", "forgets", "lasts"),
    [
        ([9, 9, 100, 9, 9], [False, False, True, False, False], False),
        ([60, 9, 100], [False, False, False], False),
        ([9, 9, 9], [False, False, False], True),
    ],
)
def test_the_first_step_that_waits_ends_the_rush(
    steps: list[int], forgets: list[bool], lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(bare_steps.time, "perf_counter", lambda: now[0])
    rush = Rush([100e3, 110e3, 90e3])
    over = []
    for milliseconds in steps:
        now[0] += milliseconds / 1e3
        over.append(rush.is_over())
    assert (over, rush.lasts) == (forgets, lasts)
    assert rush.began == pytest.approx(sum(steps[:-1]) / 1e3)


def test_without_bare_steps_nothing_rushes() -> None:
    rush = Rush([])
    assert not rush.is_over() and not rush.lasts


def test_threads_beside_are_named_with_their_lines_unless_they_wait_themselves() -> None:
    entered, leave = threading.Barrier(3), threading.Event()

    def produce() -> None:
        entered.wait()
        while not leave.is_set(): time.sleep(0.001)  # fmt: skip  # noqa: E701

    def write_log() -> None:
        entered.wait()
        leave.wait()

    threads = [threading.Thread(target=one, name=one.__name__) for one in (produce, write_log)]
    for thread in threads:
        thread.start()
    entered.wait()
    until(lambda: any(one.startswith("produce at") for one in threads_beside(threading.get_ident())))
    time.sleep(0.01)
    found = {named for _ in range(50) for named in threads_beside(threading.get_ident())}
    leave.set()
    for thread in threads:
        thread.join()
    line = produce.__code__.co_firstlineno + 2
    assert {named for named in found if "test_" in named} == {f"produce at {Path(__file__).name}:{line}"}
