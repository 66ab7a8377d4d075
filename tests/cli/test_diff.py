"""`tilewright diff`, and the accounting that `tilewright trace` shows."""

import json
from pathlib import Path

from tests.cli.commands import Tilewright
from tests.trace.kineto import Trace
from tilewright.store import runs_dir


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
    assert "cannot tell" in ended.out and "2 steps are too few" in ended.out
    assert "aten::exp" in ended.out and "+300 µs" in ended.out
    text = tilewright("diff", before, after, "--json").out
    assert "Infinity" not in text
    found = json.loads(text)
    assert found["operators"][0]["operator"] in ("aten::exp", "cudaDeviceSynchronize")
    assert found["step"]["verdict"] == "cannot tell"


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
    assert "a step: 1.00 ms → 1.25 ms" in ended.out and "2 steps are too few" in ended.out
    assert not list(runs_dir().glob("*.duckdb"))


def test_a_run_that_is_missing_or_none(tilewright: Tilewright, tmp_path: Path) -> None:
    ended = tilewright("diff", str(tmp_path / "no.duckdb"), str(tmp_path))
    assert ended.code == 9 and "tilewright: no run" in ended.err
