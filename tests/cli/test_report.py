"""`tilewright report`: the page, the flame graph and the speedscope file of a run."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Tilewright
from tests.trace.training_trace import TrainingTrace, load


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return load(TrainingTrace(2).write(tmp_path / "trace.json"), tmp_path / "run.duckdb")


def test_the_page_goes_beside_the_run_or_where_it_is_told(tilewright: Tilewright, run: Path, tmp_path: Path) -> None:
    assert tilewright("report", "--run", str(run)).out == f"page  {run.with_suffix('.html')}\n"
    assert (
        tilewright("report", "--run", str(run), "--out", str(tmp_path / "p.html")).out
        == f"page  {tmp_path / 'p.html'}\n"
    )
    assert (tmp_path / "p.html").read_text("utf-8") == run.with_suffix(".html").read_text("utf-8")


def test_flame_graphs_are_files_of_their_own(tilewright: Tilewright, run: Path, tmp_path: Path) -> None:
    svg, scope = tmp_path / "flame.svg", tmp_path / "run.speedscope.json"
    ended = tilewright("report", "--run", str(run), "--flame", str(svg), "--speedscope", str(scope))
    assert (ended.code, ended.out) == (0, f"flame graph  {svg}\nspeedscope  {scope}\n")
    assert svg.read_text("utf-8").startswith("<svg ") and len(json.loads(scope.read_text())["profiles"]) == 2
    assert not run.with_suffix(".html").exists()
