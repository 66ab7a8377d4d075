"""View `event`: the events of one file of any format, before they become rows of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# `part` orders the pieces of a file that were read side by side. Times are nanoseconds. `pid` and `tid` are
# text, empty where the file has none. `id` joins the events of one flow or asynchronous slice; `bp` says what an
# end of a flow binds to: `e`, the slice around it; else the next one. `scope` is an instant's: t, p or g.
COLUMNS = {
    "part": "SMALLINT",
    "ph": "VARCHAR",
    "category": "VARCHAR",
    "name": "VARCHAR",
    "pid": "VARCHAR",
    "tid": "VARCHAR",
    "ts": "BIGINT",
    "dur": "BIGINT",
    "id": "VARCHAR",
    "bp": "VARCHAR",
    "scope": "VARCHAR",
    "args": "JSON",
}

SLICE_PHASES = ("X", "i", "I", "R")
NESTED_PHASES = ("B", "E")
ASYNC_PHASES = ("b", "n", "e", "S", "T", "p", "F")
FLOW_PHASES = ("s", "t", "f")
COUNTER_PHASES = ("C",)
METADATA_PHASES = ("M",)
KNOWN_PHASES = SLICE_PHASES + NESTED_PHASES + ASYNC_PHASES + FLOW_PHASES + COUNTER_PHASES + METADATA_PHASES

# Instants of a process or of the whole trace, which have no thread's track.
WIDE = "(ph IN ('i', 'I', 'R') AND coalesce(scope, 't') IN ('p', 'g'))"

# Upper bound of the events of a part; `seq` modulo this is the row of `staged`.
_PART = 1 << 40
ROW = _PART - 1


@dataclass(frozen=True)
class Header:
    """The metadata of a file."""

    format: str
    base_ns: int = 0
    rank: int | None = None
    world_size: int | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def make_tables(connection: DuckDBPyConnection) -> None:
    """Create the empty tables `staged` and `event_reject` (for invalid events), and the view `event`.

    `event.seq` grows with the place in the file.
    """
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    connection.execute(f"CREATE OR REPLACE TEMP TABLE staged ({columns})")
    connection.execute(
        f"CREATE OR REPLACE TEMP VIEW event AS SELECT part * {_PART} + rowid AS seq, * EXCLUDE (part) FROM staged"
    )
    connection.execute("CREATE OR REPLACE TEMP TABLE event_reject (reason VARCHAR, event VARCHAR)")


def drop_tables(connection: DuckDBPyConnection) -> None:
    """Drop the staging tables."""
    connection.execute("DROP VIEW IF EXISTS event")
    for table in ("staged", "event_reject", "place"):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
