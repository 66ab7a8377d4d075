"""The answer to a query as a table."""

import gzip
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.report.printing import printed
from tests.report.test_page import island, page_of
from tests.report.test_timeline import slices_of
from tilewright.records.measurement import Measurement
from tilewright.report.bench_plot import chart, draw
from tilewright.report.bench_table import show_race
from tilewright.report.queries import Answer
from tilewright.report.rows import show_rows, show_view
from tilewright.report.views import TRACE, View
from tilewright.store import query


def lines_of(columns: list[str], rows: list[tuple[object, ...]], width: int = 60) -> list[str]:
    return [line.rstrip() for line in printed(show_rows(columns, rows), width).splitlines()]


def test_numbers_stand_to_the_right_and_what_is_missing_is_said() -> None:
    assert lines_of(["name", "n", "share"], [("exp", 20, 0.28571428571), ("\x1b[2J", 4_000_000_000, None)]) == [
        "name           n  share",
        "exp           20  0.285714",
        "�[2J  4000000000  NULL",
    ]
    assert lines_of(["us"], [(12345678.25,), (0.0,)]) == ["        us", "12345678.2", "         0"]


def test_long_text_is_folded_and_never_cut() -> None:
    lines = lines_of(["source"], [("a" * 90,)], width=40)
    assert "".join(lines[1:]) == "a" * 90


def test_a_table_too_wide_is_a_list_of_its_rows() -> None:
    """`SELECT * FROM device_slice` has thirty columns."""
    columns = [f"column_{number}" for number in range(30)]
    lines = lines_of(columns, [tuple(range(30)), ("a" * 70, *range(29))])
    assert lines[:3] == ["row 1", "column_0   0", "column_1   1"]
    assert lines[31] == "row 2" and len(lines) == 31 + 32
    assert "".join(line[11:] for line in lines[32:34]) == "a" * 70


def test_an_answer_without_rows_has_its_columns() -> None:
    assert lines_of(["a", "b"], []) == ["a  b"]


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
    assert data["headlines"][1][1] == "median step while profiled"


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


OURS = Measurement(
    suite="softmax",
    case="65536x8192 bf16",
    impl="tilewright",
    direction="fwd",
    median_us=250.0,
    p20_us=248.0,
    p80_us=253.0,
    repeats=40,
    host_us=12.0,
    peak_bytes=1_073_741_824,
    bytes=2_147_483_648,
    GBps=8589.9,
    TFLOPs=700.0,
    of_ceiling=0.975,
    error=1.7e-3,
    eager_error=3.5e-3,
)
TORCH = replace(OURS, impl="torch", median_us=1000.0, GBps=2147.5, of_ceiling=0.24, error=None, eager_error=None)
BARE = Measurement("softmax", "4x4 bf16", "eager", "fwd", 0.5, 0.5, 0.5, 3)


def shown(*rows: Measurement, unit: str = "GB/s") -> list[list[str]]:
    lines = printed(show_race("softmax\x1b[2J", rows, ["liger refused: \x07too long"], unit)).splitlines()
    assert lines[0].strip() == "softmax�[2J" and lines[-1] == "liger refused: �too long"
    assert lines[1].split()[:2] == ["implementation", "time"]
    return [re.split(r"\s{2,}", line.strip()) for line in lines[2:-1]]


def test_the_fastest_stands_first_beside_its_peers() -> None:
    assert shown(TORCH, OURS) == [
        ["tilewright", "250 µs", "2.0%", "12.0 µs", "8,590", "97.5%", "1.07 GB", "1.7e-03", "3.5e-03", "4.00×"],
        ["torch", "1.00 ms", "0.5%", "12.0 µs", "2,148", "24.0%", "1.07 GB", "-", "-", "1.00×"],
    ]


def test_products_are_shown_by_their_flops_and_gaps_as_dashes_or_not_at_all() -> None:
    assert shown(OURS, unit="TFLOP/s")[0][4] == "700"
    assert shown(BARE)[0][1:] == ["0.500 µs", "0.0%", "1.00×"]
    assert shown(BARE, OURS)[0][1:] == ["0.500 µs", "0.0%", "-", "-", "-", "-", "-", "-", "1.00×"]


def test_a_ratio_that_the_spread_leaves_open_is_no_figure() -> None:
    """Medians 487 times apart, one of them with a spread of 7,974 %."""
    ours = replace(BARE, impl="tilewright", median_us=10.0, p20_us=9.5, p80_us=10.6)
    noisy = replace(BARE, median_us=4870.0, p20_us=10.0, p80_us=388_343.0)
    steady = replace(BARE, median_us=40.0, p20_us=38.0, p80_us=44.0)
    assert shown(ours, noisy)[0][-1] == "noisy" and shown(ours, steady)[0][-1] == "4.00×"


def test_a_narrow_terminal_keeps_every_row_on_one_line() -> None:
    rows = [OURS, TORCH, *(replace(TORCH, impl=impl) for impl in ("inductor", "liger", "eager"))]
    for width, kept in ((200, "host"), (120, "p20–p80"), (100, "of limit")):
        lines = printed(show_race("softmax", rows, [], "GB/s"), width).splitlines()
        assert len(lines) == 7 and kept in lines[1] and all(len(line) <= width for line in lines)


def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_figure() -> None:
    name = "aten::" + "long" * 30
    row = {"name": name, "kind": "operator", "calls": 7, "host_total_ns": 98_765_432, "device_self_ns": 12_345_678}
    view = View("some", "", "Some", "", "", left_out=("kind", "host_total_ns"))
    answer = Answer("", tuple(row), [tuple(row.values())], 1)
    for width, kept in ((100, "kind host total"), (60, "host total"), (50, "")):
        title, header, cells = printed(show_view(view, answer), width).splitlines()[1:]
        assert header.split() == ["name", *kept.split()[:-2], "calls", *kept.split()[-2:], "device", "self"]
        assert cells.startswith("aten::longlong") and "…  " in cells and cells.count("…") == 1
        assert "12.3 ms" in cells and ("98.8 ms" in cells) == bool(kept) and title.strip() == "Some"


def test_a_plot_has_a_point_for_each_row_in_its_own_panel() -> None:
    rows = [OURS, TORCH, replace(OURS, case="4096x131072 bf16"), replace(OURS, direction="bwd", of_ceiling=None)]
    drawn = chart(rows, "GB/s").to_dict()
    (points,) = drawn["datasets"].values()
    assert [(point["panel"], point["size"], point["implementation"]) for point in points] == [
        ("softmax fwd bf16", "65536x8192", "tilewright"),
        ("softmax fwd bf16", "65536x8192", "torch"),
        ("softmax fwd bf16", "4096x131072", "tilewright"),
        ("softmax bwd bf16", "65536x8192", "tilewright"),
    ]
    assert points[0]["rate"] == 8589.9 and points[0]["limit"] == 8589.9 / 0.975 and points[3]["limit"] is None
    assert points[0]["low"] < points[0]["rate"] < points[0]["high"]


def test_a_plot_as_a_page_asks_no_network(tmp_path: Path) -> None:
    draw([OURS, TORCH], "GB/s", tmp_path / "rates.html")
    page = (tmp_path / "rates.html").read_text(encoding="utf-8")
    assert "65536x8192" in page and not re.search(r"""(src|href)=["']?https?:""", page)
