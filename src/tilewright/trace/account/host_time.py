"""The time of the thread that makes the steps: every nanosecond of a step is in exactly one class, with its line.

At any instant the thread is in some events, each within another: a step, Python frames, operators. Of those that have a
class the first group decides, and within it the outermost event:

1. *data* (the program's next batch), *compilation*, *garbage collection*;
2. *communication*, *device* (the host waits for it), *I/O*, *sleep and locks*, *allocator*;
3. *operators*, unless a function of the user's runs within the operator;
4. *Python*, and *profiler*: the recorder's own functions.

What remains is *untraced*: the trace has no Python stacks, so that nothing tells Python from idleness.
"""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tilewright.trace.events.nesting import NestedSlices, nest
from tilewright.trace.events.rows import Ints, distinct, fetch

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
    from numpy.typing import NDArray

CLASSES = (
    *("untraced", "Python", "profiler", "operators", "device", "I/O", "sleep and locks", "allocator"),
    *("communication", "garbage collection", "compilation", "data"),
)
_GROUP = 100
"""A code is the group times this, plus the place in `CLASSES`: 0 has no class."""
_PYTHON, _PROFILER = _GROUP + CLASSES.index("Python"), _GROUP + CLASSES.index("profiler")
_OPERATORS, _WAITING, _DECIDING = 2, 3, 4
_LOCKED = _WAITING * _GROUP + CLASSES.index("sleep and locks")
_LONG_NS = 100_000
_LATE_NS = 1000
"""An event's line is the one shortly after its begin, when the clocks surely agree; of a shorter one, in its middle."""


def add_host_time(connection: DuckDBPyConnection) -> None:
    """Add table `host_time` and view `host_account`; what host_time.sql needs comes first."""
    _execute(connection, "host_time.sql")
    for (file_id,) in connection.execute("SELECT file_id FROM host_thread ORDER BY file_id").fetchall():
        _divide(connection, file_id)
    _execute(connection, "host_account.sql", classes=list(CLASSES))


def _execute(connection: DuckDBPyConnection, script: str, **lists: list[str]) -> None:
    """Run a script, in which `$name` is the list of that name: several statements take no parameters."""
    text = files("tilewright.trace").joinpath("account", script).read_text("utf-8")
    for name, values in lists.items():
        text = text.replace(f"${name}", str(values))
    connection.execute(text)


class _Causes:
    """For each event of a nest: the code of the last two groups in force, the event that gives it, and the functions
    around it, or -1."""

    def __init__(
        self, nested: NestedSlices, code: Ints, is_python: NDArray[np.bool_], is_own: NDArray[np.bool_]
    ) -> None:
        size = len(code)
        code = np.where(code < _WAITING * _GROUP, code, 0)
        self.code, self.given = code.copy(), np.where(code > 0, np.arange(size), -1)
        self.frame = np.where(is_own, np.arange(size), -1)
        self.called = np.full(size, -1, np.int64)
        """The outermost function or operator that the innermost function of the user's own called."""
        callable_ = is_python | (code // _GROUP == _OPERATORS)
        by_depth = np.argsort(nested.depth, kind="stable")
        ends = np.searchsorted(nested.depth[by_depth], np.arange(1, int(nested.depth.max(initial=0)) + 2))
        for begin, end in pairwise(ends.tolist()):
            at = by_depth[begin:end]
            outer = nested.parent[at]
            group, around = code[at] // _GROUP, self.code[outer] // _GROUP
            own = is_own[at]
            taken = (group > around) | ((group == around) & (group > 0)) | (own & (around == _OPERATORS))
            self.code[at] = np.where(taken, code[at], self.code[outer])
            self.given[at] = np.where(taken, at, self.given[outer])
            self.frame[at] = np.where(own, at, self.frame[outer])
            first = (self.called[outer] < 0) & callable_[at] & (self.frame[outer] >= 0)
            self.called[at] = np.where(own, -1, np.where(first, at, self.called[outer]))


def _outermost(nested: NestedSlices, chosen: Ints, times: Ints) -> Ints:
    """For each time the first begun of the events at the places `chosen` that are open then, or -1.

    Of these few the nest is made again: where a profiler pairs calls with the wrong returns, its Python functions
    outlast what they are in.
    """
    few = nest(np.zeros(len(chosen), np.int64), nested.ts[chosen], nested.end[chosen] - nested.ts[chosen])
    place = few.holding(np.zeros(len(times), np.int64), times)
    while (inner := np.flatnonzero((place >= 0) & (few.parent[np.maximum(place, 0)] >= 0) if len(chosen) else [])).size:
        place[inner] = few.parent[place[inner]]
    return _at(chosen[few.order], place)


def _at(values: Ints, places: Ints, none: int = -1) -> Ints:
    """The value at each place; `none` for the place -1."""
    return np.where(places >= 0, values[np.maximum(places, 0)], none) if len(values) else np.full(len(places), none)


def _divide(connection: DuckDBPyConnection, file_id: int) -> None:
    """Fill `host_span` of one file."""
    events = fetch(
        connection,
        """SELECT id, ts, dur, code, is_python::BIGINT, is_own::BIGINT, named, framed, sourced FROM host_event
           WHERE file_id = ? ORDER BY id""",
        file_id,
    )
    nested = nest(np.zeros(len(events[0]), np.int64), *events[1:3])
    ids, _, _, code, is_python, is_own, named, framed, sourced = (column[nested.order] for column in events)
    causes = _Causes(nested, code, is_python > 0, is_own > 0)

    number, reached, enters = fetch(
        connection, "SELECT number, ts, enters::BIGINT FROM line_reached WHERE file_id = ? ORDER BY ts", file_id
    )
    # Between two neighbours of these nothing changes.
    starts, ends, step = _within_steps(connection, file_id, [nested.ts, nested.end, reached])
    if not len(starts):
        return

    def line_at(times: Ints) -> Ints:
        return _at(number, np.searchsorted(reached, times, side="right") - 1)

    place = nested.holding(np.zeros(len(starts), np.int64), starts)
    # The recorder's own reads and waits are the recorder's.
    waiting = _outermost(nested, np.flatnonzero((code // _GROUP == _WAITING) & (causes.code != _PROFILER)), starts)
    deciding = _outermost(nested, np.flatnonzero(code // _GROUP == _DECIDING), starts)
    within_code = np.where(waiting >= 0, _at(code, waiting), _at(causes.code, place, 0))
    # Of Python what counts is what the user's line called.
    by_call = (within_code == _PYTHON) | (within_code == _PROFILER)
    within = np.where(waiting >= 0, waiting, np.where(by_call, -1, _at(causes.given, place)))
    called = _at(causes.called, place)
    outer = deciding >= 0
    given = np.where(outer, deciding, within)
    found = np.where(outer, _at(code, deciding), within_code)
    now = line_at(starts)
    # Python moves from line to line; another event is where it began, and an operator where its forward was called.
    moves = found // _GROUP <= 1
    begun = _at(line_at(nested.ts + np.minimum(nested.end - nested.ts, _LATE_NS) // 2), given)
    # A frame has the line of its `def`, for want of a better one.
    here = np.where(now < 0, _at(framed, _at(causes.frame, place)), now)
    there = np.where(begun < 0, _at(framed, _at(causes.frame, given)), begun)
    forward = np.where(found // _GROUP == _OPERATORS, _at(sourced, given), -1)
    source = np.where(moves, here, np.where(forward < 0, there, forward))
    columns = [
        step, found, _at(ids, given), _at(named, np.where((found == _PYTHON) | (found == _PROFILER), called, given)),
        _at(ids, called), _at(named, called), source, np.where(outer, within_code, 0),
        *(np.where(outer, column, -1) for column in (_at(named, within), here)),
    ]  # fmt: skip
    first = np.flatnonzero(np.r_[True, np.any([column[1:] != column[:-1] for column in columns], axis=0)])
    last = np.append(first[1:], len(starts)) - 1
    # Long where a block is entered, and in no function that the trace has: it waits for a lock.
    entering = _at(enters, np.searchsorted(reached, starts[first], side="right") - 1, 0) > 0
    entering &= (found[first] == _PYTHON) & (called[first] < 0) & (ends[last] - starts[first] >= _LONG_NS)
    columns[1][first[entering]] = _LOCKED
    begins = np.searchsorted(nested.ts, np.append(starts, ends[-1]))
    count = begins[last + 1] - begins[first]
    _write(connection, file_id, starts[first], ends[last], [column[first] for column in columns], count)


def _within_steps(connection: DuckDBPyConnection, file_id: int, times: list[Ints]) -> tuple[Ints, Ints, Ints]:
    """The begin and end of what lies between two neighbours of `times` in a step, and the begin of that step."""
    step_ts, step_dur = fetch(connection, "SELECT ts, dur FROM host_step WHERE file_id = ? ORDER BY ts", file_id)
    edges = distinct(np.concatenate([*times, step_ts, step_ts + step_dur]))
    starts, ends = edges[:-1], edges[1:]
    step = np.searchsorted(step_ts, starts, side="right") - 1
    inside = (step >= 0) & (starts < (step_ts + step_dur)[step])
    return starts[inside], ends[inside], step_ts[step[inside]]


def _write(
    connection: DuckDBPyConnection, file_id: int, starts: Ints, ends: Ints, columns: list[Ints], events: Ints
) -> None:
    """Add the spans of a file to `host_span`."""
    spans = {  # noqa: F841  # DuckDB finds it by its name
        "start": starts,
        "length": ends - starts,
        **{f"c{at}": column for at, column in enumerate(columns)},
        "events": events,
    }
    chosen = ", ".join(f"c{at}" for at in range(1, len(columns)))
    connection.execute(
        f"""INSERT INTO host_span SELECT $file, (SELECT utid FROM host_thread WHERE file_id = $file), c0, start, length,
            {chosen}, events, 0 FROM spans""",
        {"file": file_id},
    )
