"""Perfetto's own format: nothing lost, hostile files, and the same rows as the same events in Chrome's JSON.

Its answers to queries are compared with the engine's in test_perfetto.py.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import zlib
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.loading import accounted, complete, loaded, rows, written
from tilewright.records.errors import TraceError
from tilewright.trace import load_traces

pytest.importorskip("perfetto", reason="Perfetto's own format takes the package perfetto")

from tests.trace.track_events import BEGIN, COUNTER, END, INSTANT, Trace

FIXTURE = Path(__file__).parent / "fixtures" / "track_events.pftrace"
PROCESS, THREADS = 1, (2, 3)
SHARED = duckdb.connect()


def threads(trace: Trace) -> None:
    trace.track(PROCESS, process={"pid": 7, "process_name": "p"})
    for uuid in THREADS:
        trace.track(uuid, PROCESS, thread={"pid": 7, "tid": uuid, "thread_name": "t"})


def test_nothing_is_lost() -> None:
    connection, (file,) = loaded(FIXTURE)
    assert file.format == "perfetto" and file.base_ns == 1_790_000_000_000_000_000
    assert accounted(file) == file.events
    assert [reason for (reason,) in rows(connection, "SELECT reason FROM reject ORDER BY reason")] == [
        "an end without a begin",
        "clock 99, which no snapshot joins to the others",
        "packets before it were lost, and with them its names",
        "packets of ftrace_events are not read",
    ]


def test_packed_is_the_same(tmp_path: Path) -> None:
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(FIXTURE.read_bytes()))
    everything = "SELECT * EXCLUDE (arg_set_id) FROM slice ORDER BY id"
    assert rows(loaded(packed)[0], everything) == rows(loaded(FIXTURE)[0], everything)


def test_a_trace_of_a_rank_beside_it(tmp_path: Path) -> None:
    """Both say when their clocks began, so that they stand on one: 5 µs after the first event there."""
    base = 1_790_000_000_000_000_000
    kineto = written(tmp_path / "kineto.json", [complete("k", 1015.0, 1)], baseTimeNanoseconds=base)
    connection, _ = loaded(FIXTURE, kineto)
    assert rows(connection, "SELECT ts - trace_start() FROM slice WHERE name = 'k'") == [(14_990,)]


def test_a_thread_that_is_described_after_its_events(tmp_path: Path) -> None:
    trace = Trace()
    trace.event(10, BEGIN, 2, "early")
    trace.event(20, END, 2)
    trace.event(15, COUNTER, 9, counter_value=4)
    threads(trace)
    trace.track(9, PROCESS, name="level", counter={})
    connection, (file,) = loaded(trace.write(tmp_path / "t.pftrace"))
    assert accounted(file) == file.events and file.rejects == 0
    assert rows(connection, "SELECT name, dur, tid, pid FROM thread_slice") == [("early", 10, 2, 7)]
    counters = "counter JOIN counter_track AS t ON t.id = track_id JOIN process USING (upid)"
    assert rows(connection, f"SELECT t.name, value, pid FROM {counters}") == [("level", 4.0, 7)]


def test_arrows_go_forward_in_time(tmp_path: Path) -> None:
    """Writers hand over their packets when it suits them; and an id may be used again once its flow has ended."""
    trace = Trace()
    threads(trace)
    for ts, name, more in (
        *((50, "e", {"terminating_flow_ids": [5]}), (20, "b", {"flow_ids": [5]}), (10, "a", {"flow_ids": [5]})),
        *((30, "c", {"terminating_flow_ids": [5]}), (40, "d", {"flow_ids": [5]}), (60, "f", {"flow_ids": [6]})),
    ):
        trace.event(ts, INSTANT, THREADS[ts % 20 // 10], name, **more)
    connection, (file,) = loaded(trace.write(tmp_path / "t.pftrace"))
    assert accounted(file) == file.events and file.note is None
    arrows = "SELECT a.name, b.name FROM flow JOIN slice a ON a.id = slice_out JOIN slice b ON b.id = slice_in"
    assert sorted(rows(connection, arrows)) == [("a", "b"), ("b", "c"), ("d", "e")]
    # Of the sixth nobody knows where it led.
    assert rows(connection, "SELECT reason FROM reject") == [("a flow event whose other end is missing",)]


def test_counters_of_one_name_stay_apart(tmp_path: Path) -> None:
    trace = Trace()
    threads(trace)
    for uuid in (20, 21):
        trace.track(uuid, PROCESS, name="level", counter={"is_incremental": True})
        for ts in (1, 2):
            trace.event(ts, COUNTER, uuid, counter_value=uuid)
    connection, _ = loaded(trace.write(tmp_path / "t.pftrace"))
    assert rows(connection, "SELECT list(value ORDER BY ts) FROM counter GROUP BY track_id ORDER BY 1") == [
        ([20.0, 40.0],),
        ([21.0, 42.0],),
    ]


def test_parents_in_a_circle(tmp_path: Path) -> None:
    trace = Trace()
    trace.track(5, 6, name="five")
    trace.track(6, 5, name="six")
    trace.event(1, INSTANT, 5, "i")
    connection, _ = loaded(trace.write(tmp_path / "t.pftrace"))
    assert rows(connection, "SELECT type, name FROM track") == [("global_merged_track_event", "five")]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    with pytest.raises(TraceError, match=r"track_events\.pftrace .* needs a package: pip install perfetto"):
        loaded(FIXTURE)


def test_a_newline_before_json(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("\n" + json.dumps([complete("a", 1, 1)]))
    assert loaded(path)[1][0].format == "chrome"


def test_cut_anywhere(tmp_path: Path) -> None:
    """Loaded up to there and said so, or refused; every event that is left is accounted for."""
    whole = FIXTURE.read_bytes()
    connection = duckdb.connect()
    cut_off = 0
    for size in range(0, len(whole), 37):
        path = tmp_path / f"{size}.pftrace"
        path.write_bytes(whole[:size])
        try:
            (file,) = load_traces([path], connection)
        except TraceError as error:
            assert size < 200 and ("is not a trace" in str(error) or "is empty" in str(error))
            continue
        assert accounted(file) == file.events
        cut_off += file.note is not None and "the file ends early" in file.note
    assert cut_off > 30


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_damaged_anywhere(data: st.DataObject) -> None:
    whole = bytearray(FIXTURE.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.pftrace"
        path.write_bytes(whole)
        try:
            (file,) = load_traces([path], SHARED)
        except TraceError:
            return
    assert accounted(file) == file.events


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x0a\xff\xff\xff\xff\x7f", "claims"),
        (b"\x0a\x05hello" * 3, "none of its packets can be read"),
        (b"\x0a\x02\x50\x01\x0b", "no packet begins at byte 4"),
        (b"\x0a" + b"\xff" * 20, "no number ends"),
    ],
    ids=["huge", "no packets", "a group", "an endless number"],
)
def test_no_trace(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "t.pftrace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        loaded(path)


def test_compressed_packets_that_would_fill_the_memory(tmp_path: Path) -> None:
    trace = Trace()
    trace.packet(compressed_packets=zlib.compress(bytes(1 << 27)))
    trace.packet(compressed_packets=b"not compressed")
    trace.event(1, INSTANT, 1, "after")
    connection, (file,) = loaded(trace.write(tmp_path / "t.pftrace"))
    assert file.rejects == 2 and rows(connection, "SELECT name FROM slice") == [("after",)]


EVENTS = st.lists(
    st.tuples(st.sampled_from("BEIC"), st.sampled_from(THREADS), st.integers(0, 30), st.sampled_from("abc")),
    max_size=40,
)
EVERYTHING = (
    "SELECT ts, dur, name, depth, tid, parent_id IS NULL FROM thread_slice ORDER BY ALL",
    "SELECT ts, value FROM counter ORDER BY ALL",
    "SELECT reason FROM reject ORDER BY ALL",
)


@settings(max_examples=25, deadline=None)
@given(EVENTS)
def test_the_same_as_chromes_json(events: list[tuple[str, int, int, str]]) -> None:
    trace = Trace()
    threads(trace)
    trace.track(9, PROCESS, name="c", counter={})
    chrome: list[dict[str, object]] = []
    kinds = {"B": BEGIN, "E": END, "I": INSTANT}
    for phase, tid, ts, name in events:
        if phase == "C":
            trace.event(ts * 1000, COUNTER, 9, counter_value=tid)
            chrome.append({"ph": "C", "pid": 7, "ts": ts, "name": "c", "args": {"value": tid}})
            continue
        named = {} if phase == "E" else {"name": name}
        trace.event(ts * 1000, kinds[phase], tid, **named)
        chrome.append({"ph": phase, "pid": 7, "tid": tid, "ts": ts, **named})
    with tempfile.TemporaryDirectory() as folder:
        ours, (file,) = loaded(trace.write(Path(folder) / "t.pftrace"))
        theirs, _ = loaded(written(Path(folder) / "t.json", chrome))
    assert accounted(file) == file.events
    assert [rows(ours, sql) for sql in EVERYTHING] == [rows(theirs, sql) for sql in EVERYTHING]
