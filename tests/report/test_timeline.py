"""The page's timeline says what the run says: every slice, flow, counter and argument, or how many it leaves out."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.loading import complete, loaded, loaded_events, rows, written
from tests.trace.training_trace import TrainingTrace
from tilewright.report.coarsen import Merged, merge_short, thin
from tilewright.report.kinds import kind_of
from tilewright.report.timeline import DEEPEST, MOST_TRACKS, laid_out, timeline


def packed(connection: duckdb.DuckDBPyConnection, most: int = 50_000) -> dict[str, Any]:
    found = timeline(connection, most)
    assert found is not None
    return json.loads(json.dumps(laid_out(found)))  # type: ignore[no-any-return]


def slices_of(lines: dict[str, Any]) -> list[dict[str, Any]]:
    """Every drawn slice of a page's timeline, by its place."""
    columns = lines["slices"]
    found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in found:
        row["name"], row["category"], row["kind"] = lines["names"][row["label"]]
        row["ts"], row["dur"] = int(lines["origin"]) + row["begin"], row["length"]
    return found


def slice_(name: str, ts: float, dur: float, tid: int = 1, **more: Any) -> dict[str, Any]:
    return complete(name, ts, dur, tid, cat="cpu_op", **more)


def packed_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    return packed(loaded_events(events)[0])


@pytest.fixture(scope="module")
def training() -> duckdb.DuckDBPyConnection:
    return loaded_events(TrainingTrace(1, steps=3).events)[0]


def test_every_slice_is_drawn(training: duckdb.DuckDBPyConnection) -> None:
    drawn = slices_of(packed(training))
    keys = ("id", "ts", "dur", "name", "category")
    expected = rows(training, f"SELECT {', '.join(keys)} FROM slice WHERE name <> '[memory]' ORDER BY id")
    assert sorted(tuple(each[key] for key in keys) for each in drawn) == expected
    assert {each["count"] for each in drawn} == {1}


def test_every_flow_joins_its_slices(training: duckdb.DuckDBPyConnection) -> None:
    found = packed(training)
    ids = [each["id"] for each in slices_of(found)]
    flows = found["flows"]
    pairs = zip(flows["out"], flows["into"], strict=True)
    assert sorted((ids[a], ids[b]) for a, b in pairs) == rows(
        training, "SELECT slice_out, slice_in FROM flow ORDER BY ALL"
    )
    assert flows["kinds"] == ["ac2g"] and set(flows["kind"]) == {0}


def test_arguments_are_told_without_the_numbers_that_tie_events(training: duckdb.DuckDBPyConnection) -> None:
    found = packed(training)
    told = {
        (each["category"], json.dumps(found["args"][each["args"] - 1])) for each in slices_of(found) if each["args"]
    }
    assert told == {
        ("cpu_op", '{"Input Dims": "[[8, 64]]"}'),
        ("cpu_op", '{"Input Dims": "[[17, 64]]"}'),
        ("kernel", '{"grid": "[132, 1, 1]"}'),
    }


def test_devices_come_as_streams(training: duckdb.DuckDBPyConnection) -> None:
    tracks = {(track["process"], track["name"], track["device"]) for track in packed(training)["homes"]}
    assert tracks == {("GPU 0", "stream 7", True), ("python 4000", "thread 4000 (python)", False)}


@pytest.mark.parametrize("most", [1, 40, 300])
def test_fewer_slices_when_asked_and_it_says_so(training: duckdb.DuckDBPyConnection, most: int) -> None:
    found = packed(training, most)
    drawn, every = slices_of(found), rows(training, "SELECT count(*) FROM slice WHERE name <> '[memory]'")[0][0]
    least = len({(each["track"], each["row"]) for each in drawn}) * 2
    assert len(drawn) <= max(most, least) and sum(each["count"] for each in drawn) == found["kept"]["slices"] == every
    merged = [each for each in drawn if each["count"] > 1]
    assert found["kept"]["blocks"] == len(merged)
    assert found["kept"]["merged"] == sum(each["count"] for each in merged)
    longest = rows(training, "SELECT max(dur) FROM slice")[0][0]
    assert max(each["dur"] for each in drawn) >= longest


def test_every_slice_has_a_row_below_the_slice_around_it(training: duckdb.DuckDBPyConnection) -> None:
    """No two slices of a row overlap, Python's frames are below the others, and so are the tracks below each other."""
    drawn = slices_of(packed(training))
    for each in drawn:
        if each["outer"] >= 0:
            outer = drawn[each["outer"]]
            assert outer["ts"] <= each["ts"] and each["ts"] + each["dur"] <= outer["ts"] + outer["dur"]
            if (outer["kind"] == "python") == (each["kind"] == "python"):
                assert outer["row"] < each["row"]
    by_row: dict[int, list[dict[str, Any]]] = {}
    for each in sorted(drawn, key=lambda each: each["ts"]):
        by_row.setdefault(each["row"], []).append(each)
    for row in by_row.values():
        assert len({(each["track"], each["kind"] == "python") for each in row}) == 1
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(row))


def test_counters_are_curves() -> None:
    place = {"ph": "C", "name": "power", "pid": 1, "tid": 1}
    events = [slice_("a", 0, 100), *({**place, "ts": t, "args": {"watts": 7.5 * t}} for t in (10, 20))]
    (counter,) = packed_events(events)["counters"]
    assert counter["ts"] == [10_000, 20_000] and counter["values"] == [75.0, 150.0]


def test_a_slice_that_never_ended_and_an_instant() -> None:
    events = [slice_("a", 0, 10), {"ph": "B", "name": "open", "pid": 1, "tid": 2, "ts": 3}]
    events.append({"ph": "i", "name": "now", "pid": 1, "tid": 2, "ts": 5})
    assert {each["name"]: each["dur"] for each in slices_of(packed_events(events))} == {
        "a": 10_000, "open": -1, "now": 0,
    }  # fmt: skip


def test_what_is_too_deep_or_on_too_many_tracks_is_counted() -> None:
    deep = DEEPEST + 30
    events = [slice_(f"f{i}", i, 2 * deep - 2 * i, tid=0) for i in range(deep)]
    events += [slice_("one", 0, 1, tid=1 + i) for i in range(MOST_TRACKS + 5)]
    found = packed_events(events)
    assert len(found["homes"]) == MOST_TRACKS
    assert found["kept"]["left_out"] == 30 + 6 and found["kept"]["slices"] == len(events)


def test_long_names_and_arguments_are_cut() -> None:
    events = [slice_("n" * 5_000, i, 1, args={"k" * 900: "v" * 9_000, "list": list(range(500))}) for i in range(3)]
    found = packed_events(events)
    assert len(found["names"][0][0]) == 400
    assert {len(key) for key in found["args"][0]} <= {60, 4} and max(map(len, found["args"][0].values())) == 300


def test_arguments_without_room_are_counted_and_the_longest_slices_keep_theirs() -> None:
    events = [
        slice_("a", 10 * i, 1 + i / 1000, args={f"k{j}": f"{i}".rjust(290, "x") for j in range(9)}) for i in range(400)
    ]
    found = packed_events(events)
    without = [each for each in slices_of(found) if not each["args"]]
    assert 0 < found["kept"]["without_arguments"] == len(without) < 400
    assert max(each["dur"] for each in without) < 1_400


def test_nothing_to_draw() -> None:
    assert timeline(loaded_events([])[0]) is None


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("aten::bmm", "cpu_op", "compute"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", "compute"),
        ("aten::_softmax", "cpu_op", "reduction"),
        ("aten::sum", "cpu_op", "reduction"),
        ("aten::summary", "cpu_op", "pointwise"),
        ("aten::t", "cpu_op", "layout"),
        ("aten::tanh", "cpu_op", "pointwise"),
        ("aten::native_dropout", "cpu_op", "random"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "kernel", "library"),
        ("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", "layout"),
        ("cudaLaunchKernel", "cuda_runtime", "launch"),
        ("cudaDeviceSynchronize", "cuda_runtime", "wait"),
        ("anything", "python_function", "python"),
        ("forward", "user_annotation", "range"),
    ],
)
def test_kinds(name: str, category: str, kind: str) -> None:
    assert kind_of(name, category) == kind


def test_processes_of_several_files_are_told_apart(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, [slice_("a", 0, 10)]) for name in ("train.json", "infer.json")]
    found = packed(loaded(*paths)[0])
    assert [track["process"] for track in found["homes"]] == ["process 1 (train.json)", "process 1 (infer.json)"]


def test_the_timed_steps_and_the_one_that_describes_them_are_told_apart(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, [slice_("work", 1, 2)]) for name in ("light.json", "light.described.json")]
    connection, _ = loaded(*paths)
    connection.execute("CREATE TABLE description AS SELECT 0 AS file_id, 1 AS described_by")
    names = {track["process"] for track in packed(connection)["homes"]}
    assert names == {"process 1 (timed steps)", "process 1 (the step described)"}


# Row, begin, length.
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000), st.integers(-1, 500)), max_size=80)
Row = tuple[int, ...]


def merged(rows: Sequence[Row], most: int) -> tuple[Merged, list[Row], list[Row]]:
    """The result of merging, the blocks (row, ts, dur, count, id) and the slices (row, ts, dur, id, block)."""
    with duckdb.connect() as connection:
        connection.execute(
            "CREATE TABLE shown AS SELECT unnest(?::BIGINT[]) AS id, unnest(?::BIGINT[]) AS track_id, "
            "unnest(?::BIGINT[]) AS ts, unnest(?::BIGINT[]) AS dur, 0 AS depth, NULL::BIGINT AS arg_set_id, "
            "NULL::VARCHAR AS span",
            [list(range(len(rows))), *([row[place] for row in rows] for place in range(3))],
        )
        said = merge_short(connection, most)
        blocks = connection.execute("SELECT track_id, ts, dur, count, id FROM block ORDER BY block").fetchall()
        placed = connection.execute("SELECT track_id, ts, dur, id, block FROM placed ORDER BY ALL").fetchall()
    return said, blocks, placed


@settings(deadline=None, max_examples=50)
@given(ROWS, st.integers(1, 20))
def test_blocks_hold_every_slice_once(rows: list[Row], most: int) -> None:
    said, blocks, placed = merged(rows, most)
    assert Counter(block for *_, block in placed) == dict(enumerate(count for *_, count, _ in blocks))
    # Rows, and what stays whole in them, are never merged with others.
    cuts = len({row for row, _, _ in rows}) + sum(dur < 0 for _, _, dur in rows)
    assert len(blocks) <= max(most, most // 2 + 2 * cuts)
    for row, ts, dur, _, block in placed:
        its_row, its_ts, its_dur, count, longest = blocks[block]
        assert its_row == row
        whole = said.whole is not None and said.whole[0] <= ts < said.whole[1]
        if dur >= said.shortest_ns or dur < 0 or whole:
            assert (its_ts, its_dur, count) == (ts, dur, 1)
        else:
            assert its_ts <= ts and ts + dur <= its_ts + its_dur
            assert rows[longest][2] >= dur


def test_few_slices_stay_as_they_are() -> None:
    said, blocks, _ = merged([(0, 5, 2), (0, 9, 0), (1, 5, -1)], 3)
    assert said == (0, None) and [(dur, count) for _, _, dur, count, _ in blocks] == [(2, 1), (0, 1), (-1, 1)]


def test_a_gap_that_can_be_seen_is_kept() -> None:
    _, blocks, _ = merged([(0, ts, 5) for ts in (0, 10, 20, 5_000, 5_010)], 3)
    assert [(ts, dur, count) for _, ts, dur, count, _ in blocks] == [(0, 25, 3), (5_000, 15, 2)]


def test_half_of_what_may_be_drawn_is_the_middle_whole() -> None:
    said, blocks, _ = merged([(0, 10 * place, 4) for place in range(10_000)], 1_000)
    assert said.whole is not None
    middle = [count for _, ts, _, count, _ in blocks if said.whole[0] <= ts < said.whole[1]]
    assert set(middle) == {1} and 490 <= len(middle) <= 500
    assert len(blocks) <= 1_000 and abs(sum(said.whole) / 2 - 50_000) < 100


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(-1e9, 1e9)), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_extremes_and_ends(points: list[tuple[int, float]], most: int) -> None:
    points.sort(key=lambda point: point[0])
    ts, values = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    kept = thin(ts, values, most)
    assert kept.size <= max(most, 4) and (np.diff(kept) > 0).all()
    assert {0, ts.size - 1} <= set(kept.tolist())
    assert values[kept].max() == values.max() and values[kept].min() == values.min()
