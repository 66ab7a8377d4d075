"""Inserts rows into tables in bulk, and fetches columns of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


Ints = NDArray[np.int64]


def fetch(connection: DuckDBPyConnection, sql: str, *parameters: object) -> list[Ints]:
    """The columns of a query, all of them integers; NULL is 0."""
    found = connection.execute(sql, list(parameters)).fetchnumpy()
    return [np.ma.filled(column, 0).astype(np.int64, copy=False) for column in found.values()]


def distinct(values: Ints) -> Ints:
    """The values in their order, each once: `np.unique`, which of many times takes six times as long."""
    ordered = np.sort(values)
    return ordered[np.r_[True, ordered[1:] != ordered[:-1]]] if len(ordered) else ordered


def find_ids(ids: Ints, wanted: Ints) -> Ints:
    """The place of each wanted id in `ids`, or -1."""
    if not ids.size:
        return np.full(wanted.size, -1, dtype=np.int64)
    order = np.argsort(ids)
    found = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), ids.size - 1)]
    return np.where(ids[found] == wanted, found, -1)


def append(connection: DuckDBPyConnection, table: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Append `rows` of one value per column.

    Columns are handed over as arrays of objects: lists as parameters are four times slower, and `executemany` is
    slower by far. DuckDB guesses their type from a sample, which must be all of them (`pandas_analyze_sample`).
    """
    if not rows:
        return
    columns = {f"c{at}": np.fromiter(column, object, len(rows)) for at, column in enumerate(zip(*rows, strict=True))}
    types = [row[1] for row in connection.execute(f"DESCRIBE {table}").fetchall()]
    cast = ", ".join(f"CAST({name} AS {kind})" for name, kind in zip(columns, types, strict=True))
    connection.execute(f"INSERT INTO {table} SELECT {cast} FROM columns")


def next_id(connection: DuckDBPyConnection, table: str, column: str) -> int:
    """The next free id of `table`; 0 if it is empty."""
    row = connection.execute(f"SELECT coalesce(max({column}), -1) + 1 FROM {table}").fetchone()
    assert row is not None
    return int(row[0])
