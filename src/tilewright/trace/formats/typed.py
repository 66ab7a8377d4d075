"""Chrome's trace format read by DuckDB with a type for every column: fast, for files without a flaw."""

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
# Bytes of the file: what one statement reads at once stays in memory until it ends, whatever its limit.
_AT_ONCE = 80_000_000
_PIPES = 2
# Brackets in the arguments of one event. Nesting is no deeper than they are many, and every question about
# arguments walks down to the deepest.
_MOST_BRACKETS = 20_000
_BRACKETS = "strlen(args::VARCHAR) - strlen(replace(replace(args::VARCHAR, '[', ''), '{', ''))"
# Microseconds below this keep their nanoseconds in a double.
_EXACT_US = 2**43
_FRACTION = re.compile(rb'"ts"[ \t\r\n]*:[ \t\r\n]*"?-?\d+[.eE]')
_TIME = re.compile(rb'"ts"[ \t\r\n]*:[ \t\r\n]*"?(-?\d+)')
_COLUMNS = (
    "{ph: 'VARCHAR', cat: 'VARCHAR', name: 'VARCHAR', pid: 'VARCHAR', tid: 'VARCHAR', ts: 'DOUBLE', dur: 'DOUBLE', "
    "id: 'VARCHAR', id2: 'JSON', scope: 'VARCHAR', bp: 'VARCHAR', s: 'VARCHAR', args: 'JSON'}"
)
# Start and end in the file, what goes before and what goes after.
Part = tuple[int, int, bytes, bytes]
# The rows of `staged`, and `error` where only a reader of single events can say what to do.
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
    """Fill `staged` from `path`; False, and nothing staged, if a closer look is needed."""
    import duckdb

    limit = _EXACT_US
    if _first_time(path, extent) >= _EXACT_US:
        # Microseconds since 1970: a double holds them as long as they are whole.
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
        # The second: DuckDB's message quotes the file, and may cut a character in two.
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
    """Names of pipes through which each part of the file comes.

    DuckDB reads one array on one thread, so that two pipes are twice as fast; and it reads whole files only.
    """
    with contextlib.ExitStack() as ends, ThreadPoolExecutor(len(parts)) as feeders:
        names = []
        for part in parts:
            reading, writing = os.pipe()
            # Closed here, the other end's feeder stops even if DuckDB never came to read.
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
