"""Dataclasses to rows and back: a field is a column, `Cost` is flattened into columns, a tuple is a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar, cast

from tilewright.records.errors import StoreError
from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.records.program import Cost, Decision, Fallback, MemoryPoint, Operator, Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from duckdb import DuckDBPyConnection

Row = TypeVar("Row", Operator, Region, Decision, MemoryPoint, Fallback, Measurement, Ceiling, Verified)

TABLES: Mapping[type, str] = {
    Operator: "operator",
    Region: "region",
    Decision: "decision",
    MemoryPoint: "memory",
    Fallback: "fallback",
    Measurement: "measurement",
    Ceiling: "ceiling",
    Verified: "verified",
}
_COST = tuple(field.name for field in fields(Cost))


def columns(kind: type[Row]) -> tuple[str, ...]:
    """The columns of a dataclass, in the order of its fields.

    >>> columns(Fallback)
    ('what', 'where', 'why')
    """
    names: list[str] = []
    for field in fields(kind):
        names.extend(_COST if field.name == "cost" else (field.name,))
    return tuple(names)


def storable(text: str) -> str:
    """`text` with each lone surrogate (from a badly encoded source line) replaced by `?`: UTF-8 has no such code."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def insert(connection: DuckDBPyConnection, kind: type[Row], rows: Sequence[Row]) -> None:
    """Append `rows` to the table of their kind.

    One statement passes each column as a list: DuckDB's `executemany` is seventy times slower.
    """
    if not rows:
        return
    table, names = TABLES[kind], columns(kind)
    declared = connection.execute(
        "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ?", [table]
    ).fetchall()
    types = dict(declared)
    values = [_flat(row) for row in rows]
    connection.execute(
        f"INSERT INTO {table} ({', '.join(map(_quoted, names))}) "
        f"SELECT {', '.join(f'unnest(CAST(? AS {types[name]}[]))' for name in names)}",
        [list(column) for column in zip(*values, strict=True)],
    )


def select(connection: DuckDBPyConnection, kind: type[Row]) -> list[Row]:
    """All rows of a kind, in the order in which they were added."""
    names = columns(kind)
    sql = f"SELECT {', '.join(map(_quoted, names))} FROM {TABLES[kind]} ORDER BY rowid"
    return [_row(kind, dict(zip(names, row, strict=True))) for row in connection.execute(sql).fetchall()]


def _flat(row: object) -> list[object]:
    flat: list[object] = []
    for field in fields(row):  # type: ignore[arg-type]  # every Row is a dataclass
        value = getattr(row, field.name)
        if isinstance(value, Cost):
            flat.extend(_flat(value))
        elif isinstance(value, tuple):
            flat.append([storable(item) if isinstance(item, str) else item for item in value])
        else:
            flat.append(storable(value) if isinstance(value, str) else value)
    return flat


def _row(kind: type[Row], values: dict[str, object]) -> Row:
    if "provenance" in values:
        cost = cast("Callable[..., Cost]", Cost)
        values["cost"] = cost(**{name: values.pop(name) for name in _COST})
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return cast("Callable[..., Row]", kind)(**tuples)
    except TypeError as error:
        raise StoreError(f"table {TABLES[kind]} of this run does not fit: {error}") from error


def _quoted(name: str) -> str:
    return f'"{name}"'
