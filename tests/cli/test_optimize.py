"""`tilewright optimize` end to end, what works on its run, and Ctrl-C in the middle of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import MODELS, OWN_PATH, WITHOUT_MEASURED_CEILINGS, Tilewright
from tests.waiting import HANG_S, until
from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.store import query, read_program, read_rows


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a home with one finished run, and how the command that made it ended."""
    folder = tmp_path_factory.mktemp("optimized")
    (folder / "models.py").write_text(MODELS)
    environment = {"TILEWRIGHT_HOME": str(folder / "home"), "TILEWRIGHT_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEASURED_CEILINGS, "optimize", "models.py:small", "--seconds", "0.2"],
        cwd=folder,
        env=os.environ | OWN_PATH | environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return {**environment, "code": str(done.returncode), "out": done.stdout, "err": done.stderr}


@pytest.fixture
def with_run(optimized: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, in the home that commands of this test use."""
    for name in ("TILEWRIGHT_HOME", "TILEWRIGHT_CACHE"):
        monkeypatch.setenv(name, optimized[name])
    return sorted(Path(optimized["TILEWRIGHT_HOME"]).rglob("*.duckdb"))[-1]


def test_optimize_proves_measures_and_says_where_it_put_that(optimized: dict[str, str], with_run: Path) -> None:
    assert (optimized["code"], optimized["err"]) == ("0", "")
    out = optimized["out"]
    assert "2 of 2 tensors within the numbers contract" in out
    for impl in ("eager", "inductor", "tilewright"):
        assert f" {impl} " in out
    last, page = out.splitlines()[-2:]
    assert last == f"run   {with_run}" and page == f"page  {with_run.with_suffix('.html')}"
    assert "small gelu" in Path(page.removeprefix("page  ")).read_text()
    assert with_run.stat().st_mode & 0o077 == 0
    assert not list(with_run.parent.glob(".run-*"))


def test_the_run_holds_all_that_was_learned(with_run: Path) -> None:
    program = read_program(with_run)
    assert query(with_run, 'SELECT "case", dims FROM run')[1] == [("small gelu", {"N": 64, "M": 32})]
    assert {op.stage for op in program.operators} == {"before", "after"}
    assert all(op.measured_us for op in program.operators if op.operator_class != "layout")
    assert all(region.measured_us and region.predicted_us for region in program.regions)
    tried = [row for row in program.decisions if row.verdict in ("taken", "tried and lost")]
    assert tried and all(row.measured_us and row.predicted_us for row in tried)
    assert {row.impl for row in read_rows(with_run, Measurement)} == {"eager", "inductor", "tilewright"}
    assert all(tensor.ok for tensor in read_rows(with_run, Verified)) and read_rows(with_run, Ceiling)


def test_sql_and_report_work_on_it(with_run: Path, tilewright: Tilewright, tmp_path: Path) -> None:
    ended = tilewright("sql", "SELECT graph, count(*) AS n FROM region GROUP BY graph ORDER BY graph", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out) == [{"graph": "backward", "n": 1}, {"graph": "forward", "n": 1}]
    table = tilewright("sql", "SELECT name FROM region WHERE graph = 'forward'")
    assert table.code == 0 and "forward0_mul_add_tanh" in table.out
    written = tilewright("report", "--out", str(tmp_path / "page.html"))
    assert (written.code, written.out) == (0, f"page  {tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert tilewright("report", "--run", str(with_run)).lines == [f"page  {with_run.with_suffix('.html')}"]


def test_an_interrupted_optimize_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/compiler.pid\nexec sleep 300\n")
    compiler.chmod(0o755)
    environment = (
        os.environ
        | OWN_PATH
        | {"TILEWRIGHT_HOME": str(tmp_path / "home"), "TILEWRIGHT_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    )
    command = [sys.executable, "-c", WITHOUT_MEASURED_CEILINGS, "optimize", "models.py:small"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: (tmp_path / "compiler.pid").exists() and (tmp_path / "compiler.pid").read_text().strip() != "")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "tilewright: interrupted; nothing was left half-written"
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []
    assert not list((tmp_path / "home").rglob("*.partial"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]
    assert not Path(f"/proc/{(tmp_path / 'compiler.pid').read_text().strip()}").exists()


def test_an_interrupt_while_measuring_leaves_nothing(
    tilewright: Tilewright, models: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert list(home.rglob("*.partial"))
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.verbs.optimisation.measure", interrupted)
    ended = tilewright("optimize", f"{models}:small")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.strip() == "tilewright: interrupted; nothing was left half-written"
    assert [path for path in home.rglob("*") if path.is_file() or path.suffix == ".partial"] == []
