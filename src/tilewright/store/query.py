"""Opening a run to read it, and questions in SQL: read-only, and shut off from every other file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.records.errors import StoreError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# A run may be somebody else's file, and so may a query: no file, extension, network address or
# Python variable is within reach of either.
_LOCKED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
    # As Perfetto's queries expect: whole numbers divided give a whole number, and NULL sorts below all others.
    "integer_division": "true",
    "default_null_order": "nulls_first_on_asc_last_on_desc",
}
_MAGIC = slice(8, 12)


@contextmanager
def reading(path: Path) -> Iterator[DuckDBPyConnection]:
    """A read-only connection to the run at `path`; every failure comes out as a StoreError."""
    import duckdb

    _check_file(path)
    connection: DuckDBPyConnection | None = None
    try:
        connection = duckdb.connect(str(path.resolve()), read_only=True, config=_LOCKED)
        yield connection
    except duckdb.IOException as error:
        raise StoreError(f"run {path} cannot be read, it may be damaged: {first_line(error)}") from error
    except (duckdb.FatalException, duckdb.InternalException, duckdb.SerializationException) as error:
        raise StoreError(f"run {path} is damaged: {first_line(error)}") from error
    except duckdb.Error as error:
        raise StoreError(f"run {path} refuses the query: {error}") from error
    finally:
        if connection is not None:
            connection.close()


def query(path: Path, sql: str) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """The columns and rows that `sql` gives on the run at `path`.

    Several statements may be separated by semicolons; the last one answers.

    Raises:
        StoreError: the run is missing or damaged, or DuckDB refuses the statement.
    """
    with reading(path) as connection:
        connection.execute(sql)
        names = tuple(_as_written(str(column[0]), sql) for column in connection.description or ())
        rows: list[tuple[object, ...]] = connection.fetchall() if names else []
        return names, rows


def _as_written(name: str, sql: str) -> str:
    """The name that DuckDB gives an expression says `//` for a division that was written `/`."""
    return name if name in sql else name.replace(" // ", " / ")


def first_line(error: BaseException) -> str:
    """DuckDB's messages go on with hints of many lines; the first says what went wrong."""
    return str(error).partition("\n")[0]


def _check_file(path: Path) -> None:
    """DuckDB would make a missing file, and read other formats than its own."""
    try:
        with path.open("rb") as file:
            head = file.read(_MAGIC.stop)
    except FileNotFoundError as error:
        raise StoreError(f"no run at {path}") from error
    except OSError as error:
        raise StoreError(f"run {path} cannot be read: {error.strerror}") from error
    if head[_MAGIC] != b"DUCK":
        raise StoreError(f"{path} is no run: it is not a DuckDB file")
