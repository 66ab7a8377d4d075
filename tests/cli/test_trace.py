"""`tilewright trace`, and `tilewright sql` on what it loaded."""

import gzip
import json
from pathlib import Path

from benchmarks import synthetic_trace
from tests.cli.commands import Tilewright

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"


def test_a_trace_becomes_the_latest_run(tilewright: Tilewright, home: Path) -> None:
    ended = tilewright("trace", str(FIXTURES / "eager_step.json.gz"))
    assert ended.code == 0, ended.err
    assert "2,557" in ended.out and "chrome" in ended.out
    assert 'tilewright sql "SELECT file, reason, count(*) FROM reject GROUP BY ALL"' in ended.out
    assert Path(ended.lines[-1].removeprefix("run  ")).parent == home / "runs"
    asked = tilewright("sql", "--json", "SELECT AVG(dur)/1e9 AS seconds FROM slice WHERE name='aten::addmm'")
    assert json.loads(asked.out) == [{"seconds": 3.801988888888889e-05}]


def test_ranks(tilewright: Tilewright, tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        plain = tmp_path / f"rank{rank}.json"
        synthetic_trace.write(plain, 0.01, rank=rank, world=2)
        paths.append(plain.with_suffix(".json.gz"))
        paths[-1].write_bytes(gzip.compress(plain.read_bytes()))
    ended = tilewright("trace", "--json", *map(str, paths))
    files = json.loads(ended.out)["files"]
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
