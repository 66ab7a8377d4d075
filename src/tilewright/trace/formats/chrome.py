"""Chrome's trace format, which Kineto writes too: the fast way, or else the patient one."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from tilewright.trace.events.staging import Header
from tilewright.trace.formats import exact, typed
from tilewright.trace.formats.extent import find_extent
from tilewright.trace.formats.header import header_of
from tilewright.trace.formats.source import is_gzip, pieces

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def stage(path: Path, connection: DuckDBPyConnection) -> Header:
    """Fill `staged` and `event_reject` from `path`; TraceError if it is no trace."""
    if not is_gzip(path):
        return _stage(path, path, connection)
    with NamedTemporaryFile(prefix="tilewright-", suffix=".json") as plain:
        for piece in pieces(path):
            plain.write(piece)
        plain.flush()
        return _stage(path, Path(plain.name), connection)


def _stage(path: Path, plain: Path, connection: DuckDBPyConnection) -> Header:
    extent = find_extent(plain)
    if extent is not None and typed.stage(plain, extent, connection):
        return header_of(extent.header, ())
    return exact.stage(plain, connection, path)
