"""Calls that made the host wait: found with their line, and with what they cost."""

from pathlib import Path

import pytest

from tests.trace.kineto import Trace, analysed, rows

FIXTURES = Path(__file__).parent / "fixtures"


PLANTED = {"printed": 175, "item": 174, "to_cpu": 176, "nonzero": 177, "mask": 178, "pageable": 179,
           "pageable_back": 180, "branch": 183}  # fmt: skip
"""Functions of the recording that wait for the device, and the lines that do."""


def test_planted_synchronisations_are_found_and_nothing_else_is_accused() -> None:
    """Each waits for six products of 4096², 14 ms on an H200, and the device then waits for the host."""
    found = rows(
        analysed([FIXTURES / "syncs.json.gz"]),
        """SELECT source_function, any_value(source), sum(waited_ms_per_step), sum(lost_ms_per_step)
           FROM synchronisation GROUP BY source_function""",
    )
    lines = {function: int(source.removeprefix("record.py:")) for function, source, _, _ in found}
    assert PLANTED.items() <= lines.items() and lines["sync"] == 18
    assert not {"pinned_async", "clean", "work"} & lines.keys()
    for function, _, waited, lost in found:
        assert function not in PLANTED or (10 < waited < 40 and 0.1 < lost < 2), function


def test_a_printed_loss_in_a_training_loop() -> None:
    sql = "SELECT source, source_function, call, calls, lost_ms_per_step, spent_ms_per_step FROM synchronisation"
    ((*found, lost, spent),) = rows(analysed([FIXTURES / "block_print_loss.json.gz"]), sql)
    # Formatting a scalar tensor reads it eight times, and the device stands still meanwhile.
    assert found == ["record.py:198", "step", "print", 24] and 0.01 < lost < 1
    # The step is launch-bound: the device had caught up, and the formatting costs more than the waits.
    assert lost < spent < 3


WAITS = "SELECT source, exact, calls, waited_ms_per_step * 1e3, lost_ms_per_step * 1e3 FROM synchronisation"


def marked_step(trace: Trace) -> None:
    """A kernel, a read of its result that waits, the mark of it, and the next kernel."""
    trace.step(0, 0, 400)
    trace.frame("train.py(10): step", 1, 399)
    trace.operator("aten::relu", 2, 8)
    trace.launch(3, 10, 90)
    trace.operator("aten::item", 20, 98)
    trace.operator("aten::_local_scalar_dense", 21, 97)
    correlation = trace.call("cudaMemcpyAsync", 22, 30)
    trace.work(90, 91, correlation, category="gpu_memcpy", name="Memcpy DtoH (Device -> Pageable)", bytes=4)
    trace.call("cudaStreamSynchronize", 32, 95)


# Python's frames around the mark, with stacks: none of those that marked is around the wait.
MARKING = {
    "<built-in method item of Tensor object at 0x7f>": (19, 116),
    "/usr/lib/python3.12/warnings.py(106): _showwarnmsg": (100, 115),
    "tilewright/measure/recording/synchronisations.py(70): show": (101, 114),
    "tilewright/measure/recording/synchronisations.py(98): _mark": (102, 113),
    "torch/autograd/profiler.py(780): __enter__": (104, 107),
}


@pytest.mark.parametrize(
    ("marked", "frames"), [(True, {}), (True, MARKING), (False, {})], ids=["marked", "with stacks", "not marked"]
)
def test_a_mark_gives_the_exact_line_and_else_the_function_is_named(
    marked: bool, frames: dict[str, tuple[float, float]], trace: Trace
) -> None:
    marked_step(trace)
    for frame, (start, end) in frames.items():
        trace.frame(frame, start, end)
    if marked:
        trace.slice("user_annotation", "synchronisation at train.py:17", 105, 106)
    trace.operator("aten::relu", 120, 150)
    trace.launch(130, 140, 400)
    assert trace.rows(WAITS) == [("train.py:17" if marked else "train.py:10", marked, 1, 63, 49)]


def test_a_mark_is_not_for_an_earlier_wait(trace: Trace) -> None:
    marked_step(trace)
    trace.operator("aten::nonzero", 200, 220)
    trace.call("cudaStreamSynchronize", 202, 212)
    trace.slice("user_annotation", "synchronisation at train.py:21", 225, 226)
    found = {source: calls for source, _, calls, _, _ in trace.rows(WAITS)}
    assert found == {"train.py:10": 1, "train.py:21": 1}


def test_a_mark_is_for_the_copy_of_its_operator_too(trace: Trace) -> None:
    trace.step(0, 0, 400)
    trace.launch(3, 10, 90)
    trace.operator("aten::copy_", 20, 98)
    correlation = trace.call("cudaMemcpyAsync", 22, 94)
    trace.work(90, 93, correlation, category="gpu_memcpy", name="Memcpy DtoH (Device -> Pageable)", bytes=4)
    trace.call("cudaStreamSynchronize", 95, 97)
    trace.slice("user_annotation", "synchronisation at train.py:5", 105, 106)
    found = trace.rows("SELECT source, call, what, calls FROM synchronisation")
    assert found == [("train.py:5", "aten::copy_", "aten::copy_, a copy to or from pageable memory", 2)]


def test_an_asynchronous_copy_is_no_wait(trace: Trace) -> None:
    trace.step(0, 0, 400)
    trace.launch(3, 10, 90)
    correlation = trace.call("cudaMemcpyAsync", 22, 30)
    trace.work(90, 93, correlation, category="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)", bytes=4)
    assert trace.rows(WAITS) == []


def test_the_profilers_own_wait_after_the_last_step_is_left_out(trace: Trace) -> None:
    trace.step(0, 0, 100)
    trace.launch(3, 10, 300)
    trace.call("cudaDeviceSynchronize", 120, 305)
    assert trace.rows(WAITS) == []
