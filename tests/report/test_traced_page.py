"""The page of a run that holds a trace: what is in it, how large it gets, and that it is deaf to hostile traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.large import write_large
from tests.report.test_page import HOSTILE, Elements, island, page_of
from tests.store.test_query import operator
from tests.trace.training_trace import TrainingTrace, load
from tilewright.records.program import Cost, Program, Region
from tilewright.report.timeline import MOST_SLICES, laid_out, timeline
from tilewright.report.traced import MOST_DEVICES
from tilewright.store import Run
from tilewright.store.query import reading
from tilewright.trace import load_traces

LARGEST_PAGE = 5_000_000


def hostile_events(text: str) -> list[dict[str, Any]]:
    """A trace in which `text` stands wherever a trace has a text."""
    host, gpu = {"pid": 1, "tid": 1}, {"pid": 2, "tid": 7}
    meta = [("process_name", {"name": text}), ("thread_name", {"name": text}), ("process_labels", {"labels": text})]
    slices = [
        ("python_function", 0, 99),
        ("user_annotation", 1, 90),
        ("cpu_op", 2, 50),
        ("cuda_runtime", 3, 9),
        (text, 70, 5),
    ]
    args = {text: text, "Input Dims": [[text]], "Call stack": f"{text};{text}"}
    memory = {"Device Type": 0, "Device Id": text, "Bytes": 8, "Total Allocated": 8, "Addr": text, text: text}
    return [
        *({"ph": "M", "name": name, **host, "args": args_} for name, args_ in meta),
        *({"ph": "X", "cat": cat, "name": text, **host, "ts": ts, "dur": dur, "args": args} for cat, ts, dur in slices),
        {"ph": "X", "cat": "kernel", "name": text, **gpu, "ts": 20, "dur": 9, "args": args},
        {"ph": "s", "id": text, "cat": "ac2g", "name": text, **host, "ts": 4},
        {"ph": "f", "id": text, "cat": "ac2g", "name": text, "bp": "e", **gpu, "ts": 20},
        {"ph": "C", "name": text, **host, "ts": 5, "args": {text: 3}},
        {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", **host, "ts": 6, "args": memory},
    ]


@pytest.mark.parametrize("ran", [False, True])
def test_what_fusion_would_change_is_not_shown_as_done(tmp_path: Path, ran: bool) -> None:
    """An eager profile holds the plan of the case, of which nothing ran."""
    trace = tmp_path / "trace.json"
    name = "forward0_exp" if ran else "aten::exp"
    trace.write_text(json.dumps([{"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 1, "pid": 1, "tid": 1}]))
    path = tmp_path / "run.duckdb"
    operators = [operator(0, "exp"), operator(1, "neg"), operator(0, "forward0_exp", stage="after")]
    regions = [Region("forward", "forward0_exp", ("exp", "neg"), Cost(), "c++", "", floor_us=2.0)]
    with Run.create(path, command="c", target="t", case="k") as run:
        run.add_program(Program(operators=operators, regions=regions))
        load_traces([trace], run.connection)
    page = page_of(path)
    assert ("bytes moved, if fused" in page, "<span>bytes moved</span>" in page) == (not ran, ran)
    assert ("kernel launches, if fused" in page, "<span>kernel launches</span>" in page) == (not ran, ran)


def write_hostile_trace(folder: Path, text: str = HOSTILE) -> Path:
    trace = folder / "trace.json"
    trace.write_text(json.dumps({"traceEvents": hostile_events(text)}))
    with Run.create(folder / "run.duckdb", command=text, target=text, case=text) as run:
        load_traces([trace], run.connection)
    return folder / "run.duckdb"


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    return load(TrainingTrace(3).write(folder / "trace.json"), folder / "run.duckdb")


def test_the_page_holds_the_trace(training: Path) -> None:
    data = island(page_of(training), "trace-data")
    with reading(training) as connection:
        found = timeline(connection)
    assert found is not None
    drawn = data["timeline"]
    assert drawn["kept"] == found["kept"] and drawn["args"] == found["args"]
    assert drawn["slices"]["id"] == laid_out(found)["slices"]["id"]
    assert [counter["name"] for counter in drawn["counters"]] == ["GPU 0 memory"]
    assert [flame["title"] for flame in data["flames"]] == ["Host time", "Device time"]
    assert [device["device"] for device in data["memory"]] == ["GPU 0"] and data["steps"] == 2


def test_a_trace_alone_shows_no_empty_program(training: Path) -> None:
    html = page_of(training)
    ids = {attrs["id"] for tag, attrs in Elements(html).tags if tag == "section"}
    assert ids == {"timeline", "flame", "allocator"}
    assert "not verified" not in html and "median step while profiled" in html


def test_a_program_and_its_trace_share_a_page(tmp_path: Path) -> None:
    made = TrainingTrace(3).write(tmp_path / "trace.json")
    run = write_large(tmp_path / "run.duckdb", 40)
    _add_trace(run, made)
    ids = {attrs["id"] for tag, attrs in Elements(page_of(run)).tags if tag == "section"}
    assert {"roofline", "graph", "operators", "timeline", "flame", "allocator"} <= ids
    assert "not verified" not in page_of(run)


def test_a_run_without_a_trace_shows_none(tmp_path: Path) -> None:
    html = page_of(write_large(tmp_path / "run.duckdb", 3))
    assert 'id="trace-data"' not in html and 'id="timeline"' not in html


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    for name in ("harmless", "hostile"):
        (tmp_path / name).mkdir()
    harmless = Elements(page_of(write_hostile_trace(tmp_path / "harmless", "harmless")))
    html = page_of(write_hostile_trace(tmp_path / "hostile"))
    assert [tag for tag, _ in Elements(html).tags] == [tag for tag, _ in harmless.tags]
    assert "<script>document" not in html and "<img src=x" not in html
    names = [name for name, _, _ in island(html, "trace-data")["timeline"]["names"]]
    assert any(name.startswith("</script><script>") for name in names)


def test_the_largest_trace_beside_the_largest_program_stays_under_five_megabytes(tmp_path: Path) -> None:
    """Every slice with a long name of markup and arguments of its own, more than are drawn; memory on many devices."""
    letter = "<"
    place = {"cat": "cpu_op", "pid": 1, "tid": 1}
    events: list[dict[str, Any]] = []
    for i in range(60_000):
        args = {"Input Dims": [[i, i + 1]], "Concrete Inputs": [letter * 40, str(i)]}
        events.append(
            {"ph": "X", **place, "name": f"{i:06d}{letter * 150}", "ts": 10 * i, "dur": 1 + i % 7, "args": args}
        )
    for i in range(40_000):
        memory = {"Device Type": 1, "Device Id": i % 20, "Bytes": 512, "Total Allocated": i * 512, "Addr": i}
        events.append({"ph": "i", "s": "t", **place, "name": "[memory]", "ts": 10 * i + 0.5, "args": memory})
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    run = write_large(tmp_path / "run.duckdb", 2_000)
    _add_trace(run, trace)
    html = page_of(run)
    data = island(html, "trace-data")
    kept = data["timeline"]["kept"]
    assert len(html.encode()) <= LARGEST_PAGE
    assert kept["slices"] == 60_000 and kept["merged"] > 60_000 - MOST_SLICES and kept["without_arguments"] > 0
    assert all(device["left_out"] > 0 for device in data["memory"]) and len(data["memory"]) == MOST_DEVICES


def _add_trace(run: Path, trace: Path) -> None:
    import duckdb

    with duckdb.connect(str(run)) as connection:
        load_traces([trace], connection)
