"""The host's step divided into classes: against answers by hand and a count of microseconds, with lines."""

import random
from pathlib import Path

import pytest

from tests.trace.kineto import AUTOGRAD, HOST, Analysis, Trace

BY_CLASS = "SELECT class, sum(dur) / 1e3 FROM host_time GROUP BY class"
GROUPS = {
    "data": 4, "compilation": 4, "garbage collection": 4, "communication": 3, "I/O": 3, "sleep and locks": 3,
    "operators": 2, "Python": 1, "untraced": 0,
}  # fmt: skip
EVENTS = [
    ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data"),
    ("user_annotation", "compilation", "compilation"),
    ("user_annotation", "garbage collection", "garbage collection"),
    ("cpu_op", "gloo:all_reduce", "communication"),
    ("python_function", "<built-in method read of _io.BufferedReader object at 0x7f>", "I/O"),
    ("python_function", "<built-in function sleep>", "sleep and locks"),
    ("cpu_op", "aten::mm", "operators"),
    ("python_function", "torch/nn/functional.py(3): linear", "Python"),
    ("user_annotation", "phase forward", "untraced"),
]


@pytest.mark.parametrize("seed", range(4))
def test_every_microsecond_is_in_the_class_of_the_first_group(seed: int) -> None:
    """Random events, each within another or beside it; the outermost event of the first group decides."""
    draw, trace, spans = random.Random(seed), Trace(), []

    def fill(start: int, end: int, depth: int) -> None:
        while depth and (start := start + draw.randint(0, 9)) + 3 < end:
            stop = min(end, start + draw.randint(3, 90))
            category, name, kind = draw.choice(EVENTS)
            trace.slice(category, name, start, stop)
            spans.append((start, stop, kind))
            fill(start + 1, stop - 1, depth - 1)
            start = stop

    steps = [(0, 250), (250, 500)]
    for number, (start, end) in enumerate(steps):
        trace.step(number, start, end)
        fill(start, end, 4)
    expected: dict[str, int] = {}
    for at in range(500):
        around = [kind for start, end, kind in spans if start <= at < end]
        kind = max(around, key=GROUPS.__getitem__, default="untraced")
        expected[kind] = expected.get(kind, 0) + 1
    assert dict(trace.rows(BY_CLASS)) == expected
    assert trace.rows("SELECT round(sum(percent), 6) FROM host_account") == [(100.0,)]
    assert trace.rows("SELECT sum(dur) / 1e3 FROM host_time GROUP BY step_ts ORDER BY step_ts") == [(250.0,), (250.0,)]


def lines(trace: Trace, *reached: tuple[float, int]) -> None:
    """The lines of train.py that the host reached, by time."""
    since = [round(1000 * (1000 + at)) for at, _ in reached]
    trace.header["tilewright lines"] = {
        "thread": HOST,
        "places": [["train.py", "main", str(line)] for _, line in reached],
        "since": [now - last for now, last in zip(since, [0, *since], strict=False)],
        "which": list(range(len(reached))),
    }


def test_python_has_the_line_where_it_is_and_a_wait_that_where_it_began() -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.frame("train.py(1): main", 0, 100)
    trace.frame("<built-in function sleep>", 40, 70)
    trace.frame("json/__init__.py(9): dumps", 80, 90)
    lines(trace, (0, 2), (30, 3), (75, 4))
    found = trace.rows("SELECT class, what, source, sum(dur) / 1e3 FROM host_time GROUP BY ALL ORDER BY min(ts)")
    assert found == [
        *(("Python", "", "train.py:2", 30.0), ("Python", "", "train.py:3", 15.0)),
        *(("sleep and locks", "sleep", "train.py:3", 30.0), ("Python", "", "train.py:4", 15.0)),
        ("Python", "dumps", "train.py:4", 10.0),
    ]


def test_what_the_recorder_reads_is_the_recorders() -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.frame("train.py(1): main", 0, 100)
    trace.frame("tilewright/measure/recording/recorder.py(9): _keep", 20, 60)
    trace.frame("<built-in function open>", 30, 50)
    trace.frame("<built-in function open>", 70, 90)
    found = trace.rows("SELECT class, sum(dur) / 1e3 FROM host_time GROUP BY ALL ORDER BY class")
    assert found == [("I/O", 20.0), ("Python", 40.0), ("profiler", 40.0)]


def verdict(trace: Trace) -> list[str]:
    return [sentence for (sentence,) in trace.rows("SELECT sentence FROM verdict ORDER BY place")]


def test_the_verdict_names_the_cause_its_share_its_line_and_what_to_do() -> None:
    """`test_causes.py` has the other causes."""
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    trace.operator("aten::mm", 5, 300)
    trace.frame("<built-in function sleep>", 320, 980)
    lines(trace, (0, 2), (310, 7))
    slow, _, action = verdict(trace)
    assert slow == "time.sleep takes 66 % of the step, 0.66 ms of 1 ms at train.py:7."
    assert "time.sleep" in action and " less per step at most (66 %)" in action


def test_products_in_fp32_where_tensor_cores_would_pay() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(5): forward", 0, 1000)
    trace.operator("aten::mm", 10, 60)
    trace.launch(20, 30, 930, name="ampere_sgemm_128x64_tn")
    trace.call("cudaDeviceSynchronize", 100, 940)
    slow, why, action = verdict(trace)
    # An H200 multiplies 7.9 times as fast in TF32; the device is busy for 90 % of the step.
    assert slow == "Multiplying matrices in fp32 takes 90 % of the step, 0.9 ms of 1 ms at train.py:5."
    assert why.startswith("aten::mm and others compute in fp32") and "TF32 is 8 × as fast" in why
    assert action.startswith('torch.set_float32_matmul_precision("high")') and "(79 %)" in action
    tensor_cores = Trace()
    tensor_cores.step(0, 0, 1000)
    tensor_cores.operator("aten::mm", 10, 60)
    tensor_cores.launch(20, 30, 930, name="cutlass_80_tensorop_s1688gemm_128x64_tn")
    assert not any("fp32" in sentence for sentence in verdict(tensor_cores))


@pytest.mark.parametrize(("each", "grows"), [((8, 8, 8), True), ((8, 2, 8), False), ((8, 8), False)])
def test_memory_that_grows_with_each_step(each: tuple[int, ...], grows: bool) -> None:
    trace = Trace()
    held = 0
    trace.frame("train.py(5): train", 0, 100 * len(each))

    def memory(at: int, nbytes: int, address: int) -> None:
        nonlocal held
        held += nbytes
        args = {"Total Allocated": held, "Bytes": nbytes, "Device Id": 0, "Device Type": 0, "Addr": address}
        event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": trace.pid, "tid": HOST}
        trace.events.append(event | {"ts": 1000 + at, "args": args})

    for step, megabytes in enumerate(each):
        at = 100 * step
        trace.step(step, at, at + 100)
        trace.operator("aten::mm", at + 5, at + 50)
        memory(at + 10, 4_000_000, 1)
        memory(at + 20, 1_000_000 * megabytes, 100 + step)
        trace.operator("aten::relu", at + 50, at + 98)
        memory(at + 60, -4_000_000, 1)
    said = verdict(trace)
    if not grows:
        assert not any("grows" in sentence for sentence in said)
        return
    slow, why, action = said
    assert slow == "Memory of the CPU grows by 8 MB in each step."
    assert why.endswith("made by aten::mm at train.py:5 (100%).") and "loss.item()" in action


def test_a_compilation_has_pytorchs_reason() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.slice("user_annotation", "compilation", 100, 900)
    trace.slice("user_annotation", "compiled again: tensor 'x' size mismatch. expected 3, actual 4", 990, 991)
    slow, why, action = verdict(trace)
    assert slow.startswith("Compilation takes 80 %")
    assert "expected 3, actual 4." in why
    assert action.startswith("torch.compile(..., dynamic=True)")


def test_a_block_that_is_entered_late_waits_for_a_lock() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    trace.operator("aten::mm", 5, 100)
    lines(trace, (0, 2), (100, 5), (700, 6))
    trace.header["tilewright lines"]["places"][1].append("with")
    found = trace.rows("SELECT class, sum(dur), any_value(what) FROM host_time GROUP BY class ORDER BY class")
    assert found == [("Python", 305_000, ""), ("operators", 95_000, "aten::mm"), ("sleep and locks", 600_000, "with")]
    assert verdict(trace)[0].startswith("Entering a with block takes 60 % of the step, 0.6 ms of 1 ms at train.py:5")


def test_lines_of_one_loop_of_python_are_one_cause() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    lines(trace, (0, 2), (100, 5), (400, 6), (600, 5), (900, 9))
    assert verdict(trace)[0] == "Python takes 80 % of the step, 0.8 ms of 1 ms at train.py:5."


def test_a_loop_over_elements_is_one_cause() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    for at in range(100, 900, 10):
        trace.operator("aten::select", at, at + 4)
        trace.frame("<built-in method item of Tensor object at 0x1>", at + 5, at + 9)
    lines(trace, (0, 2), (100, 5), (901, 6))
    slow, why, _ = verdict(trace)
    assert slow.startswith("A loop of small calls takes 80 % of the step, ")
    assert slow.endswith(" at train.py:5.")
    assert "A step makes 160 small calls" in why


def test_a_late_rank_is_named_not_those_that_wait_for_it() -> None:
    traces = []
    for rank in (0, 1):
        trace = Trace(4000 + rank, rank)
        trace.step(0, 0, 1000)
        trace.frame("train.py(1): main", 0, 1000)
        if rank:
            trace.frame("<built-in function sleep>", 0, 800)
            trace.operator("aten::mm", 800, 1000)
        else:
            trace.operator("aten::mm", 0, 100)
            trace.frame("<built-in method run_backward of torch._C._EngineBase object at 0x1>", 100, 1000)
            trace.slice("user_annotation", "gloo:all_reduce", 50, 990, AUTOGRAD)
        traces.append(trace)
    analysis = Analysis(traces)
    (slow,), (why,), _ = analysis.rows("SELECT sentence FROM verdict ORDER BY place")
    assert slow.startswith("Rank 1: time.sleep takes 80 % of the step")
    assert why.endswith("others wait for this rank, 0.89 ms a step.")


def test_a_healthy_step_has_no_verdict_but_how_much_operators_could_win() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    trace.operator("aten::mm", 10, 990, dims=[[64, 64], [64, 64]])
    assert verdict(trace) == [
        "Nothing stands out: operators take 98 % of the host's step, aten::mm at train.py:1 alone 98 % (its floor is "
        "unknown)."
    ]


FIXTURES = Path(__file__).parent / "fixtures"


PLANTED = {"printed": 175, "item": 174, "to_cpu": 176, "nonzero": 177, "mask": 178, "pageable": 179,
           "pageable_back": 180, "branch": 183}  # fmt: skip
"""Functions of the recording that wait for the device, and the lines that do."""


def test_planted_synchronisations_are_found_and_nothing_else_is_accused() -> None:
    """Each waits for six products of 4096², 14 ms on an H200, and the device then waits for the host."""
    found = Analysis([FIXTURES / "syncs.json.gz"]).rows(
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
    ((*found, lost, spent),) = Analysis([FIXTURES / "block_print_loss.json.gz"]).rows(sql)
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
