"""The bench's table and plot, from rows written by hand."""

import re
from dataclasses import replace
from pathlib import Path

from tests.report.printing import printed
from tilewright.records.measurement import Measurement
from tilewright.report.bench_plot import chart, draw
from tilewright.report.bench_table import show_race

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


def test_products_are_shown_by_their_flops_and_gaps_as_dashes() -> None:
    assert shown(OURS, unit="TFLOP/s")[0][4] == "700"
    assert shown(BARE)[0][1:] == ["0.500 µs", "0.0%", "-", "-", "-", "-", "-", "-", "1.00×"]


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
