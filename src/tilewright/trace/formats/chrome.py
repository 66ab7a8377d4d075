"""Chrome's trace format, which Kineto writes too: read by DuckDB, or event by event if that fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.trace.events.staging import Header
from tilewright.trace.formats import exact, typed
from tilewright.trace.formats.extent import find_extent
from tilewright.trace.formats.header import header_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def stage(plain: Path, path: Path, connection: DuckDBPyConnection) -> Header:
    """Fill `staged` and `event_reject` from the unpacked file `plain`, which errors call `path`.

    Raises:
        TraceError: the file is not a trace.
    """
    extent = find_extent(plain)
    if extent is not None and typed.stage(plain, extent, connection):
        return header_of(extent.header, ())
    return exact.stage(plain, connection, path)
