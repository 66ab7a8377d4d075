"""Reading a run and querying it with SQL: read-only, without access to other files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.records.errors import StoreError, first_line
from tilewright.store import perfetto

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# Neither a run nor a query is trusted: they cannot reach files, extensions, the network or Python variables.
_SANDBOX: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
    # As in Perfetto's SQL: integer division gives an integer, and NULL sorts below all values.
    "integer_division": "true",
    "default_null_order": "nulls_first_on_asc_last_on_desc",
}
_MAGIC = slice(8, 12)


@contextmanager
def reading(path: Path) -> Iterator[DuckDBPyConnection]:
    """A read-only connection to the run at `path`; DuckDB's errors become StoreError."""
    import duckdb

    _check_file(path)
    connection: DuckDBPyConnection | None = None
    try:
        connection = duckdb.connect(str(path.resolve()), read_only=True, config=_SANDBOX)
        if not connection.execute("FROM duckdb_tables() WHERE table_name = 'run'").fetchall():
            raise StoreError(f"{path} is not a run: it is a DuckDB file without tilewright's table `run`")
        yield connection
    except duckdb.IOException as error:
        raise StoreError(f"run {path} cannot be read, it may be damaged: {first_line(error)}") from error
    except (duckdb.FatalException, duckdb.InternalException, duckdb.SerializationException) as error:
        raise StoreError(f"run {path} is damaged: {first_line(error)}") from error
    except duckdb.Error as error:
        raise StoreError(f"run {path} refuses the query: {_in_one_line(error)}") from error
    finally:
        if connection is not None:
            connection.close()


def query(path: Path, sql: str) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """The column names and rows that `sql` gives on the run at `path`.

    Statements are separated by semicolons; the result is that of the last one. Those of Perfetto's SQL are taken too,
    and what they make is temporary.

    Raises:
        StoreError: the run is missing or damaged, or DuckDB refuses the statement.
    """
    import duckdb

    with reading(path) as connection:
        asked = perfetto.statements(sql)
        try:
            _execute(connection, asked)
        except duckdb.BinderException as error:
            if not perfetto.widened(str(error)):
                raise
            ((database,),) = connection.execute("SELECT current_database()").fetchall()
            connection.execute(perfetto.WIDER_SLICE.format(f'"{database}"'))
            _execute(connection, asked)
        except duckdb.CatalogException as error:
            if hint := perfetto.nearest(str(error)):
                raise StoreError(hint) from error
            raise
        names = _distinct([_as_written(str(column[0]), sql) for column in connection.description or ()])
        rows: list[tuple[object, ...]] = connection.fetchall() if names else []
        return names, rows


def _execute(connection: DuckDBPyConnection, asked: Sequence[str]) -> None:
    if any("largest(" in each or "smallest(" in each for each in asked):
        connection.execute(perfetto.PREPARED)
    connection.execute(";".join(asked))


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, each that stood before with its place among its equals: a row as a mapping would drop one.

    >>> _distinct(["name", "dur", "name", "name"])
    ('name', 'dur', 'name_2', 'name_3')
    """
    found: list[str] = []
    for name in names:
        free = (f"{name}_{place}" if place > 1 else name for place in count(1))
        found.append(next(one for one in free if one not in found and (one == name or one not in names)))
    return tuple(found)


def _as_written(name: str, sql: str) -> str:
    """DuckDB names a column after its expression but prints `/` as `//`; undo that unless `sql` has `//`."""
    if name not in sql:
        name = name.replace("largest(", "max(").replace("smallest(", "min(")
    return name if name in sql else name.replace(" // ", " / ")


def _in_one_line(error: BaseException) -> str:
    """DuckDB's message with its hint and the line of the query, without the caret below it."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line.strip("^"))


def _check_file(path: Path) -> None:
    """Raise StoreError unless `path` is a DuckDB file: DuckDB would create a missing one and read other formats."""
    try:
        with path.open("rb") as file:
            head = file.read(_MAGIC.stop)
    except FileNotFoundError as error:
        raise StoreError(f"no run at {path}") from error
    except OSError as error:
        raise StoreError(f"run {path} cannot be read: {error.strerror}") from error
    if head[_MAGIC] != b"DUCK":
        raise StoreError(f"{path} is not a run: it is not a DuckDB file")
