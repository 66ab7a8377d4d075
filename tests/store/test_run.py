"""A run holds exactly what was put in, comes into being whole or not at all, and is its owner's."""

import math
import os
import signal
import stat
import time
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import processes
from tests.waiting import HANG_S
from tilewright.records.errors import StoreError
from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.records.program import Cost, Decision, Fallback, MemoryPoint, Operator, Program, Region
from tilewright.store import Run, latest_run, new_run_path, query, read_program, read_rows, runs_dir

HOSTILE = "</script><script>alert(1)</script> '; DROP TABLE run; -- \" \x00 \u2028 é 🙂"


def create(path: Path) -> Run:
    return Run.create(path, command="tilewright optimize a.py:case", target="a.py:case", case="block")


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, as wide as its column allows."""
    if kind is str:
        return st.one_of(st.text(max_size=20), st.just(HOSTILE))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-(2**62), 2**62 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(strategy(get_args(kind)[0]), max_size=4).map(tuple)
    if get_origin(kind) is UnionType:
        return st.one_of(*(st.none() if member is NoneType else strategy(member) for member in get_args(kind)))
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: strategy(hint) for name, hint in hints.items()})


programs = st.builds(
    Program,
    operators=st.lists(strategy(Operator), max_size=3),
    regions=st.lists(strategy(Region), max_size=3),
    decisions=st.lists(strategy(Decision), max_size=3),
    memory=st.lists(strategy(MemoryPoint), max_size=3),
    fallbacks=st.lists(strategy(Fallback), max_size=3),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    programs,
    st.lists(strategy(Measurement), max_size=3),
    st.lists(strategy(Ceiling), max_size=3),
    st.lists(strategy(Verified), max_size=3),
)
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory,
    program: Program,
    measurements: list[Measurement],
    ceilings: list[Ceiling],
    verified: list[Verified],
) -> None:
    path = tmp_path_factory.mktemp("run") / "a.duckdb"
    with create(path) as run:
        run.add_program(program)
        run.add(measurements)
        run.add(ceilings)
        run.add(verified)
    assert read_program(path) == program
    assert read_rows(path, Measurement) == measurements
    assert read_rows(path, Ceiling) == ceilings
    assert read_rows(path, Verified) == verified


def test_nan_and_a_lone_surrogate_survive(tmp_path: Path) -> None:
    row = Verified("fwd", "bad\udc80", "float32", math.nan, 0.0, math.inf, 0.0, 1.0, 1.0, False)
    with create(tmp_path / "a.duckdb") as run:
        run.add([row])
    (back,) = read_rows(tmp_path / "a.duckdb", Verified)
    assert math.isnan(back.error) and math.isinf(back.max_error)
    assert back.tensor == "bad?"


def test_what_was_asked_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    before = time.time()
    with Run.create(
        path,
        command=HOSTILE,
        target="m:f",
        case="naïve",
        dims={"N": 4000, "M": 5000},
        machine={"CPU": "x86 <b>", "threads": "2"},
    ):
        pass
    _, ((*asked, dims, machine, created),) = query(
        path, 'SELECT command, target, "case", dims, machine, epoch_us(created) / 1e6 FROM run'
    )
    assert asked == [HOSTILE, "m:f", "naïve"]
    assert (dims, machine) == ({"N": 4000, "M": 5000}, {"CPU": "x86 <b>", "threads": "2"})
    assert isinstance(created, float) and before - 1 < created < time.time() + 1


def test_rows_added_in_several_calls_keep_their_order(tmp_path: Path) -> None:
    with create(tmp_path / "a.duckdb") as run:
        for index in range(5):
            run.add_program(Program(memory=[MemoryPoint("forward", "before", index, f"v{index}", index)]))
    assert [point.index for point in read_program(tmp_path / "a.duckdb").memory] == list(range(5))


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), create(tmp_path / "a.duckdb") as run:
            run.add([Ceiling("cpu", "copy", "", 10.0, "GB/s", "measured")])
            raise error
        assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_survives_a_failed_one(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    with create(path):
        pass
    before = path.read_bytes()
    with pytest.raises(ValueError, match="stop"), create(path):
        raise ValueError("stop")
    assert path.read_bytes() == before


def test_nothing_has_the_name_of_a_run_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    with create(path) as run:
        run.add([Ceiling("cpu", "copy", "", 10.0, "GB/s", "measured")])
        assert not path.exists()
        (partial,) = tmp_path.iterdir()
        assert partial.name.startswith(".") and stat.S_IMODE(partial.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    script = """if True:
        import signal, sys, time
        from pathlib import Path
        from tilewright.store import Run
        # A shell's background jobs, the tests among them, ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with Run.create(Path(sys.argv[1]), command="", target="", case="") as run:
            print("begun", flush=True)
            time.sleep(600)
    """
    child = processes.start(["-c", script, str(tmp_path / "a.duckdb")])
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=HANG_S)
    assert child.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept_after_a_day_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    left, its_own = tmp_path / ".run-killed.partial", tmp_path / ".run-living.partial"
    for folder in (left, its_own):
        folder.mkdir()
        (folder / "run.duckdb").write_bytes(b"")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(left, (two_days_ago, two_days_ago))
    with create(tmp_path / "run.duckdb"):
        assert its_own.is_dir() and not left.exists()
    assert sorted(tmp_path.iterdir()) == [its_own, tmp_path / "run.duckdb"]


@pytest.mark.usefixtures("home")
def test_a_run_is_its_owners() -> None:
    with create(new_run_path("a/../b c")) as run:
        path = run.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent == runs_dir()
    assert path.name.endswith("Z-a-..-b-c.duckdb")


@pytest.mark.usefixtures("home")
def test_latest_run_is_the_newest_whole_one() -> None:
    with pytest.raises(StoreError, match="no run in"):
        latest_run()
    paths = []
    for case in ("zebra", "apple"):
        with create(new_run_path(case)) as run:
            paths.append(run.path)
    (runs_dir() / "notes.duckdb").touch()
    with create(new_run_path("unfinished")):
        assert latest_run() == paths[1]


def test_the_default_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert runs_dir() == Path("/somewhere/.local/share/tilewright/runs")


def test_an_unwritable_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write a run in .*TILEWRIGHT_HOME"):
        create(tmp_path / "file" / "a.duckdb")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        create(tmp_path / "a.duckdb")


def test_a_name_that_is_taken_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.duckdb").mkdir()
    with pytest.raises(StoreError, match="cannot write the run"), create(tmp_path / "a.duckdb"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.duckdb"]


def test_a_count_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    operator = Operator("forward", "before", 0, "a", "aten.mm", "compute", (1,), "float32", Cost(flops=2**70))
    with pytest.raises(StoreError, match="cannot write the run"), create(tmp_path / "a.duckdb") as run:
        run.add_program(Program(operators=[operator]))
    assert list(tmp_path.iterdir()) == []
