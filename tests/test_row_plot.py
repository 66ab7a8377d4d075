"""The picture of the row kernels: which rows are drawn, and in which order."""

from dataclasses import replace

from benchmarks.row_plot import SUITES, chart, points
from benchmarks.summary import Results
from tilewright.records.measurement import Measurement

ROW = Measurement("softmax", "65536x4096 bf16", "tilewright", "fwd", 250.0, 1.0, 1.0, 9, GBps=4000.0, of_ceiling=1.0)
ROWS = [
    ROW,
    replace(ROW, case="1024x262144 bf16", GBps=3900.0),
    replace(ROW, case="1048576x256 bf16", impl="torch", GBps=2000.0),
    replace(ROW, impl="tilewright-triton"),
    replace(ROW, direction="bwd"),
    replace(ROW, case="65536x4096 fp32"),
    replace(ROW, case="100x5000 bf16"),
]


def test_full_sized_rows_of_the_way_a_user_gets_and_its_peers_from_short_to_long() -> None:
    drawn = points(Results(ROWS), "softmax")
    assert [(point["columns"], point["way"], point["GBps"]) for point in drawn] == [
        ("256", "PyTorch", 2000.0),
        ("4,096", "tilewright", 4000.0),
        ("262,144", "tilewright", 3900.0),
    ]
    assert all(3900 <= point["copy"] <= 4000 for point in drawn)


def test_there_is_a_panel_for_each_operator() -> None:
    panels = chart(Results(ROWS)).to_dict()["concat"]
    assert [panel["title"].split(",")[0] for panel in panels] == [*SUITES.values()]
