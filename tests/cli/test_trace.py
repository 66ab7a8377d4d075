"""`tilewright trace`, `diff` and `report`, and `tilewright sql` on what was loaded."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import synthetic_trace
from tests.cli.commands import Tilewright, documented_keys
from tests.trace.kineto import Trace
from tests.trace.training_trace import TrainingTrace, load
from tilewright.store import runs_dir

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"


def test_a_trace_becomes_the_latest_run(tilewright: Tilewright, home: Path) -> None:
    ended = tilewright("trace", str(FIXTURES / "eager_step.json.gz"))
    assert ended.code == 0, ended.err
    assert "2,557" in ended.out and "chrome" in ended.out
    assert 'tilewright sql "SELECT file, reason, count(*) FROM reject GROUP BY ALL"' in ended.out
    assert Path(ended.lines[-1].removeprefix("run  ")).parent == home / "runs"
    asked = tilewright("sql", "--json", "SELECT AVG(dur)/1e9 AS seconds FROM slice WHERE name='aten::addmm'")
    assert json.loads(asked.out) == [{"seconds": 3.801988888888889e-05}]


def test_a_trace_of_a_host_shows_its_operators(tilewright: Tilewright, tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}
        for name, ts, dur in [("aten::linear", 10, 9), ("aten::addmm", 11, 6), ("aten::gelu", 20, 2)]
    ]
    (tmp_path / "host.json").write_text(json.dumps({"traceEvents": events}))
    ended = tilewright("trace", str(tmp_path / "host.json"))
    rows = [line.split() for line in ended.lines if line.startswith("aten::")]
    times = [("aten::addmm", "6.00"), ("aten::linear", "3.00"), ("aten::gelu", "2.00")]
    assert [(row[0], row[3]) for row in rows] == times


def test_ranks(tilewright: Tilewright, tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        plain = tmp_path / f"rank{rank}.json"
        synthetic_trace.write(plain, 0.01, rank=rank, world=2)
        paths.append(plain.with_suffix(".json.gz"))
        paths[-1].write_bytes(gzip.compress(plain.read_bytes()))
    ended = tilewright("trace", "--json", *map(str, paths))
    document = json.loads(ended.out)
    assert document.keys() == documented_keys("trace")
    files = document["files"]
    assert [(file["rank"], file["world_size"], file["rejects"]) for file in files] == [(0, 2, 0), (1, 2, 0)]


def test_quiet(tilewright: Tilewright) -> None:
    ended = tilewright("trace", "--quiet", str(FIXTURES / "phases.json"))
    assert len(ended.lines) == 1 and ended.lines[0].startswith("run  ")


def test_what_is_no_trace(tilewright: Tilewright, home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no trace")
    for path in (tmp_path / "notes.txt", tmp_path / "missing.json"):
        ended = tilewright("trace", str(path))
        assert ended.code == 10
        assert ended.err.startswith("tilewright: ") and path.name in ended.err and ended.err.count("\n") == 1
    assert list((home / "runs").iterdir()) == []


def test_damage_is_said(tilewright: Tilewright, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_bytes((FIXTURES / "phases.json").read_bytes()[:2000])
    ended = tilewright("trace", str(tmp_path / "cut.json"))
    assert ended.code == 0
    assert "the file ends early" in ended.out


def test_a_command_line_without_files(tilewright: Tilewright) -> None:
    assert tilewright("trace").code == 2


def traced(tilewright: Tilewright, folder: Path, length: int) -> tuple[str, str]:
    """Load a trace of two steps with one kernel of `length` µs each; the run, and what was printed."""
    trace = Trace()
    for number in range(2):
        at = number * 1000
        trace.step(number, at, at + 1000)
        trace.frame("train.py(3): step", at + 1, at + 999)
        trace.operator("aten::exp", at + 5, at + 40, dims=[[1 << 20]])
        trace.launch(at + 10, at + 20, at + 20 + length, grid=(1024, 1, 1))
        trace.call("cudaDeviceSynchronize", at + 50, at + 60 + length)
    ended = tilewright("trace", str(trace.write(folder)))
    assert ended.code == 0, ended.err
    return str(max(runs_dir().glob("*.duckdb"))), ended.out


def test_two_runs(tilewright: Tilewright, tmp_path: Path) -> None:
    (before, _), (after, _) = (traced(tilewright, tmp_path, length) for length in (300, 600))
    ended = tilewright("diff", before, after)
    assert ended.code == 0, ended.err
    assert "cannot tell" in ended.out and "a run has 2 timed steps and needs 20" in ended.out
    assert "aten::exp" in ended.out and "+300 µs" in ended.out
    text = tilewright("diff", before, after, "--json").out
    assert "Infinity" not in text
    found = json.loads(text)
    assert found.keys() == documented_keys("diff")
    assert found["operators"][0]["operator"] in ("aten::exp", "cudaDeviceSynchronize")
    assert found["step"]["verdict"] == "cannot tell"
    assert found["step"].keys() == documented_keys("a row of `step`, `device` and `change`")
    assert all(row.keys() == documented_keys("a row of the `operators` of two runs") for row in found["operators"])


def test_two_traces_leave_no_run_behind(tilewright: Tilewright, tmp_path: Path) -> None:
    traces = []
    for name, microseconds in (("before", 1000), ("after", 1250)):
        trace, folder = Trace(), tmp_path / name
        folder.mkdir()
        for number in range(2):
            trace.step(number, number * microseconds, (number + 1) * microseconds)
        traces.append(str(trace.write(folder)))
    ended = tilewright("diff", *traces)
    assert ended.code == 0, ended.err
    assert "a step: 1.00 ms → 1.25 ms" in ended.out and "a run has 2 timed steps and needs 20" in ended.out
    assert not list(runs_dir().glob("*.duckdb"))


def test_a_run_that_is_missing_or_none(tilewright: Tilewright, tmp_path: Path) -> None:
    ended = tilewright("diff", str(tmp_path / "no.duckdb"), str(tmp_path))
    assert ended.code == 9 and "tilewright: no run" in ended.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return load(TrainingTrace(2).write(tmp_path / "trace.json"), tmp_path / "run.duckdb")


def test_flame_graphs_are_files_of_their_own(tilewright: Tilewright, run: Path, tmp_path: Path) -> None:
    svg, scope = tmp_path / "flame.svg", tmp_path / "run.speedscope.json"
    ended = tilewright("report", "--run", str(run), "--flame", str(svg), "--speedscope", str(scope))
    assert (ended.code, ended.out) == (0, f"flame graph  {svg}\nspeedscope  {scope}\n")
    assert svg.read_text("utf-8").startswith("<svg ") and len(json.loads(scope.read_text())["profiles"]) == 2
    assert not run.with_suffix(".html").exists()


def test_a_trace_without_events_is_no_run(tmp_path, tilewright, home) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"traceEvents": []}')
    ended = tilewright("trace", str(path))
    assert ended.code == 10 and ended.err == f"tilewright: no event in {path}\n"
    assert not list(home.rglob("*.duckdb"))
