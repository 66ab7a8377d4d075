"""The traced lines of the user's functions, from profiles of tilewright: table `python_line`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tilewright.store.rows import storable
from tilewright.trace.events.rows import append

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_TABLE = """
CREATE OR REPLACE TABLE python_line (   -- when a thread came to a line of the user's own functions, or back to it
    file_id     BIGINT NOT NULL,
    utid        BIGINT NOT NULL,
    ts          BIGINT NOT NULL,
    file        VARCHAR NOT NULL,       -- its name without folders
    function    VARCHAR NOT NULL,
    line        BIGINT NOT NULL
)"""
_FOLLOWED = """
SELECT trace_file.id, trace_file.base_ns - trace_file.shift_ns, metadata.str_value
FROM metadata JOIN trace_file ON trace_file.id = metadata.file_id
WHERE metadata.name = 'tilewright lines' AND metadata.key_type = 'single' ORDER BY trace_file.id"""
_THREADS = """
SELECT min(thread.utid) FROM thread JOIN process USING (upid)
WHERE process.file_id = ? AND thread.tid = ? AND process.device IS NULL"""
_UNKNOWN = ("?", "?", 0)


def add_python_lines(connection: DuckDBPyConnection) -> None:
    """Fill `python_line` from the entry that `measure/recording/line_tracer.py` writes into the headers of traces."""
    connection.execute(_TABLE)
    for file_id, base, text in connection.execute(_FOLLOWED).fetchall():
        try:
            thread, rows = _followed(json.loads(text), base)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            continue
        found = connection.execute(_THREADS, [file_id, thread]).fetchone()
        if found is not None and found[0] is not None:
            append(connection, "python_line", [(file_id, found[0], *row) for row in rows])


def _followed(given: Any, base: int) -> tuple[int, list[tuple[int, str, str, int]]]:
    """The thread, and a row for each line reached; raises if anything is missing or of another type."""
    thread, which = int(given["thread"]), given["which"]
    if not 0 <= thread < 1 << 62:
        raise ValueError("no number of a thread")
    places = [_place(*place) for place in given["places"]]
    rows = zip(_times(given["since"], base), which, strict=True)
    return thread, [(at, *(places[place] if place >= 0 else _UNKNOWN)) for at, place in rows]


def _place(file: str, function: str, line: int) -> tuple[str, str, int]:
    if not 0 <= int(line) < 1 << 31:
        raise ValueError("no line of a file")
    return storable(PurePath(file).name), storable(str(function)), int(line)


def _times(since: list[int], base: int) -> Iterator[int]:
    for at in accumulate(since):
        if not isinstance(at, int) or abs(at - base) >= 1 << 61:
            raise ValueError("no time of this trace")
        yield at - base
