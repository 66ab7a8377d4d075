"""The tasks of a run: host, launches, waits, streams and collectives, with what each waits for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from tilewright.records.errors import StoreError
from tilewright.trace.whatif.simulation import Edge, Task

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_NEAR_NS = 20_000
"""A kernel that begins so soon after another stream's ended, and later than its own launch allows, waited for it."""
_LATENCY_NS, _GAP_NS, _WAIT_NS = 5_000, 1_000, 2_000
"""From a launch to its kernel, between two kernels of a stream, and in a wait for what is done, where a trace has none
that shows it."""
_ROUNDING_NS = 1_000
_STEPS = """
SELECT file_id, min(ts), max(ts + host_dur), max(ts + dur), count(*) FROM step WHERE dur > 0
GROUP BY file_id ORDER BY file_id"""
AWAITS_RANKS = "communication"
"""The name of a wait of the host for collectives that another thread of its process runs."""
_CALLS = f"""
WITH spans AS (
    SELECT file_id, ts, ts + dur AS ended FROM host_time
    WHERE class = 'communication' AND file_id IN (SELECT file_id FROM host_collective)
),
-- A step that is recorded for its operators has the same calls, and nothing of the device.
alike AS (
    SELECT DISTINCT name FROM device_call AS call
    WHERE file_id = $like AND (EXISTS (FROM wait WHERE wait.slice_id = call.slice_id)
                               OR EXISTS (FROM device_slice WHERE launch_id = call.slice_id))
)
SELECT call.slice_id, call.ts, call.ts + call.dur AS ended, call.name,
       EXISTS (FROM wait WHERE wait.slice_id = call.slice_id) AS waits
FROM device_call AS call
WHERE call.file_id = $file AND call.ts BETWEEN $begin AND $end
  AND (waits OR EXISTS (FROM device_slice WHERE launch_id = call.slice_id) OR name IN (FROM alike))
UNION ALL
-- One that begins while the host waits for it already was asked for when that wait began.
SELECT slice_id, least(asked.ts, spans.ts), least(asked.ts, spans.ts), asked.name, false
FROM (SELECT * FROM host_collective WHERE file_id = $file AND ts BETWEEN $begin AND $end) AS asked
LEFT JOIN spans ON spans.file_id = asked.file_id AND asked.ts >= spans.ts AND asked.ts < spans.ended
UNION ALL
SELECT -1, ts, ended, '{AWAITS_RANKS}', true FROM spans WHERE file_id = $file AND ts BETWEEN $begin AND $end
ORDER BY 2, 5, 1"""
_WORK = """
SELECT work.ts, work.ts + work.dur, work.kind, coalesce(work.operator, work.name, '(no name)'),
       (work.upid, work.stream), work.launch_id, work.slice_id, collective.rank, collective.name, collective.in_group,
       collective.position
FROM (
    SELECT file_id, ts, dur, kind, operator, name, upid, stream, launch_id, slice_id, launch_ts FROM device_slice
    UNION ALL
    SELECT file_id, ts, dur, 'communication', name, NULL, NULL, track_id, slice_id, slice_id, NULL FROM host_collective
) AS work LEFT JOIN collective USING (slice_id)
WHERE work.file_id = ? AND coalesce(work.launch_ts, work.ts) BETWEEN ? AND ?
ORDER BY work.ts, work.slice_id"""


@dataclass
class Timeline:
    """The tasks of all files, and where the steps of each begin and end."""

    tasks: list[Task] = field(default_factory=list)
    described: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """For a task of the host in light steps, by its place, when the described step was between the same calls: file,
    begin, end."""
    begins: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        return min(self.begins.values())


def read_timeline(connection: DuckDBPyConnection) -> Timeline:
    """The steps of a run as tasks, on one clock.

    Raises:
        StoreError: it has no steps.
    """
    found = Timeline()
    arrivals: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    ahead = dict(connection.execute("SELECT file_id, any_value(skew_ns) FROM collective GROUP BY file_id").fetchall())
    for file_id, begin, host_end, end, steps in connection.execute(_STEPS).fetchall():
        first = len(found.tasks)
        before, waits = _add_host(connection, found.tasks, file_id, begin, host_end)
        _describe(connection, found, file_id, first)
        _add_devices(connection, found.tasks, file_id, (begin, end), before, waits, arrivals)
        skew = round(ahead.get(file_id, 0))
        for task in found.tasks[first:]:
            task.start, task.end = task.start - skew, task.end - skew
        found.begins[file_id], found.steps[file_id] = begin - skew, steps
    if not found.tasks:
        raise StoreError("the run has no steps; `tilewright profile` and `tilewright trace` make runs that have")
    _join_ranks(found.tasks, arrivals)
    _begin_together(found)
    return found


def _add_host(
    connection: DuckDBPyConnection, tasks: list[Task], file_id: int, begin: int, end: int, like: int = -1
) -> tuple[dict[int, int], list[int]]:
    """The host's time from `begin` to `end`; for each call the task before it, and the tasks that wait.

    Calls are those that launch or wait, and what is called so in the file `like`."""
    before: dict[int, int] = {}
    waits: list[int] = []
    first, free = len(tasks), begin

    def add(start: int, done: int, kind: str, name: str) -> None:
        after = [Edge(len(tasks) - 1, 0)] if len(tasks) > first else []
        tasks.append(Task(start, done, kind, name, file_id, after))

    for slice_id, ts, done, name, does_wait in connection.execute(
        _CALLS, {"file": file_id, "begin": begin, "end": end, "like": like}
    ).fetchall():
        start = max(ts, free)
        add(free, start, "host", "host")
        before[slice_id] = len(tasks) - 1
        free = max(done, start)
        add(start, free, "wait" if does_wait else "launch", name)
        if does_wait:
            waits.append(len(tasks) - 1)
    add(free, max(free, end), "host", "host")
    return before, waits


def _describe(connection: DuckDBPyConnection, found: Timeline, file_id: int, first: int) -> None:
    """Give each of the host's tasks from the place `first` on the time of the described step between the same calls.

    Where the steps make other calls, all of its time."""
    step = connection.execute(
        """SELECT described_by, ts, ts + host_dur FROM description
           JOIN operator_step ON operator_step.file_id = described_by WHERE description.file_id = ?""",
        [file_id],
    ).fetchone()
    if step is None:
        return
    told: list[Task] = []
    described_by, begin, end = step
    _add_host(connection, told, described_by, begin, end, like=file_id)
    _describe_by(found, told, first, ("host",), tail=1)
    _describe_by(found, told, first, ("launch", "wait"), tail=0)


def _describe_by(found: Timeline, told: list[Task], first: int, kinds: tuple[str, ...], tail: int) -> None:
    """`tail` pieces more than calls: the last one of a step and the first one of the next are one task."""
    pieces = [(task.file_id, task.start, task.end) for task in told if task.kind in kinds]
    places = [at for at in range(first, len(found.tasks)) if found.tasks[at].kind in kinds]
    calls = len(pieces) - tail
    alike = calls > 0 and (len(places) - tail) % calls == 0
    for position, at in enumerate(places):
        place = position % calls if calls else 0
        if not alike:
            found.described[at] = pieces
        elif tail and at == places[-1]:
            found.described[at] = [pieces[calls]]
        else:
            found.described[at] = [pieces[calls], pieces[0]] if tail and position and not place else [pieces[place]]


def _add_devices(
    connection: DuckDBPyConnection, tasks: list[Task], file_id: int, steps: tuple[int, int], before: dict[int, int],
    waits: list[int], arrivals: dict[tuple[str, str, int], list[int]],
) -> None:  # fmt: skip
    """The work that was launched within the steps, and what the host's waits wait for."""
    work = connection.execute(_WORK, [file_id, *steps]).fetchall()
    latency, gap = _usual(work, {launch_id: tasks[at].end for launch_id, at in before.items()})
    last: dict[object, int] = {}  # of each stream
    launched: list[tuple[int, int]] = []
    for start, end, kind, name, stream, launch_id, slice_id, rank, *collective in work:
        launch = before.get(launch_id)
        wanted = [(at, lag) for at, lag in ((launch, latency), (last.get(stream), gap)) if at is not None]
        others = [at for where, at in last.items() if where != stream and 0 <= start - tasks[at].end < _NEAR_NS]
        if others and all(start - tasks[at].end > _NEAR_NS for at, _ in wanted):
            wanted.append((max(others, key=lambda at: tasks[at].end), gap))
        after, by = _edges(tasks, start, end, wanted), -1 if launch is None else launch + 1
        if rank is not None:
            # A rank's wait for others within a collective is no work of its own.
            arrivals[tuple(collective)].append(len(tasks))
            tasks.append(Task(start, start, "arrival", name, file_id, after, by, rank))
            after = [Edge(len(tasks) - 1, 0)]
        last[stream] = len(tasks)
        launched.append((start if launch is None else tasks[launch].end, len(tasks)))
        kind = "copy" if kind == "fill" else kind
        tasks.append(Task(start, end, kind, name, file_id, after, by, rank, slice_id))
    _bind_waits(tasks, waits, sorted(launched))


def _usual(work: list[tuple[int, ...]], launched: dict[int, int]) -> tuple[int, int]:
    """The usual time from a launch to its kernel on an idle stream, and between two kernels that were queued."""
    latencies, gaps = [], []
    last: dict[object, int] = {}
    for start, done, _, _, stream, launch_id, *_ in work:
        free, at = last.get(stream), launched.get(launch_id)
        if at is not None and (free is None or free < at):
            latencies.append(start - at)
        elif free is not None and at is not None:
            gaps.append(start - free)
        last[stream] = done
    return (
        max(0, round(median(latencies))) if latencies else _LATENCY_NS,
        # Of a stream that waits for others they are long, and no gaps.
        max(0, min(round(median(gaps)), _GAP_NS)) if gaps else _GAP_NS,
    )


def _edges(tasks: list[Task], start: int, end: int, wanted: list[tuple[int, int]]) -> list[Edge]:
    """What work from `start` to `end` waits for: the last to be over gives all the time until then, the others the
    usual lag, or less where less was measured."""
    # Kernels of one stream may overlap by the rounding of the clock.
    possible = [
        (at, lag, start - tasks[at].end) for at, lag in wanted if tasks[at].end <= min(start + _ROUNDING_NS, end)
    ]
    binding = max(possible, key=lambda each: tasks[each[0]].end + min(each[1:]), default=None)
    return [
        Edge(at, measured if (at, lag, measured) == binding else min(lag, measured)) for at, lag, measured in possible
    ]


def _bind_waits(tasks: list[Task], waits: list[int], launched: list[tuple[int, int]]) -> None:
    """A wait ends after the last work that was launched before it and was done by its end."""
    running: list[int] = []
    at, latest = 0, -1
    for place in waits:
        wait = tasks[place]
        while at < len(launched) and launched[at][0] <= wait.start:
            running.append(launched[at][1])
            at += 1
        done = [work for work in running if tasks[work].end <= wait.end]
        latest = max([*done, *([latest] if latest >= 0 else [])], key=lambda work: tasks[work].end, default=-1)
        running = [work for work in running if tasks[work].end > wait.end]
        spent, host = wait.dur, [edge.task for edge in wait.after]
        wait.after = []
        if latest >= 0 and tasks[latest].end >= wait.start:
            wait.after.append(Edge(latest, wait.end - tasks[latest].end))
            spent = min(_WAIT_NS, spent)
        wait.after += [Edge(task, spent) for task in host]
        wait.start = wait.end


def _begin_together(found: Timeline) -> None:
    """The recording of a rank that began earlier has a longer first wait for the others, which belongs to no step.

    What a rank does before its first collective goes on is moved by that much, as far as it waits afterwards.
    """
    latest = max(found.begins.values())
    for file_id, begin in found.begins.items():
        own = [task for task in found.tasks if task.file_id == file_id]
        joined = [task.start for task in own if task.kind == "communication" and task.rank is not None]
        first = [task for task in own if joined and task.end <= min(joined) and task.start < min(joined)]
        room = min(joined) - max((task.end for task in first), default=0) if joined else 0
        if (later := min(latest - begin, room)) > 0:
            for task in first:
                task.start, task.end = task.start + later, task.end + later
            found.begins[file_id] = begin + later


def _join_ranks(tasks: list[Task], arrivals: dict[tuple[str, str, int], list[int]]) -> None:
    """A collective goes on when its last rank has come."""
    for places in arrivals.values():
        begun = max(tasks[at].start for at in places)
        for at in places:
            task = tasks[at + 1]
            task.after = [Edge(other, 0) for other in places if tasks[other].start <= task.end]
            task.start = min(begun, task.end)
