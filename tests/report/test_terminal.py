"""The terminal view says the figures of DESIGN's definitions, exactly, and shows text as text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.printing import printed
from tests.report.sample import CEILINGS, DIMS, measurements, program, verified, write_sample
from tilewright.records.measurement import Measurement, Verified
from tilewright.records.program import Cost, Decision, Fallback, MemoryPoint, Operator, OperatorClass, Program, Region
from tilewright.report.optimised import show_optimize
from tilewright.report.terminal import as_json, show_explain
from tilewright.store import Run

N, M = 4000, 5000


def naive_softmax(planned: bool = True) -> Program:
    """`x.max(dim=1)[0]` and four steps more: the reference case of the definitions."""
    steps: list[tuple[str, str, OperatorClass, str, str]] = [
        ("max_1", "aten.max.dim", "reduction", "M*N", "N"),
        ("sub", "aten.sub.Tensor", "pointwise", "M*N + N", "M*N"),
        ("exp", "aten.exp", "pointwise", "M*N", "M*N"),
        ("sum_1", "aten.sum.dim_IntList", "reduction", "M*N", "N"),
        ("div", "aten.div.Tensor", "pointwise", "M*N + N", "M*N"),
    ]
    sizes = {"M*N": M * N, "M*N + N": M * N + N, "N": N}
    operators = []
    for index, (name, target, kind, reads, writes) in enumerate(steps):
        unused = N if index == 0 else 0
        cost = Cost(
            reads=sizes[reads],
            writes=sizes[writes],
            unused=unused,
            bytes_read=4 * sizes[reads],
            bytes_written=4 * sizes[writes] + 8 * unused,
            reads_symbolic=reads,
            writes_symbolic=writes,
            unused_symbolic="N" if unused else None,
        )
        operators.append(
            Operator(
                graph="forward",
                stage="before",
                index=index,
                name=name,
                target=target,
                operator_class=kind,
                shape=(N,) if writes == "N" else (N, M),
                dtype="float32",
                cost=cost,
                floor_us=1000.0,
                bound="DRAM",
                region="softmax" if planned else None,
                source=f"naive_softmax.py:{12 + index}: the line of {name}",
            )
        )
    fused = Cost(
        reads=M * N,
        writes=M * N,
        bytes_read=4 * M * N,
        bytes_written=4 * M * N,
        reads_symbolic="M*N",
        writes_symbolic="M*N",
    )
    regions = [Region("forward", "softmax", tuple(op.name for op in operators), fused, "c++", "", 1500.0)]
    if not planned:
        return Program(operators + [replace(op, stage="after") for op in operators])
    launch = replace(operators[1], stage="after", name="softmax", target="kernel", cost=fused, floor_us=1500.0)
    return Program([*operators, launch], regions)


def test_the_unused_values_have_a_line_of_their_own() -> None:
    lines = printed(show_explain(naive_softmax(), [], {})).splitlines()
    (line,) = [line for line in lines if "unused: indices of max" in line]
    assert line.split() == ["unused:", "indices", "of", "max", "N"]


def test_what_fusion_saves_is_the_difference_of_the_totals() -> None:
    text = printed(show_explain(naive_softmax(), [], {"N": N, "M": M}))
    # 8·N·M + 4·N values of 4 bytes and N indices of 8, less 2·N·M.
    assert "vanished: 480 MB\n  reads 4·N·M + 2·N  writes 2·N·M + 2·N" in text.replace(" \n", "\n")
    assert "vanished" not in printed(show_explain(naive_softmax(planned=False), [], {}))


def test_the_peak_of_memory_stands_with_the_totals() -> None:
    program = naive_softmax()
    program.memory = [
        MemoryPoint("forward", stage, 0, "exp", live) for stage, live in (("before", 8_000_000), ("after", 2_000_000))
    ]
    text = printed(show_explain(program, [], {}))
    assert "peak of live memory: 8.00 MB before fusion, 2.00 MB after" in text
    assert "peak of live memory" not in printed(show_explain(naive_softmax(planned=False), [], {}))


def test_matrix_products_are_summed_on_their_own() -> None:
    program = naive_softmax()
    cost = Cost(flops=2 * N * N * M, flops_symbolic="2*M*N**2", reads_symbolic="0", writes_symbolic="0")
    program.operators.append(replace(program.operators[0], name="mm", operator_class="compute", cost=cost))
    text = printed(show_explain(program, [], {"N": N, "M": M}))
    assert "matmul FLOPs 2·N²·M\n" in text.replace(" \n", "\n")
    assert text.count("matmul FLOPs") == 1


def test_an_unknown_cost_is_never_zero() -> None:
    broken = naive_softmax(planned=False)
    broken.operators[2] = replace(broken.operators[2], cost=Cost(provenance="unknown"), floor_us=None)
    text = printed(show_explain(broken, [], {}))
    (line,) = [line for line in text.splitlines() if line.startswith("2  exp")]
    assert line.count("unknown") == 3
    assert "reads 4·M·N + 2·N" in text
    assert "and 1 of unknown cost, in none of these sums" in text


def test_a_term_without_a_formula_leaves_the_number() -> None:
    plain = naive_softmax(planned=False)
    cost = replace(plain.operators[2].cost, reads_symbolic=None)
    plain.operators[2] = replace(plain.operators[2], cost=cost)
    assert "reads 100 M  writes 3·M·N + 2·N" in printed(show_explain(plain, [], {}))


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_totals_and_floors_are_whole_at_any_width(width: int) -> None:
    text = printed(show_explain(naive_softmax(), CEILINGS, {"N": N, "M": M}), width)
    assert "reads 5·N·M + 2·N  writes 3·N·M + 2·N" in text
    assert text.count("1.00 ms") == 5
    assert all(len(line) <= width for line in text.splitlines())
    assert ("naive_softmax.py:12: the line of max_1" in text) == (width == 200)


def test_regions_decisions_and_fallbacks_are_shown_with_their_reasons() -> None:
    text = printed(show_explain(program(), CEILINGS, DIMS), 250)
    for graph in ("forward", "backward"):
        assert f"\n{graph}" in text
    (line,) = [line for line in text.splitlines() if line.startswith("attention ")]
    assert "scores, scale, softmax, drop_p, mix" in line and "8.57 ms" in line
    assert "taken" in text and "the value stays in registers" in text
    assert "tried and lost" in text and "as an epilogue it was slower" in text
    assert "runs as PyTorch runs it: aten.native_layer_norm_backward" in text
    assert "matmul fp32 0.186 TFLOP/s (datasheet)" in text


def many(count: int) -> Program:
    """Operators of rising floors, and a decision on each pair of neighbours, of two reasons."""
    first = naive_softmax(planned=False).operators[0]
    operators = [replace(first, name=f"op_{at}", index=at, floor_us=100.0 + at) for at in range(count)]
    decisions = [
        Decision("forward", f"op_{at}", f"op_{at + 1}", "refused", f"reason {at % 2}", bytes_saved=10**6)
        for at in range(count - 1)
    ]
    return Program(operators, [], decisions)


def test_a_summary_has_the_dearest_and_one_row_for_each_reason() -> None:
    text = printed(show_explain(many(31), [], {}))
    assert [f"op_{at} " in text for at in (20, 21, 30)] == [False, True, True]
    assert "and 21 operators with lower floors; --all has them" in text
    refused = [line for line in text.splitlines() if line.startswith("refused")]
    assert [("and 14 more" in line, "15.0 MB" in line or "15 MB" in line) for line in refused] == [(True, True)] * 2
    assert "before fusion: 31 launches" in text


def test_everything_is_all_of_it() -> None:
    text = printed(show_explain(many(31), [], {}, everything=True))
    assert "--all" not in text and sum(line.startswith("refused") for line in text.splitlines()) == 30
    assert all(f"op_{at} " in text for at in range(31))


def test_text_is_neither_markup_nor_control() -> None:
    hostile = "[bold red]x[/]\x1b[2J\r\x07"
    operator = replace(naive_softmax().operators[0], name=hostile, source=hostile, region=None)
    view = Program(
        [operator],
        [],
        [Decision("forward", hostile, hostile, "refused", hostile, source=hostile)],
        [],
        [Fallback(hostile, hostile, hostile)],
    )
    text = printed(show_explain(view, [], {hostile: 1}))
    assert "[bold red]x[/]" in text
    assert not {"\x1b", "\r", "\x07"} & set(text)


def written(path: Path, verified: Sequence[Verified] = (), measured: Sequence[Measurement] = ()) -> Path:
    with Run.create(path, command="c", target="t", case="k") as run:
        run.add_verified(verified)
        run.add_measurements(measured)
    return path


def test_nothing_to_show(tmp_path: Path) -> None:
    assert printed(show_explain(Program(), [], {})).strip() == ""
    assert printed(show_optimize(written(tmp_path / "run.duckdb"), 5)).strip() == ""


def test_measurements_beside_their_peers(tmp_path: Path) -> None:
    text = printed(show_optimize(write_sample(tmp_path / "run.duckdb"), 5))
    (line,) = [line for line in text.splitlines() if "fwd+bwd" in line and "tilewright" in line]
    figures = ["block", "112 ms", "110 ms", "115 ms", "1.83×", "1.17×", "63.0 MB"]
    assert all(figure in line for figure in figures)
    assert "18 of 18 tensors within the numbers contract" in text
    assert "peak of live memory" in text and "forward" in text


def test_peers_are_those_of_the_same_case(tmp_path: Path) -> None:
    def row(impl: str, case: str, median: float) -> Measurement:
        return Measurement("softmax", case, impl, "fwd", median, median, median, 10)

    rows = [row("tilewright", "a", 10.0), row("eager", "b", 1000.0), row("tilewright", "b", 100.0)]
    text = printed(show_optimize(written(tmp_path / "run.duckdb", measured=rows), 5))
    assert [line.count("10.0×") for line in text.splitlines() if "tilewright" in line] == [0, 1]


def test_every_tensor_that_fails_is_shown_first(tmp_path: Path) -> None:
    rows = [replace(tensor, ok=False, error=math.nan) for tensor in verified()[12:]] + verified()[:12]
    text = printed(show_optimize(written(tmp_path / "run.duckdb", rows[::-1]), 5))
    holds = [line.split()[-1] for line in text.splitlines() if line.startswith(("fwd", "bwd"))]
    assert holds == ["False"] * 6 + ["True"] * 4 and "12 of 18 tensors" in text


def test_json_has_every_field_and_is_strict() -> None:
    rows = [replace(verified()[0], error=math.nan, max_error=math.inf)]
    document = json.loads(as_json(program(), CEILINGS, measurements(), rows))
    assert document["operators"][0]["cost"]["reads_symbolic"] == "B*S*D + 2*D"
    assert document["operators"][0]["shape"] == [4, 512, 256]
    assert len(document["decisions"]) == len(program().decisions)
    assert document["verified"][0]["error"] is None and document["verified"][0]["max_error"] is None
    assert document["measurements"][0]["impl"] == "tilewright"
