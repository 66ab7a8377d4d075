"""The tables of a run that are dataclasses: a field is a column, a tuple a list; the fields of `Cost` are columns of
the operator or region that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

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


_TYPES: Mapping[type, str] = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}
_NOT_NULL = " NOT NULL"
_OF_COST = """,
    bytes BIGINT GENERATED ALWAYS AS (bytes_read + bytes_written),
    intensity DOUBLE GENERATED ALWAYS AS (1e0 * flops / nullif(bytes_read + bytes_written, 0))"""


def create_tables(connection: DuckDBPyConnection) -> None:
    """A table for each kind of row; a column is NOT NULL unless its field may be None."""
    for kind, table in TABLES.items():
        declared = _declared(kind)
        listed = ", ".join(f"{_quoted(name)} {type_}" for name, type_ in declared.items())
        connection.execute(f"CREATE TABLE {table} ({listed}{_OF_COST if 'bytes_read' in declared else ''})")


def _declared(kind: type) -> dict[str, str]:
    """The columns of a dataclass and their types, in the order of its fields.

    >>> _declared(Fallback)
    {'what': 'VARCHAR NOT NULL', 'where': 'VARCHAR NOT NULL', 'why': 'VARCHAR NOT NULL'}
    """
    found: dict[str, str] = {}
    for name, hint in get_type_hints(kind).items():
        found |= _declared(Cost) if hint is Cost else {name: _column_type(hint)}
    return found


def _column_type(hint: Any) -> str:
    if get_origin(hint) is UnionType:
        (held,) = (part for part in get_args(hint) if part is not NoneType)
        return _TYPES[held]
    if get_origin(hint) is tuple:
        return f"{_TYPES[get_args(hint)[0]]}[]{_NOT_NULL}"
    # Other hints are literals, of strings.
    return _TYPES.get(hint, "VARCHAR") + _NOT_NULL


def storable(text: str) -> str:
    """`text` with each lone surrogate (from a badly encoded source line) replaced by `?`: UTF-8 has no such code."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def insert(connection: DuckDBPyConnection, rows: Sequence[Row]) -> None:
    """Append `rows` to the table of their kind.

    One statement passes each column as a list: DuckDB's `executemany` is seventy times slower.
    """
    if not rows:
        return
    kind = type(rows[0])
    declared = {name: type_.removesuffix(_NOT_NULL) for name, type_ in _declared(kind).items()}
    connection.execute(
        f"INSERT INTO {TABLES[kind]} ({', '.join(map(_quoted, declared))}) "
        f"SELECT {', '.join(f'unnest(CAST(? AS {type_}[]))' for type_ in declared.values())}",
        [list(column) for column in zip(*map(_flat, rows), strict=True)],
    )


def select(connection: DuckDBPyConnection, kind: type[Row]) -> list[Row]:
    """All rows of a kind, in the order in which they were added."""
    names = tuple(_declared(kind))
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
