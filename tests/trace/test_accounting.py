"""Every nanosecond of a step in one class, against answers by hand and a count of microseconds."""

import random

import pytest

from tests.trace.kineto import STREAM, Analysis, Trace

BY_CLASS = "SELECT class, sum(dur) / 1e3 FROM accounting GROUP BY class"


def stepped(end: float, *launches: tuple[float, float, float]) -> Trace:
    """A step from 0 on, with the host in it all the time; of each launch, when it is called, starts and ends."""
    trace = Trace()
    trace.step(0, 0, end)
    trace.operator("aten::something", 0, end)
    for at, start, stop in launches:
        trace.launch(at, start, stop)
    return trace


def test_a_device_waits_for_its_first_launch_and_for_a_host_that_comes_late() -> None:
    assert dict(stepped(100, (0, 10, 60), (5, 60, 100)).rows(BY_CLASS)) == {"idle": 10, "kernel": 90}
    late = stepped(100, (0, 5, 20), (50, 58, 100))
    assert dict(late.rows(BY_CLASS)) == {"idle": 5, "kernel": 57, "launch-bound": 38}


def test_a_wait_costs_the_gaps_that_it_causes() -> None:
    """40 µs of waiting let the host fall behind for two gaps; the third is its own slowness."""
    trace = stepped(300, (0, 0, 50), (60, 65, 100), (115, 120, 150), (195, 200, 300))
    trace.call("cudaDeviceSynchronize", 12, 52)
    found = dict(trace.rows(BY_CLASS))
    assert found == {"kernel": 50 + 35 + 30 + 100, "synchronisation": 15 + 20 + 5, "launch-bound": 45}
    # What is queued before the device runs dry waits for no host.
    queued = stepped(100, (0, 0, 50), (32, 60, 100))
    queued.call("cudaStreamSynchronize", 10, 30)
    assert dict(queued.rows(BY_CLASS)) == {"kernel": 90, "launch-bound": 10}


def test_a_host_that_is_away_leaves_the_device_idle(trace: Trace) -> None:
    trace.step(0, 0, 2000)
    trace.operator("aten::before", 0, 100)
    trace.operator("aten::after", 1100, 2000)
    trace.launch(10, 20, 60)
    trace.launch(1110, 1120, 2000)
    assert dict(trace.rows(BY_CLASS)) == {"idle": 20 + 1000, "kernel": 920, "launch-bound": 60}


def test_the_tail_of_the_last_wave() -> None:
    """128 threads with 32 registers: 16 blocks an SM, 2112 slots. 3168 blocks are 1.5 waves in 2 turns."""
    trace = stepped(100)
    trace.launch(0, 0, 40, grid=(3168, 1, 1))
    trace.launch(2, 40, 100, grid=(132, 1, 1))
    assert dict(trace.rows(BY_CLASS)) == {"kernel": 90, "wave tail": 10}
    waves = trace.rows("SELECT waves, idle_of_last, tail_ns FROM wave ORDER BY slice_id")
    assert waves == [(1.5, 0.5, 10_000), (0.0625, 0.9375, 0)]


def test_work_of_one_step_that_runs_in_the_next(trace: Trace) -> None:
    """Steps are windows of the wall clock; the last one ends when the device has done what it queued."""
    trace.step(0, 0, 50)
    trace.step(1, 50, 100)
    trace.operator("aten::something", 0, 100)
    trace.launch(10, 20, 90)
    trace.launch(60, 90, 140)
    steps = trace.rows("SELECT name, dur / 1e3 FROM step ORDER BY ts")
    assert steps == [("ProfilerStep#0", 50), ("ProfilerStep#1", 90)]
    assert trace.rows("SELECT step, class, dur / 1e3 FROM accounting ORDER BY step_ts, class") == [
        ("ProfilerStep#0", "idle", 20),
        ("ProfilerStep#0", "kernel", 30),
        ("ProfilerStep#1", "kernel", 90),
    ]


def test_a_trace_without_steps_is_one_step_and_without_a_device_none(trace: Trace) -> None:
    assert Trace().rows("FROM accounting") == stepped(100).rows("FROM accounting") == []
    trace.operator("aten::something", 0, 100)
    trace.launch(0, 10, 100)
    found = trace.rows("SELECT step, class, dur / 1e3 FROM accounting ORDER BY class")
    assert found == [("the whole trace", "idle", 10), ("the whole trace", "kernel", 90)]


@pytest.mark.parametrize("seed", range(8))
def test_any_trace_adds_up_and_agrees_with_a_count_of_microseconds(seed: int, trace: Trace) -> None:
    """Kernels count before collectives, and those before copies; the rest of a step are gaps."""
    draw = random.Random(seed)
    names = ("kernel", "ncclDevKernel_AllGather_RING_LL(args)", "copy")
    trace.step(0, 0, 400)
    trace.step(1, 400, 900)
    works: list[tuple[int, int, int]] = []
    at, last = 0, 900
    for _ in range(draw.randrange(5, 60)):
        at += draw.randrange(1, 40)
        start = at + draw.randrange(1, 30)
        end = start + draw.choice([0, 1, 7, 60])
        kind = draw.choice([0, 0, 0, 1, 2])
        stream = STREAM + draw.randrange(3)
        trace.operator("aten::something", at, at + draw.randrange(1, 9))
        correlation = trace.call(draw.choice(["cudaLaunchKernel", "cuLaunchKernelEx"]), at, at + 1)
        category = "gpu_memcpy" if kind == 2 else "kernel"
        trace.work(start, end, correlation, name=names[kind], category=category, stream=stream)
        if draw.random() < 0.2:
            trace.call("cudaStreamSynchronize", at + 1, at + 1 + draw.randrange(80))
        works.append((start, end, kind))
        # What is launched after the last step is not its own.
        last = max(last, end) if at <= 900 else last
    counted = dict.fromkeys(("kernel", "communication", "copy", "gap"), 0)
    for moment in range(last):
        running = [kind for start, end, kind in works if start <= moment < end]
        counted[("kernel", "communication", "copy")[min(running)] if running else "gap"] += 1
    found = dict(trace.rows(BY_CLASS))
    gaps = sum(found.pop(name, 0) for name in ("synchronisation", "launch-bound", "idle"))
    assert {name: found.get(name, 0) for name in ("kernel", "communication", "copy")} | {"gap": gaps} == counted
    for (percent,) in trace.rows("SELECT sum(percent) FROM accounting GROUP BY step_ts, upid"):
        assert percent == pytest.approx(100, abs=1e-9)
    ends = trace.rows("SELECT ts + dur - lead(ts) OVER (ORDER BY ts) FROM device_time ORDER BY ts")
    assert {gap for (gap,) in ends[:-1]} <= {0}


Program = list[tuple[int, int, bool]]
"""For each kernel: µs of the host before its launch, µs on the device, and whether the host waits after it."""


def pipeline(program: Program, trace: Trace | None, waits: bool) -> int:
    """Run `program` on a host that comes back 3 µs after the device it waits for; when the last kernel ends."""
    host, free = 0, 0
    for before, length, wait in program:
        host += before
        start = max(host, free)
        if trace is not None:
            trace.operator("aten::op", host - before, host + 1)
            trace.launch(host, start, start + length)
        host, free = host + 1, start + length
        if wait and waits:
            back = max(host, free) + 3
            if trace is not None:
                trace.call("cudaStreamSynchronize", host, back)
            host = back
    return free


def test_what_waits_cost_is_what_the_program_saves_without_them() -> None:
    """Each program is run again with the waits left out; the device then ends earlier by what they cost."""
    traces, saved = [], []
    for seed in range(18):
        draw = random.Random(seed)
        host_bound, device_bound = [(20, 5), (5, 20), (12, 12)][seed % 3]
        program = [
            (draw.randrange(1, 2 * host_bound), draw.randrange(1, 2 * device_bound), draw.random() < 0.15)
            for _ in range(60)
        ]
        trace = Trace(pid=4000 + seed, rank=seed)
        end = pipeline(program, trace, waits=True)
        trace.step(0, 0, end)
        traces.append(trace)
        saved.append(end - pipeline(program, None, waits=False))
    sql = """SELECT sum(dur) FILTER (class = 'synchronisation') / 1e3
             FROM accounting GROUP BY file_id ORDER BY file_id"""
    assert [cost or 0 for (cost,) in Analysis(traces).rows(sql)] == saved


def test_queue_depth_and_launch_lag(trace: Trace) -> None:
    trace.step(0, 0, 100)
    for at, start in ((0, 10), (2, 20), (4, 30)):
        trace.launch(at, start, start + 10)
    assert trace.rows("SELECT lag_ns / 1e3 FROM launch_lag ORDER BY launch_ts") == [(10,), (18,), (26,)]
    depth = trace.rows("SELECT (ts - trace_start()) / 1e3, depth FROM queue_depth ORDER BY ts")
    assert depth == [(0, 1), (2, 2), (4, 3), (10, 2), (20, 1), (30, 0)]
