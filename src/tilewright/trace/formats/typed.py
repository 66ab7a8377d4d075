"""Reads Chrome's trace format by DuckDB with typed columns: fast, for well-formed files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tilewright.trace.events.staging import KNOWN_PHASES
from tilewright.trace.formats.extent import Extent, borders

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LARGEST_EVENT = 1 << 22
_PIECE = 1 << 20
_COPIED = 1 << 17
# Bytes of the file per statement: DuckDB keeps them in memory until the statement ends.
_AT_ONCE = 80_000_000
_PIPES = 2
# Most brackets in the arguments of one event. They bound the nesting, to whose depth every query on arguments recurses.
_MOST_BRACKETS = 20_000
_BRACKETS = "strlen(args::VARCHAR) - strlen(replace(replace(args::VARCHAR, '[', ''), '{', ''))"
# A double represents microseconds below this to the nanosecond.
_EXACT_US = 2**43
# Eleven days: times since 1970 are read without the digits before these twelve.
_ERA_US = 10**12
_DAY_US = 86_400 * 10**6
_TIME = re.compile(rb'("ts"[ \t\r\n]*:[ \t\r\n]*"?)(\d+)')
# The key of respelled times. Arguments are searched for it, and DuckDB is fast if the first letter is rare.
_RESPELLED = "~s"
_COLUMNS = (
    "{ph: 'VARCHAR', cat: 'VARCHAR', name: 'VARCHAR', pid: 'VARCHAR', tid: 'VARCHAR', ts: 'DOUBLE', dur: 'DOUBLE', "
    f"\"{_RESPELLED}\": 'DOUBLE', id: 'VARCHAR', id2: 'JSON', scope: 'VARCHAR', bp: 'VARCHAR', s: 'VARCHAR', "
    "args: 'JSON'}"
)
# Start and end in the file, and the text to put before and after.
Part = tuple[int, int, bytes, bytes]
# Texts and what replaces them.
Spellings = tuple[tuple[bytes, bytes], ...]
# The rows of `staged`, and `error` for events that only the exact reader can handle.
_STAGED = f"""
INSERT INTO staged
SELECT $part + list_position($pipes, filename) - 1, ph, cat, name, coalesce(pid, ''), coalesce(tid, ''),
       CASE WHEN ph <> 'M' THEN trunc(us)::BIGINT * 1000 + round((us - trunc(us)) * 1000)::BIGINT + $added END,
       CASE WHEN ph = 'X' THEN trunc(dur)::BIGINT * 1000 + round((dur - trunc(dur)) * 1000)::BIGINT END,
       CASE WHEN scope IS NULL THEN '' ELSE scope || ':' END
           || coalesce(id, id2->>'$.global', id2->>'$.local'),
       bp, s, nullif(args, '{{}}')
FROM (
    SELECT *, if($added = 0, ts, "{_RESPELLED}") AS us
    FROM read_json(
        $pipes, format = 'array', filename = true, maximum_object_size = {_LARGEST_EVENT}, columns = {_COLUMNS}
    )
)
WHERE CASE WHEN ph NOT IN {KNOWN_PHASES} OR ph IS NULL
             OR (ph <> 'M' AND NOT coalesce(us >= $first AND us < $limit, false))
             OR (ph = 'X' AND NOT coalesce(dur >= 0 AND dur < {_EXACT_US}, false))
             OR NOT coalesce(starts_with(args::VARCHAR, '{{'), true)
             OR ($added <> 0 AND contains(args::VARCHAR, '{_RESPELLED}":'))
             OR (strlen(args::VARCHAR) > {_MOST_BRACKETS} AND {_BRACKETS} > {_MOST_BRACKETS})
           THEN error('not plain') ELSE true END
"""


def stage(path: Path, extent: Extent, connection: DuckDBPyConnection) -> bool:
    """Fill `staged` from `path`; False, with nothing staged, if the exact reader is needed."""
    import duckdb

    era = _era(path, extent)
    size = min(_AT_ONCE, (extent.end - extent.start) // 2 + 1)
    for cuts in (borders(path, extent, size), []):
        parts = _parts(extent, cuts)
        try:
            for first in range(0, len(parts), _PIPES):
                with _fed(path, parts[first : first + _PIPES], era.spellings) as pipes:
                    given = {"pipes": pipes, "part": first, "first": era.first, "limit": era.limit, "added": era.added}
                    connection.execute(_STAGED, given)
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


@dataclass(frozen=True)
class _Era:
    """How times are spelled for DuckDB, whose doubles are exact up to `_EXACT_US`.

    Each time that begins with the first of a pair of `spellings` is read with the second in its place, under another
    key. It is `added` nanoseconds later than read, and readable from `first` up to `limit` microseconds.
    """

    spellings: Spellings = ()
    first: float = -_EXACT_US
    limit: float = _EXACT_US
    added: int = 0


def _era(path: Path, extent: Extent) -> _Era:
    """The era of the file's first time. Times since 1970 keep their last twelve digits, the others become one digit.

    2 stands for the digits of the first time; near an end of its era, 1 or 3 for those before or after it. The rest of
    the microseconds, and the fraction, are in the text as before. A time that another digit would stand for is out of
    range, and so is one that is not spelled as the first.
    """
    with path.open("rb") as file:
        file.seek(extent.start)
        # Metadata may have the time 0.
        found = next((time for time in _TIME.finditer(file.read(_PIECE)) if int(time[2])), None)
    if found is None or not _EXACT_US <= int(found[2]) < 2**52:
        return _Era()
    key = found[1]
    respelled = key.replace(b"ts", _RESPELLED.encode())
    epoch, within = divmod(int(found[2]), _ERA_US)
    digits = [1] * (within < _DAY_US) + [2] + [3] * (within > _ERA_US - _DAY_US)
    # Blanks keep the length, so that replacing moves nothing.
    spellings = tuple(
        (old := key + b"%d" % (epoch + digit - 2), respelled.ljust(len(old) - 1) + b"%d" % digit) for digit in digits
    )
    return _Era(spellings, _ERA_US, 4 * _ERA_US, (epoch - 2) * _ERA_US * 1000)


@contextlib.contextmanager
def _fed(path: Path, parts: list[Part], spellings: Spellings) -> Iterator[list[str]]:
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
            feeders.submit(_feed, path, part, spellings, writing)
        try:
            yield names
        finally:
            ends.close()


def _feed(path: Path, part: Part, spellings: Spellings, pipe: int) -> None:
    start, end, before, after = part
    with contextlib.suppress(BrokenPipeError), open(pipe, "wb", buffering=0) as out, path.open("rb") as file:
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIECE)
        out.write(before)
        if spellings:
            _respell(file, start, end, spellings, out)
        else:
            while start < end and (sent := os.sendfile(pipe, file.fileno(), start, min(_PIECE, end - start))):
                start += sent
        out.write(after)


def _respell(file: BinaryIO, start: int, end: int, spellings: Spellings, out: BinaryIO) -> None:
    """Copy the bytes from `start` to `end`, the first of each pair replaced by the second, which is as long.

    Pieces end at commas, which no pair has.
    """
    while start < end and (piece := os.pread(file.fileno(), min(_COPIED, end - start), start)):
        size = piece.rfind(b",") + 1 or len(piece)
        for old, new in spellings:
            piece = piece.replace(old, new)
        # A pipe may take less than it is given.
        left = memoryview(piece)[: size if start + len(piece) < end else len(piece)]
        start += len(left)
        while left:
            left = left[out.write(left) :]
