"""What is slow in an optimised case, in sentences whose figures are those of its launches."""

from dataclasses import replace
from pathlib import Path

from markupsafe import escape

from tests.report.sample import program, write_sample
from tests.store.test_query import operator
from tilewright.records.program import Cost, Decision, Program
from tilewright.report.optimised_findings import findings
from tilewright.report.page import write_page


def launches() -> Program:
    """A product at 1.25 times its floor, a region at four times, and a launch of known prediction."""
    mm = operator(0, "mm", stage="after", measured_us=500.0, floor_us=400.0, bound="compute-bound", predicted_us=450.0)
    region = operator(1, "forward0_gelu", stage="after", measured_us=400.0, floor_us=100.0, bound="DRAM-bound")
    region = replace(region, region="forward0_gelu", predicted_us=100.0)
    small = operator(2, "fill", stage="after", measured_us=100.0, floor_us=100.0)
    refused = Decision("forward", "mm", "gelu", "refused", "the tile does not fit", bytes_saved=64_000_000)
    taken = replace(refused, verdict="taken", bytes_saved=10**9)
    view = operator(3, "t", stage="after", measured_us=50.0, floor_us=None, operator_class="layout", cost=Cost())
    return Program([mm, region, small, view, operator(4, "before", measured_us=9e9)], [], [refused, taken])


def test_what_is_slow_why_and_what_to_do() -> None:
    assert findings(launches()) == [
        "Of the 1.00 ms of all 3 launches most goes to mm 500 µs (50%), forward0_gelu 400 µs (40%), fill 100 µs (10%).",
        "40% of it is above the floors, most of that in forward0_gelu: 4.00× its floor, which is DRAM-bound.",
        "It is a generated kernel: `tilewright kernel` with `--impl tilewright` shows what limits forward0_gelu. "
        "The largest fusion not made, mm → gelu, would save 64.0 MB: the tile does not fit.",
        "1 of 2 predictions are off by more than 2 times, that of forward0_gelu by 4.00×: the model of times is not "
        "fitted to such kernels on this device; `tilewright doctor --kernels` fits it.",
    ]


def test_other_kernels_have_other_advice() -> None:
    made = launches()
    library = replace(made.operators[1], region=None)
    assert findings(Program([library]))[2].startswith("PyTorch's library runs it: forward0_gelu gains by")
    launch = replace(library, bound="launch-bound")
    assert findings(Program([launch]))[2].startswith("A launch is all that it takes")


def test_nothing_is_said_where_nothing_was_measured() -> None:
    assert findings(Program()) == [] and findings(Program([operator(0, "mm", stage="after")])) == []


def test_the_page_begins_with_them(tmp_path: Path) -> None:
    path = tmp_path / "run.duckdb"
    page = write_page(write_sample(path), path.with_suffix(".html")).read_text("utf-8")
    said = findings(program())
    assert len(said) == 3 and all(str(escape(sentence)) in page for sentence in said)
