"""The analyses of a recorded training step as the page shows them: tables, the accounting as a track, queue depth."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.report.test_page import island, page_of
from tests.report.test_timeline import slices_of
from tilewright.report.views import TRACE
from tilewright.store import query

FIXTURE = Path(__file__).parents[1] / "trace" / "fixtures" / "block_eager.json.gz"


@pytest.fixture(scope="module")
def data(recorded: Path) -> dict[str, Any]:
    return island(page_of(recorded), "trace-data")


def test_every_table_answers_its_query(recorded: Path, data: dict[str, Any]) -> None:
    shown = data["tables"]
    for view in TRACE:
        columns, rows = query(recorded, view.sql)
        if rows:
            assert shown[view.id]["columns"] == list(columns)
            assert shown[view.id]["total"] == len(rows) >= len(shown[view.id]["rows"])
    assert {"accounting", "win", "distance"} <= set(shown)


def test_the_first_headline_is_the_step_of_the_device(data: dict[str, Any]) -> None:
    figure, meaning, detail = data["headlines"][0]
    assert (meaning, detail) == ("mean step, GPU 0", "3 profiled steps") and figure == "6.25 ms"
    assert data["headlines"][1][1] == "median step on the host"


def test_a_view_of_another_version_is_told_and_the_rest_is_shown(recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "run.duckdb"
    other.write_bytes(recorded.read_bytes())
    with duckdb.connect(str(other)) as connection:
        connection.execute("CREATE OR REPLACE VIEW synchronisation AS SELECT 1 AS something_else")
    html = page_of(other)
    tables = island(html, "trace-data")["tables"]
    assert "another version" in tables["synchronisation"]["problem"] and not tables["synchronisation"]["rows"]
    assert tables["accounting"]["rows"] and not tables["accounting"]["problem"]
    assert "This run was written by another version of tilewright." in html


def test_a_step_is_accounted_for_whole(data: dict[str, Any]) -> None:
    table = data["tables"]["accounting"]
    percent = table["columns"].index("percent")
    assert sum(row[percent] for row in table["rows"]) == pytest.approx(100, abs=0.5)


def test_the_accounting_is_a_track_without_holes(recorded: Path, data: dict[str, Any]) -> None:
    spans = [each for each in slices_of(data["timeline"]) if each["category"] == "accounting"]
    rows = query(recorded, "SELECT ts, dur, class FROM device_time ORDER BY ts")[1]
    assert [(each["ts"], each["dur"], each["name"]) for each in spans] == rows
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(spans))
    tracks = {(track["process"], track["name"]) for track in data["timeline"]["homes"]}
    assert ("GPU 0", "where its time went") in tracks


def test_queue_depth_is_a_curve(recorded: Path, data: dict[str, Any]) -> None:
    curve = next(each for each in data["timeline"]["counters"] if each["name"] == "Queued for GPU 0")
    rows = query(recorded, "SELECT ts, depth FROM queue_depth ORDER BY ts")[1]
    origin = int(data["timeline"]["origin"])
    assert list(zip(curve["ts"], curve["values"], strict=True)) == [
        (ts - origin, depth) for ts, depth in rows if isinstance(ts, int)
    ]


def test_device_time_lies_below_the_stack_that_launched_it(data: dict[str, Any]) -> None:
    with gzip.open(FIXTURE, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    worked = sum(e["dur"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    device = next(each for each in data["flames"] if each["title"] == "Device time")
    names = [name for name, _ in device["names"]]
    assert device["nodes"][0][4] == pytest.approx(1_000 * worked, rel=1e-4)
    assert "transformer_block.py(35): forward" in names and "(launch not in the trace)" not in names
