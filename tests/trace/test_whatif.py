"""A changed program's step is predicted from the records of the unchanged one: a machine runs both.

The machine is a host that launches onto streams; nothing of the simulator is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.cli.commands import documented_keys
from tests.report.printing import printed
from tests.trace.kineto import AUTOGRAD, Trace, analysed
from tests.trace.test_diff import run
from tests.trace.test_verdict import RECORDED
from tilewright.hardware.profiles import profile_for
from tilewright.records.errors import StoreError, UsageError
from tilewright.report.whatif import show_whatif
from tilewright.trace.whatif.answer import what_if
from tilewright.trace.whatif.changes import Simulator
from tilewright.trace.whatif.simulation import critical_path
from tilewright.trace.whatif.timeline import read_timeline

CALL, LATENCY, GAP, WAITED = 1_000, 5_000, 1_000, 2_000

TABLES = """
CREATE TABLE step (file_id BIGINT, ts BIGINT, dur BIGINT, host_dur BIGINT);
CREATE TABLE device_call (slice_id BIGINT, file_id BIGINT, ts BIGINT, dur BIGINT, name VARCHAR);
CREATE TABLE wait (slice_id BIGINT);
CREATE TABLE device_slice (slice_id BIGINT, file_id BIGINT, ts BIGINT, dur BIGINT, kind VARCHAR, operator VARCHAR,
    name VARCHAR, upid BIGINT, stream BIGINT, launch_id BIGINT, launch_ts BIGINT);
CREATE TABLE host_collective (slice_id BIGINT, file_id BIGINT, track_id BIGINT, ts BIGINT, dur BIGINT, name VARCHAR);
CREATE TABLE collective (slice_id BIGINT, file_id BIGINT, rank BIGINT, name VARCHAR, in_group VARCHAR,
    position BIGINT, skew_ns DOUBLE);
CREATE TABLE host_time (file_id BIGINT, ts BIGINT, dur BIGINT, class VARCHAR, what VARCHAR, events BIGINT DEFAULT 0,
    utid BIGINT DEFAULT 0, stopped BIGINT DEFAULT 0);
CREATE TABLE host_step_time (file_id BIGINT, ns_per_event DOUBLE);
CREATE TABLE slice (ts BIGINT, dur BIGINT, name VARCHAR, track_id BIGINT DEFAULT 0, category VARCHAR DEFAULT '');
CREATE TABLE thread_track (id BIGINT, utid BIGINT);
CREATE TABLE operator_distance (operator VARCHAR, calls BIGINT, floor_us DOUBLE, device_ns BIGINT);
CREATE TABLE host_account (file_id BIGINT, class VARCHAR, ms_per_step DOUBLE);
CREATE TABLE description (file_id BIGINT, described_by BIGINT);
CREATE TABLE operator_step (file_id BIGINT, ts BIGINT, host_dur BIGINT);
CREATE TABLE bare_step (bare_ms DOUBLE, recorded_ms DOUBLE);
CREATE TABLE recording (recorded_thread_us DOUBLE[])
"""


class Machine:
    """One rank: each method is what its host does next; times are nanoseconds, those given microseconds."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.now = rank, 0
        self.free: dict[int, int] = {}
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in ("call", "wait", "work", "host", "range")}
        self.collectives: list[int] = []
        self.last = rank * 1_000_000

    def host(self, us: float, kind: str = "Python", what: str = "") -> None:
        self.rows["host"].append((self.rank, self.now, round(us * 1000), kind, what))
        self.now += round(us * 1000)

    def call(self) -> tuple[int, int]:
        self.last += 1
        self.rows["call"].append((self.last, self.rank, self.now, CALL, "cudaLaunchKernel"))
        launched, self.now = self.now, self.now + CALL
        return self.last, launched

    def launch(self, *kernels: tuple[str, float], stream: int = 7, after: int = -1) -> None:
        """One launch, of one kernel or of a graph of several; `after` is a stream that it waits for."""
        launch_id, launched = self.call()
        for name, us in kernels:
            start = max(launched + LATENCY, self.free.get(stream, -GAP) + GAP, self.free.get(after, -GAP) + GAP)
            self.work(name, start, us, stream, launch_id, launched, "kernel")

    def work(self, name: str, start: int, us: float, stream: int, launch_id: int, launched: int, kind: str) -> None:
        self.last += 1
        self.free[stream] = start + round(us * 1000)
        row = (start, round(us * 1000), kind, name, name, self.rank, stream, launch_id, launched)
        self.rows["work"].append((self.last, self.rank, *row))

    def copy(self, us: float) -> None:
        """From pageable memory: the call returns when the copy is done, behind the kernels of its stream."""
        launch_id, launched = self.last + 1, self.now
        start = max(launched + LATENCY, self.free.get(7, -GAP) + GAP)
        self.rows["call"].append(
            (launch_id, self.rank, launched, start + round(us * 1000) - launched, "cudaMemcpyAsync")
        )
        self.rows["wait"].append((launch_id,))
        self.last += 1
        self.work("copy", start, us, 7, launch_id, launched, "copy")
        self.now = self.free[7]

    def wait(self) -> None:
        self.last += 1
        done = max(self.now + WAITED, *self.free.values())
        self.rows["call"].append((self.last, self.rank, self.now, done - self.now, "cudaDeviceSynchronize"))
        self.rows["wait"].append((self.last,))
        self.now = done

    @property
    def end(self) -> int:
        return max(self.now, *self.free.values(), 0)


def all_reduce(ranks: list[Machine], us: float) -> None:
    """Each rank launches it, behind its kernels; it takes `us` after the last one has begun."""
    begun = []
    for rank in ranks:
        launch_id, launched = rank.call()
        begun.append((max(launched + LATENCY, rank.free[7] + GAP), launch_id, launched))
    end = max(start for start, _, _ in begun) + round(us * 1000)
    for rank, (start, launch_id, launched) in zip(ranks, begun, strict=True):
        rank.work("all_reduce", start, (end - start) / 1000, 7, launch_id, launched, "communication")
        rank.collectives.append(rank.last)


def recorded(ranks: list[Machine], floor: str = "") -> duckdb.DuckDBPyConnection:
    """What a run would have of them; the floor of the operator `floor` is a tenth of its time."""
    connection = duckdb.connect()
    connection.execute(TABLES)

    def insert(table: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            marks = ", ".join([*("?" * len(rows[0])), *["DEFAULT"] * {"host_time": 3, "slice": 2}.get(table, 0)])
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)

    tables = {"call": "device_call", "wait": "wait", "work": "device_slice", "host": "host_time", "range": "slice"}
    for rank in ranks:
        insert("step", [(rank.rank, 0, rank.end, rank.now)])
        for name, table in tables.items():
            insert(table, rank.rows[name])
        found = [(each, rank.rank, rank.rank, "all_reduce", "", at, 0.0) for at, each in enumerate(rank.collectives)]
        insert("collective", found)
        spent: dict[str, float] = {}
        for _, _, took, kind, _ in rank.rows["host"]:
            spent[kind] = spent.get(kind, 0) + took / 1e6
        insert("host_account", [(rank.rank, kind, ms) for kind, ms in spent.items()])
        took = sum(row[3] for row in rank.rows["work"] if row[5] == floor)
        insert("operator_distance", [(floor, 1, took / 10_000, took)] if took else [])
    return connection


def launches(
    host: float = 20, mm: float = 10, gelu: float = 10, data: float = 0, sync: bool = False, wait: bool = True
) -> Machine:
    machine = Machine()
    for _ in range(4):
        if data:
            machine.host(data, "data")
        for name, us in (("mm", mm), ("gelu", gelu)):
            machine.host(host)
            if us:
                machine.launch((name, us))
        if sync and wait:
            machine.wait()
        elif sync:
            # The call is left, and what it takes where there is nothing to wait for.
            machine.now += WAITED
    return machine


def copying(us: float = 40) -> Machine:
    machine = Machine()
    for _ in range(3):
        machine.host(10)
        if us:
            machine.copy(us)
        machine.host(30)
        machine.launch(("mm", 50))
    return machine


def streams(side: float = 80) -> Machine:
    machine = Machine()
    for _ in range(3):
        machine.host(5)
        machine.launch(("mm", 30))
        machine.host(5)
        machine.launch(("side", side), stream=8)
        machine.host(5)
        machine.launch(("join", 20), after=8)
        machine.wait()
    return machine


def replays(host: float = 200) -> Machine:
    machine = Machine()
    for _ in range(3):
        machine.host(host)
        machine.launch(("mm", 30), ("gelu", 10), ("mm", 30))
        machine.wait()
    return machine


def loading(data: float) -> Machine:
    """Batches that take so long, and 20 µs of other work; two workers make one in half the time."""
    machine = Machine()
    for _ in range(3):
        machine.host(data, "data")
        machine.host(20)
    return machine


def on_host(mm: float = 50, kind: str = "operators") -> Machine:
    machine = Machine()
    for _ in range(3):
        machine.host(mm, kind, "mm")
        machine.host(20)
    return machine


def optimizer(calls: int = 4) -> Machine:
    machine = Machine()
    machine.host(30)
    begun = machine.now
    for number in range(calls):
        machine.host(5, "operators", f"op{number}")
    machine.rows["range"].append((begun, machine.now - begun, "Optimizer.step#SGD.step"))
    machine.host(3)
    return machine


def ranks(late: float = 0, us: float = 40) -> list[Machine]:
    both = [Machine(0), Machine(1)]
    for _ in range(3):
        for machine in both:
            machine.host(10 + (late if machine.rank else 0))
            machine.launch(("mm", 60))
        all_reduce(both, us)
        for machine in both:
            machine.launch(("gelu", 10))
            machine.wait()
    return both


PROGRAMS: dict[str, tuple[str, Callable[[], list[Machine]], Callable[[], list[Machine]]]] = {
    "a host that launches late": ("class:Python", lambda: [launches()], lambda: [launches(host=0)]),
    "a full queue": ("gone:mm", lambda: [launches(host=2, mm=50, gelu=40)], lambda: [launches(2, 0, 40)]),
    "a wait in each step": ("floor:mm", lambda: [launches(sync=True, mm=90)], lambda: [launches(sync=True, mm=9)]),
    "a step that becomes device-bound": ("batch:5", lambda: [launches()], lambda: [launches(mm=42, gelu=42)]),
    "a queue that runs dry": ("batch:0.25", lambda: [launches(20, 62, 62)], lambda: [launches(20, 17, 17)]),
    "two streams": ("floor:side", lambda: [streams()], lambda: [streams(side=8)]),
    "replays of a graph": ("class:Python", lambda: [replays()], lambda: [replays(host=0)]),
    "data": ("class:data", lambda: [launches(data=300)], lambda: [launches()]),
    "no waits": ("class:device", lambda: [launches(sync=True)], lambda: [launches(sync=True, wait=False)]),
    "a function": ("gone:mm", lambda: [on_host(kind="Python")], lambda: [on_host(mm=0)]),
    "several kernels": ("gone:m*,gel*", lambda: [launches()], lambda: [launches(mm=0, gelu=0)]),
    "two workers": ("workers:2", lambda: [loading(90)], lambda: [loading(25)]),
    "eight workers": ("workers:8", lambda: [loading(90)], lambda: [loading(0)]),
    "a copy that waits": ("gone:copy", lambda: [copying()], lambda: [copying(us=0)]),
    "no device": ("gone:mm", lambda: [on_host()], lambda: [on_host(mm=0)]),
    "an optimizer": ("optimizer", lambda: [optimizer()], lambda: [optimizer(calls=1)]),
    "a late rank": ("rank:1", lambda: ranks(late=70), ranks),
    "communication": ("overlap", ranks, lambda: ranks(us=0)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_changed_program_takes_as_long_as_predicted(name: str) -> None:
    change, before, after = PROGRAMS[name]
    machines = before()
    connection = recorded(machines, floor=change.partition(":")[2] if change.startswith("floor") else "")
    timeline = read_timeline(connection)
    simulator = Simulator(connection, timeline)
    # As measured, to the nanosecond.
    assert simulator.measured.ends == [task.end for task in timeline.tasks]
    assert simulator.measured.end == max(machine.end for machine in machines)
    assert simulator.predict(change).predicted_us * 1000 == pytest.approx(max(one.end for one in after()), abs=1)


def test_kernels_of_a_graph_follow_each_other() -> None:
    connection = recorded([launches(host=50)])
    found = Simulator(connection, read_timeline(connection)).predict("graph")
    assert found.predicted_us == pytest.approx(LATENCY / 1e3 + 4 * (10 + 10) + 7 * 0.3)


def test_memory_that_is_returned_is_waited_for() -> None:
    connection = recorded([launches(sync=True, mm=90)])
    connection.execute("UPDATE device_call SET name = 'cudaFree' WHERE name = 'cudaDeviceSynchronize'")
    found = Simulator(connection, read_timeline(connection)).predict("class:allocator")
    assert 1000 * found.predicted_us == pytest.approx(launches(sync=True, wait=False, mm=90).end, abs=1)


def test_copies_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 4 µs, of which 2 for anything; the host launches what comes next meanwhile."""
    monkeypatch.setattr("tilewright.trace.whatif.changes.link_GBps", lambda connection: 10.0)
    connection = recorded([copying(us=40)])
    connection.execute("ALTER TABLE device_slice ADD COLUMN bytes BIGINT")
    connection.execute("UPDATE device_slice SET bytes = 20_000, name = 'Memcpy (Pageable)' WHERE kind = 'copy'")
    after = Machine()
    for _ in range(3):
        after.host(10)
        after.launch(("copy", 4))
        after.host(30)
        after.launch(("mm", 50))
    found = Simulator(connection, read_timeline(connection)).predict("pinned")
    assert 1000 * found.predicted_us == pytest.approx(after.end, rel=0.03)
    connection.execute("UPDATE device_slice SET name = 'Memcpy (Pinned)' WHERE kind = 'copy'")
    with pytest.raises(UsageError, match="no copy from or to pageable memory"):
        Simulator(connection, read_timeline(connection)).predict("pinned")


def test_the_host_takes_what_makes_the_step_the_bare_one() -> None:
    connection = recorded([launches(host=28)])
    simulator = Simulator(connection, read_timeline(connection), launches(host=20).end / 1e3)
    expected = launches(host=20, mm=42, gelu=42).end
    assert 1000 * simulator.predict("batch:5").predicted_us == pytest.approx(expected, rel=0.02)


def test_where_a_device_says_how_long_a_step_is_the_host_takes_its_threads_time() -> None:
    """It waits for the device's queue, and has no processor then."""
    waiting = launches(host=40, mm=3000, gelu=3000)
    connection = recorded([waiting])
    connection.execute("INSERT INTO recording VALUES (?)", [[4 * 2 * (20 + CALL / 1e3)]])
    simulator = Simulator(connection, read_timeline(connection), waiting.end / 1e3)
    assert 1000 * simulator.predict("batch:0.001").predicted_us == pytest.approx(launches(20, 5, 5).end, rel=0.05)


@pytest.mark.parametrize("same", [True, False])
def test_light_steps_have_the_host_of_the_described_one(same: bool) -> None:
    """The described step is twice as slow, and of its host's time three quarters load data."""

    def steps(count: int, slow: int, data: float = 15) -> Machine:
        machine = Machine(slow - 1)
        for step in range(count):
            for part in range(3 if slow == 1 or same or step else 2):
                machine.host(slow * data, "data" if slow == 2 else "untraced")
                machine.host(slow * 5)
                machine.launch((f"kernel {part}", 2))
        return machine

    light, told = steps(2, 1), steps(1, 2)
    connection = recorded([light, told])
    connection.execute("DELETE FROM host_time WHERE file_id = 0")
    connection.execute("INSERT INTO operator_step SELECT file_id, ts, host_dur FROM step WHERE file_id = 1")
    connection.execute("DELETE FROM step WHERE file_id = 1")
    connection.execute("DELETE FROM device_slice WHERE file_id = 1")
    connection.execute("INSERT INTO description VALUES (0, 1)")
    connection.execute("UPDATE step SET dur = dur / 2, host_dur = host_dur / 2")
    connection.execute("INSERT INTO step SELECT file_id, dur, dur, host_dur FROM step")
    simulator = Simulator(connection, read_timeline(connection))
    # Of two steps the mean.
    assert 2000 * simulator.predict("class:data").predicted_us == pytest.approx(steps(2, 1, data=0).end, abs=2)


def test_what_recording_adds_to_the_host_is_not_predicted_to_stay() -> None:
    """Of 100 µs without the profiler 60 load data; the recording of 20 events adds 2 µs each to the others."""
    machine = Machine()
    machine.host(60, "data")
    machine.host(80, "operators", "mm")
    connection = recorded([machine])
    connection.execute("UPDATE host_time SET events = 20 WHERE what = 'mm'")
    connection.execute("INSERT INTO host_step_time VALUES (0, 2000)")
    connection.execute("INSERT INTO bare_step VALUES (0.1, 0.14)")
    assert Simulator(connection, read_timeline(connection)).predict("class:data").predicted_us == pytest.approx(40)


@pytest.mark.parametrize(("late_us", "faster_us"), [(0, 0), (400, 0), (0, 200)])
def test_ranks_without_a_device(late_us: int, faster_us: int) -> None:
    """Steps of 90 µs of work, a collective of 500 µs after the last rank, and the rest; rank 1 works longer.

    Without the profiler all is as long but the collective, where it is faster then."""
    traces = []
    for rank in (0, 1):
        trace = Trace(4000 + rank, rank)
        trace.frame("train.py(1): main", 0, 4000)
        for number, at in enumerate(range(0, 4000, 1000)):
            begin, end = at + 90 + rank * late_us, at + 590 + late_us
            trace.step(number, at, at + 1000)
            trace.operator("aten::mm", at, begin - 1)
            trace.frame("<built-in method wait of pybind11_builtins.x object at 0x7f>", begin, end)
            trace.slice("user_annotation", "gloo:all_reduce", begin + 1, end, AUTOGRAD)
        traces.append(trace)
    schema = files("tilewright.trace").joinpath("schema.sql").read_text("utf-8")
    bare = RECORDED.replace("1e3 AS bare_us", f"{1000 - faster_us}.0 AS bare_us, [300.0] AS recorded_thread_us")
    known = [schema, bare, bare.replace("0 AS file_id", "1 AS file_id")] if faster_us else []
    connection = analysed(traces, *known)
    simulator = Simulator(connection, read_timeline(connection))
    rest = 1000 - 590 - late_us
    expected = {
        "rank:1": 90 + 500 - faster_us + rest,
        "overlap": 90 + late_us + rest,
        "class:communication": 90 + late_us + rest,
    }
    for asked, us in expected.items():
        assert simulator.predict(asked).predicted_us == pytest.approx(us, abs=4), asked


def test_ranks_whose_recordings_begin_apart() -> None:
    """Rank 0 is recorded 200 µs earlier and waits for rank 1, which is never late afterwards."""
    traces = []
    for rank, early in ((0, 200), (1, 0)):
        trace = Trace(4000 + rank, rank)
        trace.frame("train.py(1): main", 0, 2400)
        for number in range(2):
            at = 400 + 1000 * number - (early if number == 0 else 0)
            begin, end = at + 500, 1400 + 1000 * number
            trace.step(number, at, 1400 + 1000 * number)
            trace.operator("aten::mm", at, begin - 1)
            trace.frame("<built-in method wait of pybind11_builtins.x object at 0x7f>", begin, end)
            trace.slice("user_annotation", "gloo:all_reduce", begin + 1, end, AUTOGRAD)
        traces.append(trace)
    connection = analysed(traces)
    timeline = read_timeline(connection)
    assert len({*timeline.begins.values()}) == 1
    simulator = Simulator(connection, timeline)
    assert simulator.predict("rank:1").gain == pytest.approx(0, abs=0.01)


def path_of(machines: list[Machine]) -> dict[str, float]:
    """Microseconds of the critical path by kind, which has no holes."""
    connection = recorded(machines)
    timeline = read_timeline(connection)
    parts = critical_path(timeline.tasks, timeline.begin, Simulator(connection, timeline).measured)
    assert [part.start for part in parts] == [timeline.begin, *(part.end for part in parts[:-1])]
    found: dict[str, float] = {}
    for part in parts:
        found[part.kind] = found.get(part.kind, 0) + (part.end - part.start) / 1000
    return found


def test_the_critical_path() -> None:
    # A full queue: the first launch, then kernels and the gaps between them.
    assert path_of([launches(host=2, mm=50, gelu=40)]) == {"host": 2, "latency": 5 + 7, "kernel": 4 * 90}
    # A host that launches late: only the last kernel is on the path.
    assert path_of([launches()]) == {"host": 8 * 20, "launch": 7, "latency": 5, "kernel": 10}
    # A wait in each step: host, launch, latency and the kernels.
    found = path_of([launches(sync=True, mm=90)])
    assert found["kernel"] == 4 * 100 and found["host"] == 4 * 20
    # The late rank's host, then the collective that all wait for.
    late = path_of(ranks(late=70))
    assert late["communication"] == 3 * 40 and late["host"] == 3 * 80


@pytest.mark.usefixtures("home")
def test_a_run(trace: Trace, tmp_path: Path) -> None:
    for at in (0, 100):
        trace.step(at // 100, at, at + 100)
        trace.operator("aten::mm", at + 10, at + 40)
        trace.launch(at + 20, at + 30, at + 60)
    made = run(trace, tmp_path)
    answer = what_if(made, [])
    by_change = {each.change: each for each in answer.predictions}
    assert by_change["host"].predicted_us < by_change["host"].measured_us == 100
    assert sum(part.us_per_step for part in answer.path) == pytest.approx(100)
    # What --json prints.
    document = asdict(answer)
    assert document.keys() == documented_keys("whatif")
    for name in ("predictions", "path"):
        assert all(row.keys() == documented_keys(f"a row of `{name}`") for row in document[name])
    text = printed(show_whatif(answer))
    assert "graph" in text and "critical path" in text
    with duckdb.connect(str(made), read_only=True) as connection:
        assert connection.execute("SELECT sum(dur) FROM critical_path").fetchall() == [(200_000,)]
        stored = dict(connection.execute("SELECT change, predicted_us FROM prediction").fetchall())
    assert stored == pytest.approx({each.change: each.predicted_us for each in answer.predictions})
    for asked in ("floor:aten::gone", "gone:nothing", "batch:-1", "batch", "rank:3", "class:x", "host:1", "other"):
        with pytest.raises(UsageError):
            what_if(made, [asked])
    with pytest.raises(StoreError, match="no steps"):
        what_if(run(Trace(), tmp_path), [])


@pytest.mark.usefixtures("home")
def test_bf16_halves_the_bytes_and_has_its_own_rate_of_products(trace: Trace, tmp_path: Path) -> None:
    trace.step(0, 0, 1000)
    width = 4096
    for at, name, dims in ((10, "aten::add", [[64 << 20]] * 2), (30, "aten::mm", [[width, width]] * 2)):
        trace.operator(name, at, at + 10, dims=[*dims, []] if name == "aten::add" else dims)
        trace.launch(at + 5, *((50, 250) if name == "aten::add" else (250, 850)))
    trace.call("cudaDeviceSynchronize", 100, 860)
    h200 = profile_for("h200")
    products = max(h200.matmul_TFLOPs["float32"] / h200.matmul_TFLOPs["bfloat16"], 0)
    (told,) = what_if(run(trace, tmp_path), ["bf16"]).predictions
    # 2 µs of a kernel stay.
    assert told.measured_us - told.predicted_us == pytest.approx(198 / 2 + 598 * (1 - products), abs=2)


@pytest.mark.usefixtures("home")
def test_an_optimizers_update_goes_and_not_what_is_around_it(trace: Trace, tmp_path: Path) -> None:
    """Of 100 µs 40 make eight calls of two operators; the list of the parameters is made all the same."""
    trace.step(0, 0, 100)
    trace.slice("user_annotation", "Optimizer.step#Adam.step", 10, 80)
    trace.frame("torch/optim/adam.py(90): _init_group", 10, 40)
    trace.frame("torch/optim/adam.py(400): _single_tensor_adam", 40, 80)
    for call in range(8):
        trace.operator(("aten::lerp_", "aten::addcmul_")[call % 2], 40 + 5 * call, 45 + 5 * call)
    (told,) = what_if(run(trace, tmp_path), ["optimizer"]).predictions
    assert told.predicted_us == pytest.approx(100 - 40 / 2)


@pytest.mark.usefixtures("home")
def test_an_update_of_large_tensors_reads_and_writes_them_all_the_same(trace: Trace, tmp_path: Path) -> None:
    """Of 1000 µs 900 update a weight and a bias by SGD with momentum: mul_ and twice add_ move eight arrays, one call
    five."""
    trace.step(0, 0, 1000)
    trace.slice("user_annotation", "Optimizer.step#SGD.step", 50, 960)
    for at, name in ((50, "mul_"), (350, "add_"), (650, "add_")):
        trace.operator(f"aten::{name}", at, at + 298)
        trace.operator(f"aten::{name}", at + 298, at + 300)
    (told,) = what_if(run(trace, tmp_path), ["optimizer"]).predictions
    assert told.predicted_us == pytest.approx(1000 - 900 * (1 - 5 / 8), rel=0.03)


@pytest.mark.usefixtures("home")
def test_a_larger_batch_has_no_larger_update(trace: Trace, tmp_path: Path) -> None:
    """Of 100 µs an operator takes 30 and the optimizer's step 40."""
    trace.step(0, 0, 100)
    trace.operator("aten::mm", 10, 40)
    trace.slice("user_annotation", "Optimizer.step#AdamW.step", 50, 90)
    trace.operator("aten::_fused_adamw_", 50, 90)
    (told,) = what_if(run(trace, tmp_path), ["batch:3"]).predictions
    assert told.predicted_us == pytest.approx(100 + 2 * 30)


@pytest.mark.usefixtures("home")
def test_an_operator_goes_with_what_it_calls_on_a_host(trace: Trace, tmp_path: Path) -> None:
    """Of 100 µs 60 are in linear, which calls addmm for 40, and calls itself; a second addmm stays."""
    trace.step(0, 0, 100)
    trace.operator("aten::linear", 10, 70)
    trace.operator("aten::linear", 12, 18)
    trace.operator("aten::addmm", 20, 60)
    trace.operator("aten::addmm", 80, 90)
    made = run(trace, tmp_path)
    predicted = {
        asked: what_if(made, [asked]).predictions[0].predicted_us for asked in ("gone:aten::linear", "gone:*addmm")
    }
    assert predicted == pytest.approx({"gone:aten::linear": 40, "gone:*addmm": 50})
