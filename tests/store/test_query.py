"""A query answers from the run and reaches nothing else; a damaged run gives a StoreError."""

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tilewright.records.errors import StoreError
from tilewright.records.measurement import Measurement
from tilewright.records.program import Cost, Operator, Program, Region
from tilewright.store import Run, query, read_program


def operator(index: int, name: str, **changes: object) -> Operator:
    values: dict[str, object] = {
        "graph": "forward",
        "stage": "before",
        "index": index,
        "name": name,
        "target": f"aten.{name}",
        "operator_class": "pointwise",
        "shape": (4, 5),
        "dtype": "float32",
        "cost": Cost(reads=20, writes=20, bytes_read=80, bytes_written=80, flops=20),
        "floor_us": 2.0,
    }
    return Operator(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.duckdb"
    view = Cost()
    mystery = Cost(provenance="unknown")
    fused = Cost(reads=20, writes=20, bytes_read=80, bytes_written=80, flops=40)
    with Run.create(path, command="c", target="t", case="k") as made:
        made.add_program(
            Program(
                operators=[
                    operator(0, "exp", region="r0", measured_us=8.0),
                    operator(1, "neg", region="r0"),
                    operator(2, "view", cost=view, operator_class="layout", floor_us=0.0),
                    operator(3, "odd", cost=mystery, operator_class="unknown", floor_us=None),
                    operator(0, "r0", stage="after", region="r0", cost=fused),
                ],
                regions=[Region("forward", "r0", ("exp", "neg"), fused, "c++", "", floor_us=2.0)],
            )
        )
    return path


def test_a_division_is_named_as_it_was_written(run: Path) -> None:
    names, rows = query(run, """SELECT 7/2, 7.0/2, 1 AS "a // b" """)
    assert names == ("(7 / 2)", "(7.0 / 2)", "a // b")
    assert rows == [(3, 3.5, 1)]


def test_columns_of_one_name_are_told_apart(run: Path) -> None:
    names, rows = query(run, "SELECT name, name AS name_2, o.name, 1 AS one, target AS name FROM operator o LIMIT 1")
    assert names == ("name", "name_2", "name_3", "one", "name_4")
    assert rows == [("exp", "exp", "exp", 1, "aten.exp")]


def test_the_row_of_the_run_needs_no_time_zones(run: Path) -> None:
    names, ((created, *_),) = query(run, "FROM run")
    assert names[0] == "created" and isinstance(created, datetime) and created.tzinfo is None
    assert abs((created - datetime.now(UTC).replace(tzinfo=None)).total_seconds()) < 600


def test_a_speed_that_the_spread_leaves_open_is_null(tmp_path: Path) -> None:
    """Eager 487 times as slow, with a spread of 7,974 %; Inductor four times."""
    path = tmp_path / "run.duckdb"
    rows = [("eager", 4870.0, 10.0, 388_343.0), ("inductor", 40.0, 38.0, 44.0), ("tilewright", 10.0, 9.5, 10.6)]
    with Run.create(path, command="c", target="t", case="k") as made:
        made.add([Measurement("s", "k", impl, "fwd", *times, 9) for impl, *times in rows])
    found = query(path, "SELECT times_eager, times_inductor FROM speedup WHERE impl = 'tilewright'")[1]
    assert found == [(None, 4.0)]


def test_rows_and_columns(run: Path) -> None:
    assert query(run, "SELECT name, bytes, intensity FROM operator WHERE stage = 'before' ORDER BY index LIMIT 3") == (
        ("name", "bytes", "intensity"),
        [("exp", 160, 0.125), ("neg", 160, 0.125), ("view", 0, None)],
    )


def test_roofline(run: Path) -> None:
    _, rows = query(run, "SELECT name, measured, TFLOPs, GBps, times_floor FROM roofline WHERE name = 'exp'")
    assert rows == [("exp", True, 20 / 8e-6 / 1e12, 160 / 8e-6 / 1e9, 4.0)]
    _, rows = query(run, "SELECT measured, TFLOPs, intensity FROM roofline WHERE kind = 'region'")
    assert rows == [(False, pytest.approx(40 / 2e-6 / 1e12), 0.25)]


def test_fusion_summary(run: Path) -> None:
    _, rows = query(run, "SELECT stage, launches, reads, bytes, flops, floor_us, unknown FROM fusion_summary")
    assert rows == [("before", 3, 40, 320, 40, 4.0, 1), ("after", 1, 20, 160, 40, 2.0, 0)]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM operator",
        "CREATE TABLE mine (a INT)",
        "COPY operator TO '{outside}/stolen.csv'",
        "EXPORT DATABASE '{outside}/stolen'",
        "SELECT * FROM read_text('{outside}/secret.txt')",
        "SELECT * FROM '{outside}/secret.csv'",
        "SELECT * FROM glob('{outside}/*')",
        "SELECT * FROM read_duckdb('{outside}/other.duckdb')",
        "ATTACH '{outside}/other.duckdb'",
        "ATTACH ':memory:' AS memory",
        "SET enable_external_access = true",
        "SET lock_configuration = false; COPY operator TO '{outside}/stolen.csv'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SELECT * FROM read_csv('https://example.com/a.csv')",
        "SELECT * FROM python_list",
        "SELECT getenv('HOME')",
        "SELECT 1; DROP TABLE run",
    ],
)
def test_a_query_reaches_nothing_else(run: Path, tmp_path: Path, sql: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (outside / "secret.csv").write_text("a,b\n1,2\n")
    python_list = [(1,)]
    with Run.create(outside / "other.duckdb", command="", target="", case=""):
        pass
    listing, before = sorted(outside.iterdir()), run.read_bytes()
    with pytest.raises(StoreError, match=r"refuses the query|cannot be read"):
        query(run, sql.format(outside=outside))
    assert python_list and sorted(outside.iterdir()) == listing and run.read_bytes() == before


def test_an_error_shows_where(run: Path) -> None:
    with pytest.raises(StoreError, match=r"(?s)refuses the query.*nme.*LINE 1"):
        query(run, "SELECT nme FROM operator")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no run at .*missing\.duckdb"):
        query(tmp_path / "missing.duckdb", "SELECT 1")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="Is a directory"):
        query(tmp_path, "SELECT 1")


@pytest.mark.parametrize("content", [b"", b"DUCK", b"x" * 20000, b"SQLite format 3\0" + b"\0" * 4096])
def test_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.duckdb"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is not a run"):
        query(path, "SELECT 1")


def test_a_duckdb_file_that_is_no_run(tmp_path: Path) -> None:
    import duckdb

    duckdb.connect(str(tmp_path / "a.duckdb")).close()
    with pytest.raises(StoreError, match="is not a run: it is a DuckDB file without"):
        read_program(tmp_path / "a.duckdb")


def test_a_truncated_run(run: Path, tmp_path: Path) -> None:
    whole = run.read_bytes()
    for length in (12, 4096, 12288, len(whole) // 2):
        run.write_bytes(whole[:length])
        with pytest.raises(StoreError):
            read_program(run)


def test_a_damaged_run_is_an_error_or_the_truth(run: Path) -> None:
    whole, truth = run.read_bytes(), read_program(run)
    dice = random.Random(0)
    for _ in range(30):
        broken = bytearray(whole)
        start = dice.randrange(len(whole))
        broken[start : start + 64] = dice.randbytes(len(broken[start : start + 64]))
        run.write_bytes(broken)
        try:
            assert read_program(run) == truth
        except StoreError:
            continue
