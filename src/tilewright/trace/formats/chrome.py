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

# Categories and arguments as Kineto spelled them until 2022, and as it spells them since.
_CATEGORIES = {
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "forward_backward": "fwdbwd",
}
_RESPELLED = f"""
UPDATE staged
SET category = CASE WHEN category = 'Operator' AND starts_with(name, 'ProfilerStep#') THEN 'user_annotation'
                    WHEN category = 'async' THEN 'ac2g'
                    ELSE MAP {_CATEGORIES}[category] END,
    args = replace(args::VARCHAR, '"Input dims":', '"Input Dims":')
WHERE category IN {tuple(_CATEGORIES)} OR (category = 'async' AND name = 'launch')"""


def stage(plain: Path, path: Path, connection: DuckDBPyConnection) -> Header:
    """Fill `staged` and `event_reject` from the unpacked file `plain`, which errors call `path`.

    Raises:
        TraceError: the file is not a trace.
    """
    extent = find_extent(plain)
    if extent is not None and typed.stage(plain, extent, connection):
        header = header_of(extent.header, ())
    else:
        header = exact.stage(plain, connection, path)
    connection.execute(_RESPELLED)
    return header
