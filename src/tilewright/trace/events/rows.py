"""Bulk insertion of rows into tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def append(connection: DuckDBPyConnection, table: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Append `rows` of one value per column.

    Columns are handed over as arrays of objects: lists as parameters are four times slower, and `executemany` is
    slower by far. DuckDB guesses their type from a sample, which must be all of them (`pandas_analyze_sample`).
    """
    if not rows:
        return
    columns = {f"c{at}": np.array(column, dtype=object) for at, column in enumerate(zip(*rows, strict=True))}
    types = [row[1] for row in connection.execute(f"DESCRIBE {table}").fetchall()]
    cast = ", ".join(f"CAST({name} AS {kind})" for name, kind in zip(columns, types, strict=True))
    connection.execute(f"INSERT INTO {table} SELECT {cast} FROM columns")


def next_id(connection: DuckDBPyConnection, table: str, column: str) -> int:
    """The next free id of `table`; 0 if it is empty."""
    row = connection.execute(f"SELECT coalesce(max({column}), -1) + 1 FROM {table}").fetchone()
    assert row is not None
    return int(row[0])
