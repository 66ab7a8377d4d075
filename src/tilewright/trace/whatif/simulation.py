"""Tasks and what each waits for; when they would end if some took another time, and the critical path.

A task ends its duration after the last of the tasks that it waits for, each with a lag: the time from a launch to its
kernel, or between two kernels of a stream. With the measured durations everything ends when it was measured to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Edge(NamedTuple):
    """The place of the task that is waited for, and the nanoseconds after its end."""

    task: int
    lag: int


@dataclass
class Task:
    """A part of the host's or of a stream's time, as measured, in nanoseconds."""

    start: int
    end: int
    kind: str
    """host, launch, wait, kernel, copy, communication (after the last rank has come) or arrival (of one rank)."""
    name: str
    file_id: int
    after: list[Edge] = field(default_factory=list)
    launched_by: int = -1
    """The place of the task in which the host launched it."""
    rank: int | None = None
    slice_id: int = -1
    """The kernel or copy."""

    @property
    def dur(self) -> int:
        """Its own time: what it waits for is over then."""
        return self.end - self.start


@dataclass(frozen=True)
class Simulated:
    """When each task ends, and which it waited for last: an index into its `after`, or -1."""

    ends: list[float]
    binding: list[int]

    @property
    def end(self) -> float:
        return max(self.ends, default=0.0)


def simulate(
    tasks: Sequence[Task],
    begin: int,
    dur: Callable[[int, Task], float] | None = None,
    lag: Callable[[int, Task, Edge], float | None] | None = None,
) -> Simulated:
    """The ends of `tasks`, of which each waits only for ones that end before or with it, from `begin` on.

    `dur` gives the duration of a task instead of the measured one, `lag` that of an edge, or None if it does not count.
    """
    order = sorted(range(len(tasks)), key=lambda at: (tasks[at].end, tasks[at].start, at))
    ends, binding = [0.0] * len(tasks), [-1] * len(tasks)
    for at in order:
        task = tasks[at]
        ready = float(begin) if task.after else float(task.start)
        for place, edge in enumerate(task.after):
            after = edge.lag if lag is None else lag(at, task, edge)
            if after is not None and (found := ends[edge.task] + after) >= ready:
                ready, binding[at] = found, place
        ends[at] = ready + (task.dur if dur is None else dur(at, task))
    return Simulated(ends, binding)


class PathPart(NamedTuple):
    """A part of the critical path: the task, or the lag before it, from `start` to `end`."""

    start: float
    end: float
    kind: str
    name: str


def critical_path(tasks: Sequence[Task], begin: int, found: Simulated) -> list[PathPart]:
    """The chain of tasks and lags from `begin` to the end, without holes, the first one first.

    >>> host = Task(0, 5, "host", "python", 0)
    >>> kernel = Task(7, 20, "kernel", "mm", 0, [Edge(0, 2)])
    >>> [(part.start, part.end, part.kind) for part in critical_path([host, kernel], 0, simulate([host, kernel], 0))]
    [(0, 5.0, 'host'), (5.0, 7.0, 'latency'), (7.0, 20.0, 'kernel')]
    """
    parts: list[PathPart] = []
    at = max(range(len(tasks)), key=lambda place: found.ends[place], default=-1)
    reached = found.end
    while at >= 0:
        task = tasks[at]
        edge = task.after[found.binding[at]] if found.binding[at] >= 0 else None
        ready = found.ends[edge.task] + edge.lag if edge else min(task.start, reached)
        if reached > ready:
            parts.append(PathPart(ready, reached, task.kind, task.name))
        if edge and edge.lag:
            kind = "wait" if task.kind == "wait" else "latency"
            parts.append(PathPart(ready - edge.lag, ready, kind, task.name))
        at, reached = (edge.task, found.ends[edge.task]) if edge else (-1, ready)
    if reached > begin:
        parts.append(PathPart(begin, reached, "latency", "before the first work"))
    return parts[::-1]
