"""Several ranks: who kept whom waiting, with clocks that disagree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trace.kineto import Trace, analysed, rows

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rank(number: int, begins: list[int], ends: list[int], clock_ahead: int = 0) -> Trace:
    """A collective from each of `begins` to each of `ends`, and a kernel over half of the first one."""
    trace = Trace(pid=4000 + number, rank=number)
    trace.step(0, clock_ahead, 1000 + clock_ahead)
    for begin, end in zip(begins, ends, strict=True):
        at = begin + clock_ahead
        trace.launch(at - 20, at, end + clock_ahead, name=ALL_REDUCE, stream=20, **{"Process Group Name": "0"})
    middle = (begins[0] + ends[0]) / 2 + clock_ahead
    trace.launch(begins[0] + clock_ahead - 10, begins[0] + clock_ahead, middle)
    return trace


def test_overlap_of_compute_and_communication(tmp_path: Path) -> None:
    connection = analysed([rank(0, [100, 300], [200, 400]).write(tmp_path)])
    assert rows(
        connection, "SELECT rank, collectives, communication_ms, exposed_ms, hidden_percent FROM communication"
    ) == [(0, 2, 0.2, 0.15, pytest.approx(25))]


def test_a_straggler_whose_clock_is_ahead(tmp_path: Path) -> None:
    """Rank 1 comes 60, 10 and 0 µs after rank 0, which it does not show: its clock is 5 ms ahead."""
    ends = [200, 400, 600]
    first = rank(0, [100, 300, 500], ends).write(tmp_path, "rank0")
    second = rank(1, [160, 310, 500], ends, clock_ahead=5000).write(tmp_path, "rank1")
    found = rows(analysed([first, second]), "SELECT rank, came_last, waited_ms, caused_ms FROM straggler ORDER BY rank")
    assert [(number, waited, caused) for number, _, waited, caused in found] == [
        (0, pytest.approx(0.07), 0),
        (1, 0, pytest.approx(0.07)),
    ]


def test_one_rank_has_nobody_to_wait_for(tmp_path: Path) -> None:
    assert rows(analysed([rank(0, [100], [200]).write(tmp_path)]), "FROM straggler") == []
