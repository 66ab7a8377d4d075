"""Statements of Perfetto's SQL as DuckDB takes them, for a run that is read only.

What a query makes (views, tables, functions) is temporary. Tables of Perfetto's that a run has no data for are named in
the error with the nearest that it has.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from itertools import count

from tilewright.records.errors import StoreError

PREPARED = """
CREATE OR REPLACE TEMP MACRO largest(a, b) AS CASE WHEN a IS NOT NULL AND b IS NOT NULL THEN greatest(a, b) END,
    (a, b, c) AS CASE WHEN a IS NOT NULL AND b IS NOT NULL AND c IS NOT NULL THEN greatest(a, b, c) END;
CREATE OR REPLACE TEMP MACRO smallest(a, b) AS CASE WHEN a IS NOT NULL AND b IS NOT NULL THEN least(a, b) END,
    (a, b, c) AS CASE WHEN a IS NOT NULL AND b IS NOT NULL AND c IS NOT NULL THEN least(a, b, c) END
"""
"""SQLite's `max` and `min` of several values, of which DuckDB makes lists."""
WIDER_SLICE = """
CREATE OR REPLACE TEMP VIEW slice AS
SELECT *, id AS slice_id, NULL::BIGINT AS thread_ts, NULL::BIGINT AS thread_dur FROM {}.main.slice
"""
"""Columns that would make `slice_id` of other tables ambiguous: only where a query fails without them."""
_ONLY_WIDER = ("slice_id", "thread_dur", "thread_ts")

MODULES = ("slices.with_context", "time.conversion")
"""What they hold is here without them."""

NEAREST = {
    "sched": "host_time, what the thread of the steps did",
    "thread_state": "host_time, what the thread of the steps did",
    "sched_slice": "host_time, what the thread of the steps did",
    "cpu": "machine in the table run",
    "gpu_slice": "device_slice, the kernels and copies with their launches",
    "gpu_track": "thread_track, a track for each stream",
    "cpu_counter_track": "counter_track",
    "gpu_counter_track": "counter_track",
    "cpu_track": "thread_track",
    "perf_sample": "slice WHERE category = 'python_function', Python's calls",
    "stack_profile_frame": "slice WHERE category = 'python_function', Python's calls",
    "stack_profile_callsite": "slice WHERE category = 'python_function', and parent_id",
    "heap_profile_allocation": "memory_event, what the allocators gave and took",
    "heap_graph_object": "memory_event, what the allocators gave and took",
    "raw": "slice",
    "ftrace_event": "slice",
    "actual_frame_timeline_slice": "step, the program's steps",
    "expected_frame_timeline_slice": "step, the program's steps",
    "android_logs": "instant",
    "android_startups": "step, the program's steps",
    "span_join": "a join ON a.ts < b.ts + b.dur AND b.ts < a.ts + a.dur",
}

_TOKEN = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/|[A-Za-z_]\w*|\s+|.", re.S)
_MADE = re.compile(
    r"\s*CREATE\s+(?:(OR\s+REPLACE)\s+)?(?:TEMP(?:ORARY)?\s+)?(?:PERFETTO\s+)?(TABLE|VIEW|MACRO|FUNCTION)\s+"
    r"(IF\s+NOT\s+EXISTS\s+)?(\w+)\s*(\([^)]*\))?\s*(?:RETURNS\s+(TABLE\s*\([^)]*\)|\w+)\s+)?AS\b",
    re.I,
)
_INCLUDED = re.compile(r"\s*INCLUDE\s+PERFETTO\s+MODULE\s+([\w.*]+)\s*", re.I)
_VIRTUAL = re.compile(r"\s*CREATE\s+VIRTUAL\s+TABLE\b", re.I)


def statements(sql: str) -> list[str]:
    """The statements of `sql`, in DuckDB's words.

    >>> statements("INCLUDE PERFETTO MODULE slices.with_context; SELECT max(1, 2), max(dur) FROM slice")
    [' SELECT largest(1, 2), max(dur) FROM slice']
    >>> statements("CREATE PERFETTO FUNCTION twice(x INT) RETURNS INT AS SELECT 2 * $x")
    ['CREATE OR REPLACE TEMP MACRO twice(x) AS (SELECT 2 * x)']
    >>> statements("SELECT name REGEXP 'gemm|mm' FROM slice")
    ["SELECT name ~ '(?s).*(?:gemm|mm).*' FROM slice"]
    """
    return [made for tokens in _split(sql) if (made := _statement("".join(_in_duckdb(tokens)))).strip()]


def widened(error: str) -> bool:
    """Whether what a query lacks is a column of Perfetto's `slice`."""
    return any(re.search(rf'column (?:named )?"{name}"', error) for name in _ONLY_WIDER)


def nearest(error: str) -> str:
    """A hint for an error about a table of Perfetto's that no run has."""
    found = re.search(r"(?:Table|Function) with name (\w+) does not exist", error)
    name = found[1].lower() if found else ""
    return f"Perfetto's `{name}` has no data here; the nearest is {NEAREST[name]}" if name in NEAREST else ""


def _split(sql: str) -> Iterator[list[str]]:
    """The tokens of each statement."""
    tokens: list[str] = []
    for token in _TOKEN.findall(sql):
        if token == ";":
            yield tokens
            tokens = []
        else:
            tokens.append(token)
    yield tokens


def _statement(text: str) -> str:
    """What makes something makes a temporary one; modules are here already."""
    if included := _INCLUDED.fullmatch(text):
        if not fnmatch.filter(MODULES, included[1]):
            raise StoreError(f"no module {included[1]} of Perfetto's here, only {' and '.join(MODULES)}")
        return ""
    if _VIRTUAL.match(text):
        raise StoreError(f"no SPAN_JOIN here; the nearest is {NEAREST['span_join']}")
    if not (made := _MADE.match(text)):
        return text
    _, what, unless, name, columns, returns = made.groups()
    rest = text[made.end() :].strip()
    if what.upper() in ("TABLE", "VIEW"):
        listed = f" ({', '.join(_names(columns))})" if columns else ""
        again = unless or ""
        return f"CREATE {'' if again else 'OR REPLACE '}TEMP {what} {again}{name}{listed} AS {rest}"
    named = _names(columns or "")
    body = re.sub(r"\$(\w+)", lambda found: found[1] if found[1] in named else found[0], rest)
    table = "TABLE " if returns and returns.upper().startswith("TABLE") else ""
    inner = body if table or not body.upper().startswith(("SELECT", "WITH")) else f"({body})"
    return f"CREATE OR REPLACE TEMP MACRO {name}({', '.join(named)}) AS {table}{inner}"


def _names(columns: str) -> list[str]:
    """Of `(x INT, y STRING)` the names."""
    return [part.split()[0] for part in columns.strip("() ").split(",") if part.strip()]


def _in_duckdb(tokens: list[str]) -> Iterator[str]:
    for place, token in enumerate(tokens):
        word = token.upper()
        if word in ("MAX", "MIN") and _arguments(tokens, place + 1) > 1:
            yield "largest" if word == "MAX" else "smallest"
        elif word == "REGEXP":
            yield "~"
        elif token.startswith("'") and _before(tokens, place) == "REGEXP":
            # DuckDB's operator asks for the whole text, Perfetto's for a part.
            yield f"'(?s).*(?:{token[1:-1]}).*'"
        else:
            yield token


def _before(tokens: list[str], place: int) -> str:
    return next((token.upper() for token in reversed(tokens[:place]) if not token.isspace()), "")


def _arguments(tokens: list[str], place: int) -> int:
    """How many arguments the parentheses have that begin at `place`; 0 without any."""
    begun = next((at for at in count(place) if at >= len(tokens) or not tokens[at].isspace()), len(tokens))
    if begun >= len(tokens) or tokens[begun] != "(":
        return 0
    depth, found = 0, 1
    for token in tokens[begun:]:
        depth += (token in "([{") - (token in ")]}")
        found += token == "," and depth == 1
        if not depth:
            break
    return found
