"""Sentences on slow launches of an optimised case have the figures of the launches and of the time they lose."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from tests.report.printing import printed
from tests.report.sample import program, write_sample
from tests.store.test_query import operator
from tilewright.records.measurement import Ceiling, Direction, Measurement
from tilewright.records.program import Cost, Decision, Program, Region
from tilewright.report.optimised_findings import findings, outcome
from tilewright.report.page import write_page
from tilewright.report.queries import ask_view
from tilewright.report.rows import show_view
from tilewright.report.views import LOST
from tilewright.store import Run, query


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
        "40% of that time is above the floors, most in forward0_gelu, which takes 4.00× its floor and is DRAM-bound.",
        "It is a generated kernel: `tilewright kernel` with `--impl tilewright` shows what limits forward0_gelu. "
        "The largest fusion not made, mm → gelu, would save 64.0 MB: the tile does not fit.",
        "1 of 2 predictions are off by more than 2 times. The largest error is forward0_gelu's: 100 µs "
        "predicted, 400 µs measured. Predictions of such kernels are not fitted to this device yet; `tilewright doctor "
        "--kernels` does that.",
    ]


def test_what_has_no_floor_is_named_and_what_is_at_its_floor_has_no_advice() -> None:
    unknown = operator(0, "rnn", stage="after", measured_us=900.0, floor_us=None)
    near = operator(1, "mm", stage="after", measured_us=100.0, floor_us=99.8)
    assert findings(Program([unknown, near]))[1:] == [
        "90% of it is in operators of which no floor is known, most in rnn.",
        "The others are at their floors.",
    ]
    assert findings(Program([near]))[1:] == ["All are at their floors."]
    assert findings(Program([unknown]))[1:] == ["100% of it is in operators of which no floor is known, most in rnn."]


def test_launches_that_take_longer_alone_than_together_say_nothing_of_predictions() -> None:
    slow = operator(0, "mm", stage="after", measured_us=300.0, floor_us=10.0, predicted_us=20.0, bound="DRAM-bound")
    assert "predictions" in findings(Program([slow]), [timed("tilewright", 250.0)])[-1]
    said = findings(Program([slow]), [timed("eager", 90.0), timed("tilewright", 100.0)])
    assert "take 3.00× as long as in the program" in said[1] and "predictions" not in said[-1]
    said = findings(Program([slow]), [timed("tilewright", 1e4)])
    assert said[1] == "A call takes 10.0 ms. The rest is time of the host, or of other programs on this machine."


def test_other_kernels_have_other_advice() -> None:
    made = launches()
    library = replace(made.operators[1], region=None, dtype="float32", shape=(64, 7))
    for dtype, shape, said in (
        ("float32", (64, 7), ": a lower precision or rows whose length is a multiple of 8 may be faster."),
        ("bfloat16", (64, 7), ": rows whose length is a multiple of 8 may be faster."),
        ("bfloat16", (7, 64), ": dtype and sizes suit its kernels, so leave both."),
        ("bfloat16", (64, 8), ": dtype and sizes suit its kernels, so leave both."),
    ):
        found = findings(Program([replace(library, dtype=dtype, shape=shape)]))[2]
        assert found == f"PyTorch's library runs forward0_gelu{said}"
    for narrow, way in ((0.1, "rows"), (0.3, "a lower precision or rows")):
        rates = {"float32": 0.2, "bfloat16": narrow}
        ceilings = [Ceiling("cpu", "matmul", dtype, rate, "TFLOP/s", "measured") for dtype, rate in rates.items()]
        assert findings(Program([library]), (), ceilings)[2].startswith(f"PyTorch's library runs forward0_gelu: {way}")
    launch = replace(library, bound="launch-bound")
    assert findings(Program([launch]))[2].startswith("Only its launch takes time")
    region = Region("forward", "forward0_gelu", ("gelu",), Cost(), "c++", "void forward0_gelu() {}")
    assert "SELECT source_code FROM region" in findings(Program([made.operators[1]], [region]))[2]


def timed(impl: str, us: float, spread: float = 0.01, direction: Direction = "infer") -> Measurement:
    return Measurement("optimize", "case", impl, direction, us, us * (1 - spread), us * (1 + spread), 9)


@pytest.mark.parametrize(
    ("eager", "said"),
    [
        (timed("eager", 300.0), "3.00× faster than eager (300 µs)"),
        (timed("eager", 50.0), "2.00× slower than eager (50.0 µs)"),
        (timed("eager", 101.0, 0.0), "1.01× the speed of eager (101 µs; within the noise)"),
        (timed("eager", 90.0, 0.2), "0.90× the speed of eager (90.0 µs; within the noise)"),
    ],
)
def test_the_outcome_comes_first_also_where_it_is_lost(eager: Measurement, said: str) -> None:
    ours = timed("tilewright", 100.0)
    assert outcome([eager, ours]) == [f"Inference (--training adds backward): tilewright takes 100 µs, {said}."]
    assert outcome([eager]) == [] and "Training" in outcome([replace(ours, direction="fwd+bwd")])[0]


def test_nothing_is_said_where_nothing_was_measured() -> None:
    assert findings(Program()) == [] and findings(Program([operator(0, "mm", stage="after")])) == []


def test_the_page_begins_with_them(tmp_path: Path) -> None:
    path = tmp_path / "run.duckdb"
    page = write_page(write_sample(path), path.with_suffix(".html")).read_text("utf-8")
    said = findings(program())
    shown = [re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(sentence))) for sentence in said]
    assert len(shown) == 3 and all(sentence in page for sentence in shown)


FITS_NOT = "the tile of _scaled_dot_product_flash_attention_for_cpu_backward does not fit"


def write_lost(path: Path) -> Path:
    """Two equal products at twice their floor, a region raced and lost, one without a reason, and an unknown call."""
    moved = Cost(bytes_read=80, bytes_written=80)
    mm = operator(0, "mm", stage="after", measured_us=200.0, floor_us=100.0, predicted_us=190.0, bound="compute-bound")
    gelu = operator(2, "forward0_gelu", stage="after", region="forward0_gelu", target="kernel", cost=moved)
    gelu = replace(gelu, measured_us=90.0, floor_us=30.0, predicted_us=30.0, bound="DRAM-bound")
    softmax = operator(3, "softmax", stage="after", measured_us=100.0, floor_us=50.0, predicted_us=60.0)
    odd = operator(4, "odd", stage="after", measured_us=20.0, floor_us=None, cost=Cost(provenance="unknown"))
    quick = operator(5, "quick", stage="after", measured_us=1.0, floor_us=2.0)
    turned = operator(6, "t", stage="after", measured_us=3.0, floor_us=None, operator_class="layout", cost=Cost())
    region = Region("forward", "forward0_gelu", ("tanh", "mul"), moved, "triton", "")
    lost = Decision("forward", "tanh", "mul", "tried and lost", "one kernel took 90 µs, one each 80 µs", measured_us=90)
    refused = Decision("forward", "mul", "mm", "refused", FITS_NOT, bytes_saved=10**9)
    taken = Decision("forward", "softmax", "odd", "taken", "both are rows")
    kept = Decision("forward", "softmax", "mm", "refused", "it does not pay", passed_by="attention")
    impossible = Decision("forward", "softmax", "odd", "impossible", "a library call")
    program = Program(
        [operator(0, "tanh"), mm, replace(mm, index=1, name="mm_1"), gelu, softmax, odd, quick, turned],
        [region],
        [refused, lost, taken, kept, impossible],
    )
    with Run.create(path, command="c", target="t", case="k") as made:
        made.add_program(program)
    return path


def test_alike_launches_are_one_row_and_each_has_its_reason(tmp_path: Path) -> None:
    columns, found = query(write_lost(tmp_path / "run.duckdb"), "FROM lost_time WHERE lost_us > 0")
    rows: dict[Any, dict[str, Any]] = {row[0]: dict(zip(columns, row, strict=True)) for row in found}
    assert list(rows) == ["mm", "forward0_gelu", "softmax", "odd", "t"]
    mm = rows["mm"]
    assert (mm["launches"], mm["measured_us"], mm["lost_us"], mm["share"]) == (2, 400.0, 200.0, 200.0 / 611.0)
    assert mm["why"] == f"refused, mul → mm: {FITS_NOT}"
    assert rows["forward0_gelu"]["why"].startswith("tried and lost, tanh → mul: one kernel took 90 µs")
    assert rows["forward0_gelu"]["off"] == 3.0
    assert rows["softmax"]["why"] is None
    assert rows["odd"]["why"] == "no floor: the operator table does not know its work"
    assert rows["odd"]["lost_us"] == 20.0
    assert rows["t"]["why"] == "a view: it moves no data, this is the host's time for the call"


def test_the_terminal_marks_what_has_no_reason_and_what_was_predicted_wrong(tmp_path: Path) -> None:
    answer = ask_view(write_lost(tmp_path / "run.duckdb"), LOST, 3)
    text = printed(show_view(LOST, answer), colours=True)
    lines = {name: line for line in text.splitlines() for name in ("mm", "forward0_gelu", "softmax") if name in line}
    assert "2 × mm" in lines["mm"] and "32.7 %" in lines["mm"] and "odd" not in text
    # Softmax loses more than 1 % without a reason, the prediction of the region is off, and mm has a reason.
    assert "takes 1.7 ×" in lines["softmax"] and "3.00×" in lines["forward0_gelu"]
    assert ["\x1b[1;31m" in lines[name] for name in ("softmax", "forward0_gelu", "mm")] == [True, True, False]


def test_the_page_has_the_list(tmp_path: Path) -> None:
    path = write_lost(tmp_path / "run.duckdb")
    page = write_page(path, path.with_suffix(".html")).read_text("utf-8")
    assert 'data-view="lost"' in page and "FROM lost_time" in page
