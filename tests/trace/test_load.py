"""Every event of a trace is a row where it belongs, or a reject with its reason; the two readers agree."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import synthetic_trace
from tests import processes
from tests.trace.kineto import analysed
from tests.trace.loading import accounted, complete, loaded, loaded_events, rows, written
from tilewright.records.errors import TraceError
from tilewright.store import runs_dir
from tilewright.trace import load_traces, trace_run
from tilewright.trace.formats import exact, typed

FIXTURES = Path(__file__).parent / "fixtures"
RECORDED = ("block_*.json.gz", "ddp_*.json.gz", "softmax*.json.gz", "syncs.json.gz", "eager_step.json.gz")
TRACES = sorted(path for pattern in (*RECORDED, "phases.json") for path in FIXTURES.glob(pattern))
ARROWS = """SELECT a.name, b.name, trace_id, flow.category
            FROM flow JOIN slice a ON a.id = slice_out JOIN slice b ON b.id = slice_in ORDER BY a.ts, b.ts"""
TABLES = ("process", "thread", "track", "thread_track", "process_track", "counter_track", "slice", "overlap", "flow")
TABLES += ("arg_set", "counter", "metadata", "reject", "trace_file")
SETTINGS = ("memory_limit", "threads", "preserve_insertion_order", "pandas_analyze_sample")
Reader = Callable[[], AbstractContextManager[None]]
IN_A_THREAD = {"pid": 1, "tid": 1}


@contextmanager
def in_haste() -> Iterator[None]:
    """Only the reader for files without a flaw; what it leaves to the other is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "stage", None)
        yield


@contextmanager
def patiently() -> Iterator[None]:
    """Only the reader that goes event by event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed, "stage", lambda *_: False)
        yield


def content(connection: duckdb.DuckDBPyConnection) -> dict[str, list[tuple[object, ...]]]:
    found = {table: rows(connection, f"FROM {table}") for table in TABLES}
    return {table: sorted(map(_comparable, lines)) for table, lines in found.items()}


def _comparable(row: tuple[object, ...]) -> tuple[str, ...]:
    """JSON by its value: the two readers write it with different blanks."""
    return tuple(
        repr(json.loads(cell)) if isinstance(cell, str) and cell.startswith("{") else repr(cell) for cell in row
    )


def loaded_both_ways(path: Path, events: int, reader: Reader = nullcontext) -> duckdb.DuckDBPyConnection:
    """The file's content, which has a place for each of its events, whichever reader takes it."""
    with reader():
        fast, (file,) = loaded(path)
    assert file.events == events == accounted(file)
    for table, count in (("slice", file.slices), ("reject", file.rejects)):
        assert rows(fast, f"SELECT count(*) FROM {table}") == [(count,)]
    with patiently():
        slow, _ = loaded(path)
    assert content(fast) == content(slow)
    return fast


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_nothing_of_a_recording_is_lost(path: Path) -> None:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(raw)["traceEvents"]
    connection = loaded_both_ways(path, len(events), in_haste)
    durations = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            durations[event["name"]].append(event["dur"])
    for name, total, count in rows(connection, "SELECT name, sum(dur) / 1e3, count(*) FROM slice GROUP BY name"):
        if len(durations[name]) == count:
            assert total == pytest.approx(sum(durations[name]), abs=2e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 61])
def test_patience_at_any_border(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However the pieces that it reads are cut."""
    path = tmp_path / "t.json"
    odd = '{"ph":"X","name":"é\\u00e9","pid":-1,"tid":1,"ts":-1.5e-3,"dur":2E+1,"args":{"a":[true,null,-0.25,1e5]}}'
    path.write_text('{ "a": [1.5, {}], "traceEvents" : [' + ", ".join([odd] * 5) + '] , "b": -1.25 }')
    with patiently():
        expected, _ = loaded(path)
        monkeypatch.setattr("tilewright.trace.formats.source.PIECE", size)
        connection, (file,) = loaded(path)
    assert content(connection) == content(expected)
    assert rows(connection, "SELECT DISTINCT name, ts, dur FROM slice") == [("éé", -2, 20000)]
    assert file.note is None and file.slices == 5


@pytest.mark.parametrize("since_1970", [False, True])
def test_synthetic(tmp_path: Path, since_1970: bool) -> None:
    path = tmp_path / "rank3.json"
    counts = synthetic_trace.write(path, 2, rank=3, world=4, since_1970=since_1970)
    with in_haste():
        connection, (file,) = loaded(path)
    assert (file.rank, file.world_size, file.note) == (3, 4, None)
    assert file.events == sum(counts.values()) == accounted(file)
    assert file.slices == counts["X"] + counts["i"]
    assert file.flow_points == counts["s"] + counts["f"]
    assert file.rejects == 0
    assert rows(connection, "SELECT count(*) FROM overlap") == [(0,)]
    lags = rows(
        connection,
        "SELECT min(k.ts - launch.ts) > 0, count(*) FROM flow JOIN slice launch ON launch.id = slice_out "
        "JOIN slice k ON k.id = slice_in WHERE k.category = 'kernel' AND launch.name = 'cudaLaunchKernel'",
    )
    assert lags == [(True, counts["i"])]


EVENT = st.fixed_dictionaries(
    {
        "ph": st.sampled_from("XXXXBEEiCsftbneM"),
        "name": st.sampled_from(["a", "b", "process_name"]),
        "pid": st.sampled_from([1, "1", "Spans", 0]),
        "tid": st.sampled_from([1, 2, "t"]),
        "ts": st.decimals(-5, 9, places=3).map(float),
        "dur": st.decimals(0, 6, places=3).map(float),
    },
    optional={
        "cat": st.sampled_from(["x", "y"]),
        "id": st.sampled_from([1, 2, "0x1"]),
        "bp": st.just("e"),
        "s": st.sampled_from("tpg"),
        "args": st.dictionaries(
            st.sampled_from(["name", "value", "a b", 'q"']),
            st.one_of(st.integers(-9, 9), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=2)),
            max_size=2,
        ),
    },
)
HARDLY_ANY, MANY = {"max_size": 6}, {"min_size": 20, "max_size": 60}


@settings(deadline=None, max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.lists(EVENT, **HARDLY_ANY), st.lists(EVENT, **MANY)))
def test_any_mixture_is_accounted_for(tmp_path: Path, events: list[dict[str, object]]) -> None:
    path = written(tmp_path / "mixture.json", events)
    fast = loaded_both_ways(path, len(events))
    starts = sum(event["ph"] in "XBib" or event["ph"] == "n" for event in events)
    assert rows(fast, "SELECT count(*) FROM slice") == [(starts,)]


NUMBERS = "0 -0.0 0.0005 2.5e0 1E3 1.5 9007199254740993 1e300 -1e18 4611686018427388 18446744073709551616"
OTHERS = r'null true "7" "NaN" "0x1" "" "\ud83d" "}],[" [] {} {"a":[[null]]}'
PHASES = '"X" "B" "E" "i" "s" "f" "C" "M" "b" "e"'
KEYS = "ph name cat pid tid ts dur id id2 scope bp s args"
USUAL = (("ph", '"X"'), ("ts", "1"), ("dur", "1"))
VALUE = st.sampled_from([*NUMBERS.split(), *OTHERS.split(), *PHASES.split()])
# The one thing that the readers take differently: docs/trace.md says so.
TRUE_TIMES = (("ts", "true"), ("dur", "true"))
FIELD = st.tuples(st.sampled_from(KEYS.split()), VALUE).filter(lambda field: field not in TRUE_TIMES)
FIELDS = st.lists(FIELD, max_size=9)
SPELLED = FIELDS.map(lambda fields: "{" + " ,\n".join(f'"{key}":{value}' for key, value in (*USUAL, *fields)) + "}")
SPELLED_OR_NOT = st.one_of(SPELLED, VALUE)


@settings(deadline=None, max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.lists(SPELLED_OR_NOT, **HARDLY_ANY), st.lists(SPELLED_OR_NOT, **MANY)))
def test_any_spelling_is_accounted_for(tmp_path: Path, events: list[str]) -> None:
    """Keys twice, values of any kind, elements that are no events; one is, or the file is refused."""
    events = [*events, '{"ph":"i","name":"a","pid":1,"tid":1,"ts":1}']
    path = tmp_path / "spelled.json"
    path.write_text('{"traceEvents": [' + ",".join(events) + "]}")
    loaded_both_ways(path, len(events))


def test_nanoseconds_survive(tmp_path: Path) -> None:
    """Times of days since a base, times since 1970, and times as text are exact with either reader."""
    times = ["4414639470543.834", "1732200000000000.123", "0.001", "-7.999", "4503599627370497", '"12.345"', "0.0005"]
    events = ",".join(
        f'{{"ph":"X","name":"{at}","pid":1,"tid":{at},"ts":{ts},"dur":0.007}}' for at, ts in enumerate(times)
    )
    path = tmp_path / "times.json"
    path.write_text(f"[{events}]")
    connection, _ = loaded(path)
    expected = [round(float(ts.strip('"')) * 1000) for ts in times]
    expected[:2] = [4414639470543834, 1732200000000000123]
    expected[4] = 4503599627370497000
    expected[6] = 1
    assert rows(connection, "SELECT ts FROM slice ORDER BY name") == [(ts,) for ts in expected]
    assert rows(connection, "SELECT DISTINCT dur FROM slice") == [(7,)]


EARLIER = {"cpu_op": "Operator", "kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}
EARLIER |= {"cuda_runtime": "Runtime", "fwdbwd": "forward_backward", "ac2g": "async"}


def as_written_until_2022(event: dict[str, Any]) -> dict[str, Any]:
    """The event in Kineto's earlier spelling; an arrow from a launch has the name `launch` there."""
    category = event.get("cat")
    args = {key.replace("Input Dims", "Input dims"): value for key, value in event.get("args", {}).items()}
    if str(event["name"]).startswith("ProfilerStep#") and category == "user_annotation":
        category = "Operator"
    name = "launch" if category == "ac2g" else event["name"]
    return event | {"cat": EARLIER.get(category, category), "name": name} | ({"args": args} if args else {})


@pytest.mark.parametrize(("name", "reader"), [("block_eager", nullcontext), ("syncs", patiently)])
def test_kineto_with_capitalised_categories(name: str, reader: Reader, tmp_path: Path) -> None:
    """The same tables as the same trace in today's spelling, the analysis included."""
    document = json.loads(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()))
    events = [event | ({"name": "launch"} if event.get("cat") == "ac2g" else {}) for event in document["traceEvents"]]
    trace = tmp_path / "trace.json"
    header = {key.replace("deviceProperties", "computeProperties"): value for key, value in document.items()}
    with reader():
        expected = analysed([written(trace, events, **document)])
        found = analysed([written(trace, map(as_written_until_2022, events), **header)])
    # The files differ in length.
    assert content(found) | {"trace_file": []} == content(expected) | {"trace_file": []}
    for table in ("device_slice", "step", "wait", "device_time", "operator_time", "operator_distance"):
        assert rows(found, f"FROM {table} ORDER BY ALL") == rows(expected, f"FROM {table} ORDER BY ALL")
        assert rows(found, f"FROM {table} LIMIT 1")


SINCE_1970 = {
    "whole": ["1732200000000001", "1732200000000002"],
    "with fractions": ["1732200000000000.123", "1732200000000000.124", "1732200000012345.999", "1732200000000007"],
    "into the next era": ["1732999999999999.999", "1733000000000000.001", "1732999999999998"],
    "from the era before": ["1733000000000000.001", "1732999999999999.999"],
    "quoted": ['"1732200000000000.123"', '"1732200000000000.124"'],
    "with exponents": ["1732200000.000000123e6", "17322000000000.01e2"],
    "a fortnight": ["1732200000000000.123", "1733500000000000.001"],
    "other digits": ["1732200000000000.123", "17322", "1732.5", "17322000000001.25"],
    "from other zeros": ["1732200000000000.123", "5.001"],
}
NAMED = '{"ph":"M","name":"process_name","ts":0,"pid":1,"args":{"name":"python"}}'
SLOW = ("with exponents", "a fortnight", "other digits", "from other zeros")


@pytest.mark.parametrize("kind", SINCE_1970)
@pytest.mark.parametrize("layout", ['"ts": {}', '"ts":{}', '"ts"\n : {}'])
def test_times_since_1970(tmp_path: Path, kind: str, layout: str) -> None:
    """Exact to the nanosecond; by the fast reader where a file's times lie within days of each other."""
    events = [
        f'{{"ph":"X","name":"{at}",{layout.format(ts)},"dur":0.007,"pid":1,"tid":{at},"args":{{"n":1732}}}}'
        for at, ts in enumerate(SINCE_1970[kind])
    ]
    path = tmp_path / "times.json"
    path.write_text(f"[{NAMED},{','.join(events)}]")
    with nullcontext() if kind in SLOW else in_haste():
        connection, _ = loaded(path)
    expected = [int(Decimal(ts.strip('"')) * 1000) for ts in SINCE_1970[kind]]
    assert rows(connection, "SELECT ts, dur FROM slice ORDER BY name") == [(ts, 7) for ts in expected]


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_arguments_keep_their_times(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text like an event's time within arguments or names is unchanged, wherever the file is cut."""
    monkeypatch.setattr(typed, "_COPIED", piece)
    time = "1732200000000000.125"
    for inner in (
        f'{{"ts": {time}}}',
        f'{{"~s": {time}}}',
        f'{{"a": [{{"ts": {time}, "b": 1}}]}}',
        f'{{"a": "\\"ts\\": {time}"}}',
    ):
        path = tmp_path / "arguments.json"
        path.write_text(f'[{{"ph":"X","name":"a","ts": {time},"dur":1,"pid":1,"tid":1,"args":{inner}}}]')
        connection, _ = loaded(path)
        ((ts, args),) = rows(connection, "SELECT ts, args::VARCHAR FROM slice JOIN arg_set USING (arg_set_id)")
        assert ts == 1732200000000000125 and json.loads(str(args)) == json.loads(inner)


def test_begins_and_ends() -> None:
    def point(phase: str, ts: float, **more: object) -> dict[str, object]:
        return {"ph": phase, "ts": ts, **IN_A_THREAD, **more}

    events = [
        point("E", 9, name="outer", args={"late": 1}),
        point("B", 0, name="outer", args={"early": 2}),
        point("B", 1, name="inner"),
        point("E", 3),
        point("B", 5, name="never ends"),
        point("E", 20, name="nobody"),
    ]
    connection, file = loaded_events(events)
    assert rows(connection, "SELECT name, ts, dur, depth FROM slice ORDER BY ts") == [
        ("outer", 0, 9000, 0),
        ("inner", 1000, 2000, 1),
        ("never ends", 5000, -1, 0),
    ]
    assert rows(connection, "SELECT key, int_value FROM args ORDER BY key") == [("args.early", 2), ("args.late", 1)]
    assert rows(connection, "SELECT reason FROM reject") == [("an end without a begin",)]
    assert rows(connection, "SELECT name FROM overlap JOIN slice ON slice.id = overlap.slice_id") == [("never ends",)]
    assert file.paired == 2


def test_one_launch_of_many_kernels() -> None:
    """A replayed CUDA graph: one start, an end at every kernel; and a device clock that runs behind the host's."""
    flow = {"cat": "ac2g", "name": "ac2g", "id": 7}
    events = [
        complete("cudaGraphLaunch", 10, 5),
        {"ph": "s", "ts": 10, **flow, **IN_A_THREAD},
        *(complete(f"k{at}", 8 + 3 * at, 2, tid=7, pid=0) for at in range(3)),
        *({"ph": "f", "bp": "e", "ts": 8 + 3 * at, "pid": 0, "tid": 7, **flow} for at in range(3)),
        {"ph": "s", "ts": 12, **flow, "id": 8, **IN_A_THREAD},
        {"ph": "f", "bp": "e", "ts": 100, **flow, "id": 9, **IN_A_THREAD},
    ]
    connection, file = loaded_events(events)
    assert rows(connection, ARROWS) == [("cudaGraphLaunch", f"k{at}", "7", "ac2g") for at in range(3)]
    assert rows(connection, "SELECT reason FROM reject ORDER BY reason") == [
        ("a flow event where no slice is",),
        ("a flow event whose other end is missing",),
    ]
    assert file.flow_points == 4
    assert file.note == "1 arrows go back in time, by up to 2.000 µs: their clocks disagree"


def test_a_flow_id_used_again() -> None:
    flow = {"cat": "c", "name": "n", "id": 1, **IN_A_THREAD}
    events = [complete(name, ts, 1) for name, ts in (("a", 0), ("b", 2), ("c", 4), ("d", 6))]
    events += [{"ph": phase, "bp": "e", "ts": ts, **flow} for phase, ts in (("s", 0), ("f", 2), ("s", 4), ("f", 6))]
    connection, _ = loaded_events(events)
    assert rows(connection, ARROWS) == [("a", "b", "1", "c"), ("c", "d", "1", "c")]


def test_ranks_share_a_run(tmp_path: Path) -> None:
    """Ids stay apart, and all times count from the first file's zero."""
    for rank, base in ((0, 1_000_000_000), (1, 1_000_005_000)):
        synthetic_trace.write(tmp_path / f"r{rank}.json", 0.01, rank=rank, world=2)
        text = (tmp_path / f"r{rank}.json").read_text()
        (tmp_path / f"r{rank}.json").write_text(text.replace(str(synthetic_trace._BASE_NS), str(base)))
    packed = tmp_path / "r1.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "r1.json").read_bytes()))
    connection, files = loaded(tmp_path / "r0.json", packed)
    assert [(file.rank, file.shift_ns) for file in files] == [(0, 0), (1, 5000)]
    alone, _ = loaded(packed)
    assert rows(connection, "SELECT count(*), count(DISTINCT id) FROM slice") == [(sum(f.slices for f in files),) * 2]
    assert rows(connection, "SELECT count(DISTINCT upid), count(DISTINCT file_id) FROM process") == [(4, 2)]
    mine = "FROM slice JOIN thread_track t ON t.id = track_id JOIN thread USING (utid) JOIN process USING (upid)"
    assert rows(connection, f"SELECT min(ts) - 5000 {mine} WHERE file_id = 1") == rows(alone, f"SELECT min(ts) {mine}")
    strangers = "FROM slice c JOIN slice p ON c.parent_id = p.id WHERE c.track_id <> p.track_id"
    assert rows(connection, f"SELECT count(*) {strangers}") == [(0,)]


@pytest.mark.usefixtures("home")
def test_a_failed_load_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"traceEvents": [{"ph": "X"}, oops]}')
    with pytest.raises(TraceError, match="not a trace"):
        trace_run([FIXTURES / "phases.json", broken], command="c", tell=lambda _: None)
    assert list(runs_dir().iterdir()) == []


def test_settings_are_left_as_they_were(tmp_path: Path) -> None:
    connection = duckdb.connect()
    connection.execute("SET memory_limit = '3 GiB'; SET threads = 3; SET preserve_insertion_order = false")
    settings = "SELECT " + ", ".join(f"current_setting('{name}')" for name in SETTINGS)
    before = rows(connection, settings)
    with pytest.raises(TraceError):
        load_traces([tmp_path / "missing.json"], connection)
    load_traces([FIXTURES / "phases.json"], connection)
    assert rows(connection, settings) == before
    assert rows(connection, "SELECT table_name FROM duckdb_tables() WHERE temporary") == []


def test_neither_a_trace_nor_a_question_nor_a_page_needs_torch(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["sympy"] = None
from tilewright.cli import main
for words in (["trace", sys.argv[1]], ["report"], ["sql", "SELECT count(*) FROM slice"]):
    sys.argv = ["tilewright", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    print("----")
"""
    arguments = ["-c", code, str(FIXTURES / "phases.json")]
    printed, errors = processes.run(arguments, env={"TILEWRIGHT_HOME": str(tmp_path)})
    _, page, table, _ = printed.split("----\n")
    assert page.startswith("page  ") and "26" in table and errors == ""


def test_perfettos_own_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    path.write_bytes(b"\n\x02\x08\x01")
    with pytest.raises(TraceError, match="traceconv json"):
        loaded(path)
