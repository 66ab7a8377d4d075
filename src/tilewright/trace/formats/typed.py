"""Reads Chrome's trace format by DuckDB with typed columns: fast, for well-formed files."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.trace.events.staging import KNOWN_PHASES
from tilewright.trace.formats.extent import Extent, borders

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LARGEST_EVENT = 1 << 22
_PIECE = 1 << 20
# Bytes of the file per statement: DuckDB keeps them in memory until the statement ends.
_AT_ONCE = 80_000_000
_PIPES = 2
# Most brackets in the arguments of one event. They bound the nesting, to whose depth every query on arguments recurses.
_MOST_BRACKETS = 20_000
_BRACKETS = "strlen(args::VARCHAR) - strlen(replace(replace(args::VARCHAR, '[', ''), '{', ''))"
# A double represents microseconds below this to the nanosecond.
_EXACT_US = 2**43
_FRACTION = re.compile(rb'"ts"[ \t\r\n]*:[ \t\r\n]*"?-?\d+[.eE]')
_TIME = re.compile(rb'"ts"[ \t\r\n]*:[ \t\r\n]*"?(-?\d+)')
_COLUMNS = (
    "{ph: 'VARCHAR', cat: 'VARCHAR', name: 'VARCHAR', pid: 'VARCHAR', tid: 'VARCHAR', ts: 'DOUBLE', dur: 'DOUBLE', "
    "id: 'VARCHAR', id2: 'JSON', scope: 'VARCHAR', bp: 'VARCHAR', s: 'VARCHAR', args: 'JSON'}"
)
# Start and end in the file, and the text to put before and after.
Part = tuple[int, int, bytes, bytes]
# The rows of `staged`, and `error` for events that only the exact reader can handle.
_STAGED = f"""
INSERT INTO staged
SELECT $part + list_position($pipes, filename) - 1, ph, cat, name, coalesce(pid, ''), coalesce(tid, ''),
       CASE WHEN ph <> 'M' THEN trunc(ts)::BIGINT * 1000 + round((ts - trunc(ts)) * 1000)::BIGINT END,
       CASE WHEN ph = 'X' THEN trunc(dur)::BIGINT * 1000 + round((dur - trunc(dur)) * 1000)::BIGINT END,
       CASE WHEN scope IS NULL THEN '' ELSE scope || ':' END
           || coalesce(id, id2->>'$.global', id2->>'$.local'),
       bp, s, nullif(args, '{{}}')
FROM read_json($pipes, format = 'array', filename = true, maximum_object_size = {_LARGEST_EVENT}, columns = {_COLUMNS})
WHERE CASE WHEN ph NOT IN {KNOWN_PHASES} OR ph IS NULL
             OR (ph <> 'M' AND NOT coalesce(abs(ts) < $limit, false))
             OR (ph = 'X' AND NOT coalesce(dur >= 0 AND dur < {_EXACT_US}, false))
             OR NOT coalesce(starts_with(args::VARCHAR, '{{'), true)
             OR (strlen(args::VARCHAR) > {_MOST_BRACKETS} AND {_BRACKETS} > {_MOST_BRACKETS})
           THEN error('not plain') ELSE true END
"""


def stage(path: Path, extent: Extent, connection: DuckDBPyConnection) -> bool:
    """Fill `staged` from `path`; False, with nothing staged, if the exact reader is needed."""
    import duckdb

    limit = _EXACT_US
    if _first_time(path, extent) >= _EXACT_US:
        # A double represents whole microseconds since 1970 exactly.
        if _has_fractions(path):
            return False
        limit = 2**53
    size = min(_AT_ONCE, (extent.end - extent.start) // 2 + 1)
    for cuts in (borders(path, extent, size), []):
        parts = _parts(extent, cuts)
        try:
            for first in range(0, len(parts), _PIPES):
                with _fed(path, parts[first : first + _PIPES]) as pipes:
                    connection.execute(_STAGED, {"pipes": pipes, "part": first, "limit": float(limit)})
            return True
        # UnicodeDecodeError: DuckDB's message quotes the file and may cut a character.
        except (duckdb.Error, UnicodeDecodeError):
            connection.execute("TRUNCATE staged")
    return False


def _parts(extent: Extent, cuts: list[int]) -> list[Part]:
    """The array cut into arrays."""
    starts = [(extent.start, b""), *((cut + 1, b"[") for cut in cuts)]
    ends = [*((cut, b"]") for cut in cuts), (extent.end, b"")]
    return [(start, end, before, after) for (start, before), (end, after) in zip(starts, ends, strict=True)]


def _first_time(path: Path, extent: Extent) -> float:
    with path.open("rb") as file:
        file.seek(extent.start)
        found = _TIME.search(file.read(_PIECE))
    return float(found[1]) if found else 0.0


def _has_fractions(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _FRACTION.search(content) is not None


@contextlib.contextmanager
def _fed(path: Path, parts: list[Part]) -> Iterator[list[str]]:
    """Names of pipes, one for each part of the file.

    DuckDB reads one array on one thread, so that two pipes are twice as fast; and it reads whole files only.
    """
    with contextlib.ExitStack() as ends, ThreadPoolExecutor(len(parts)) as feeders:
        names = []
        for part in parts:
            reading, writing = os.pipe()
            # Closing this end stops the writing thread even if DuckDB never opened the pipe.
            ends.callback(os.close, reading)
            names.append(f"/dev/fd/{reading}")
            feeders.submit(_feed, path, part, writing)
        try:
            yield names
        finally:
            ends.close()


def _feed(path: Path, part: Part, pipe: int) -> None:
    start, end, before, after = part
    with contextlib.suppress(BrokenPipeError), open(pipe, "wb", buffering=0) as out, path.open("rb") as file:
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIECE)
        out.write(before)
        while start < end:
            sent = os.sendfile(pipe, file.fileno(), start, min(_PIECE, end - start))
            if not sent:
                return
            start += sent
        out.write(after)
