"""The terminal view says the figures of DESIGN's definitions, exactly, and shows text as text."""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewright
from tests.report.printing import printed
from tests.report.sample import CEILINGS, DIMS, measurements, program, verified, write_sample
from tilewright import backend
from tilewright.records.measurement import Measurement, Verified
from tilewright.records.program import Cost, Decision, Fallback, Program
from tilewright.records.progress import is_watched, tell, watched
from tilewright.report import progress
from tilewright.report.optimised import show_optimize
from tilewright.report.progress import ProgressLine, progress_of
from tilewright.report.terminal import as_json, show_explain
from tilewright.store import Run
from tilewright.verbs import explanation, optimisation


def forward() -> Program:
    made = program()
    return Program([op for op in made.operators if op.graph == "forward"], made.regions, memory=made.memory[:26])


def shown(view: Program, width: int = 200) -> str:
    return "\n".join(line.rstrip() for line in printed(show_explain(view, CEILINGS, DIMS), width).splitlines())


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_totals_and_floors_are_whole_at_any_width(width: int) -> None:
    text = shown(forward(), width)
    assert "reads 3·B·S²·H + 12·B·S·D + 2·D² + 4·D writes 3·B·S²·H + 9·B·S·D" in " ".join(text.split())
    # The scale and the softmax: 67 MB each way at 11.4 GB/s.
    assert text.count("5.89 ms") == 2
    assert all(len(line) <= width for line in text.splitlines())
    assert ("examples/transformer_block.py:29: p = a.softmax(-1)" in text) == (width == 200)


def test_totals_before_and_after_fusion_and_what_fusion_saves() -> None:
    text = shown(forward())
    assert "before fusion: 12 launches, 246 MB moved" in text and "after fusion: 7 launches, 32.0 MB moved" in text
    assert "saved by fusion: 214 MB\n  reads 3·B·S²·H + 4·B·S·D  writes 3·B·S²·H + 2·B·S·D\n" in text
    assert "  matmul FLOPs 4·B·S²·D + 4·B·S·D²\n" in text
    assert "peak of live memory: 130 MB before fusion, 78.0 MB after" in text
    unplanned = [op for op in forward().operators if op.stage == "before"]
    text = shown(Program(unplanned + [replace(op, stage="after") for op in unplanned]))
    assert "saved by fusion" not in text and "peak of live memory" not in text


def test_an_unknown_cost_is_never_zero() -> None:
    broken = forward()
    broken.operators[9] = replace(broken.operators[9], cost=Cost(provenance="unknown"), floor_us=None)
    text = shown(broken)
    (line,) = [line for line in text.splitlines() if line.startswith(" 9  res")]
    assert line.count("unknown") == 3
    assert "reads 3·B·S²·H + 10·B·S·D + 2·D² + 4·D" in text
    assert "and 1 of unknown cost, in none of these sums" in text


def test_a_term_without_a_formula_leaves_the_number() -> None:
    plain = forward()
    plain.operators[9] = replace(plain.operators[9], cost=replace(plain.operators[9].cost, reads_symbolic=None))
    assert "reads 31.6 M  writes 3·B·S²·H + 9·B·S·D" in shown(plain)


def test_regions_decisions_and_fallbacks_are_shown_with_their_reasons() -> None:
    text = printed(show_explain(program(), CEILINGS, DIMS), 250)
    for graph in ("forward", "backward"):
        assert f"\n{graph}" in text
    (line,) = [line for line in text.splitlines() if line.startswith("attention ")]
    assert "scores, scale, softmax, mix" in line and "3.63 ms" in line
    assert "taken" in text and "the value stays in registers" in text
    assert "tried and lost" in text and "as an epilogue it was slower" in text
    assert "runs as PyTorch runs it: aten.native_layer_norm_backward" in text
    assert "matmul fp32 186 GFLOP/s (datasheet)" in text


def many(count: int) -> Program:
    """Operators of rising floors, and a decision on each pair of neighbours, of two reasons."""
    first = program().operators[0]
    operators = [replace(first, name=f"op_{at}", index=at, floor_us=100.0 + at) for at in range(count)]
    decisions = [
        Decision("forward", f"op_{at}", f"op_{at + 1}", "refused", f"reason {at % 2}", bytes_saved=10**6)
        for at in range(count - 1)
    ]
    return Program(operators, [], decisions)


def test_a_summary_has_the_most_expensive_and_one_row_for_each_reason() -> None:
    text = shown(many(31))
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
    operator = replace(program().operators[0], name=hostile, source=hostile)
    decision = Decision("forward", hostile, hostile, "refused", hostile, source=hostile)
    view = Program([operator], [], [decision], [], [Fallback(hostile, hostile, hostile)])
    text = printed(show_explain(view, [], {hostile: 1}))
    assert "[bold red]x[/]" in text
    assert not {"\x1b", "\r", "\x07"} & set(text)


def written(path: Path, verified: Sequence[Verified] = (), measured: Sequence[Measurement] = ()) -> Path:
    with Run.create(path, command="c", target="t", case="k") as run:
        run.add(verified)
        run.add(measured)
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
    # The outcome of the case that has a peer, then a row for each case.
    assert [line.count("10.0×") for line in text.splitlines() if "tilewright" in line] == [1, 0, 1]


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


def test_a_line_says_the_stage_what_is_counted_and_the_seconds() -> None:
    line = ProgressLine("planning")
    assert str(line) == "planning"
    line.count("operators tried for fusion", 1300, 5000)
    line._began -= 14
    assert str(line) == "planning, 1,300 of 5,000 operators tried for fusion, 14 s"
    line.count("calls recorded", 2000, None)
    assert str(line) == "planning, 2,000 calls recorded, 14 s"
    line.enter("compiling")
    assert str(line) == "compiling"


def test_why_flops_grow_is_said() -> None:
    said = "tilewright.product computes one of fp32 as 6 of 16 bits"
    linear = tilewright.explain(torch.nn.Linear(2048, 4096), torch.randn(4096, 2048, device="meta"), on="h200")
    before, after = printed(linear, 250).split("after fusion", 1)
    assert said not in before and said in after
    assert said not in printed(tilewright.explain(torch.nn.Linear(8, 8), torch.randn(8, 8), on="cpu"), 250)


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    reads, writes = os.openpty()
    shown = b""
    with os.fdopen(writes, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_of("compiling"):
            tell("kernels compiled", 3, 12)
            while b"3 of 12 kernels compiled" not in shown:
                shown += os.read(reads, 4096)
    os.close(reads)
    assert b"compiling" in shown and not is_watched()


def test_a_compilation_says_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def noted(what: str) -> Iterator[Callable[[str], None]]:
        with watched(lambda *counted: told.append(what)):
            yield told.append

    monkeypatch.setattr(backend, "progress_of", noted)
    with backend.recording():
        torch._dynamo.reset()
        torch.compile(lambda x: torch.sin(x) * 2 + 1, backend="tilewright")(torch.randn(7))
    assert told and all("the graph at test_terminal.py" in what for what in told)


def test_a_file_gets_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress_of("compiling"):
        assert not is_watched()
    assert capfd.readouterr() == ("", "")


def test_a_cell_shows_how_far_it_is_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "in_kernel", lambda: True)
    begun, shown = threading.Event(), []

    def display(of: dict[str, str]) -> Callable[[dict[str, str]], None]:
        shown.append(of["text/plain"])
        begun.set()
        return lambda other: shown.append(other["text/plain"])

    monkeypatch.setattr(progress, "display", display)
    with progress_of("optimizing Net") as stage:
        stage("timing")
        assert begun.wait(60)
        with progress_of("compiling"):
            assert is_watched()
    assert shown[0].startswith("optimizing Net") and shown[-1] == "" and not is_watched()


def test_verbs_say_in_which_stage_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def noted(what: str) -> Iterator[Callable[[str], None]]:
        with watched(lambda *counted: told.append(f"{what}: {counted[0]}")):
            yield lambda stage: told.append(f"{what}: {stage}")

    for verb in (explanation, optimisation):
        monkeypatch.setattr(verb, "progress_of", noted)
    monkeypatch.setattr(optimisation, "measure", lambda *_, **__: [])
    tilewright.explain(torch.nn.Tanh(), torch.randn(7), on="h200")
    tilewright.optimize(torch.nn.Tanh(), torch.randn(7))
    assert any(line.startswith("explaining Tanh: ") for line in told)
    assert "optimizing Tanh: verifying against float64" in told
