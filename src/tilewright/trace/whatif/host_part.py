"""How much of the host's tasks is of a kind, such as data or an optimizer's Python."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tilewright.trace.events.rows import Ints
from tilewright.trace.whatif.timeline import Timeline

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
    from numpy.typing import NDArray

_UPDATES = r": _(single|multi)_tensor_\w+$"
_CALL_NS = 5_000
_ARRAYS = 2.65
"""That an operator of an update reads and writes on average: two of `mul_`, three of `add_`, four of `addcdiv_`."""
# The operators of an update: how many kinds, how long all of it takes, of that what computes on elements, and by how
# many calls for each parameter. The shortest calls, on biases, only call; a device computes by itself.
_UPDATE = f"""
WITH called AS (SELECT file_id, class, what, bare FROM ({{}})),
kind AS (
    SELECT what, count(*) AS calls,
           sum(greatest(bare - least(least_ns, {_CALL_NS}), 0)) AS computing
    FROM called JOIN (
        SELECT file_id, what, quantile_cont(bare, 0.1) AS least_ns FROM called GROUP BY file_id, what
    ) USING (file_id, what)
    WHERE class = 'operators' AND file_id NOT IN (SELECT file_id FROM device_slice) GROUP BY what
)
SELECT (SELECT count(DISTINCT what) FROM called WHERE class = 'operators'), (SELECT sum(bare) FROM called),
       sum(computing), sum(calls) / min(calls)
FROM kind WHERE computing >= 0.2 * (SELECT max(computing) FROM kind)"""


class Spans:
    """The parts of a kind of the host's time, by the table `host_time`, without what recording added to them."""

    def __init__(
        self, connection: DuckDBPyConnection, condition: str, given: list[object], of: str = "host_time"
    ) -> None:
        self.files: dict[int, tuple[Ints, NDArray[np.float64]]] = {}
        self.fused = 1.0
        sql = f"""
            SELECT file_id, ts, dur, class, what, CASE WHEN class = 'profiler' THEN 0
                       ELSE greatest(dur - stopped - coalesce(ns_per_event, 0) * host_time.events, 0) END AS bare
            FROM host_time LEFT JOIN host_step_time USING (file_id) WHERE {condition}"""
        if of == "optimizer":
            sql = f"""
                SELECT spans.* FROM ({sql}) AS spans JOIN (
                    -- The function that calls operators, where stacks show it: what is around it stays.
                    SELECT ts, ts + dur AS ended FROM slice WHERE regexp_matches(name, '{_UPDATES}')
                    UNION ALL
                    SELECT ts, ts + dur FROM slice WHERE name LIKE 'Optimizer.step#%'
                    AND NOT EXISTS (FROM slice WHERE regexp_matches(name, '{_UPDATES}'))
                ) AS around ON spans.ts >= around.ts AND spans.ts < around.ended"""
            self.fused = _left_by_one_call(connection.execute(_UPDATE.format(sql), given).fetchone())
        columns = connection.execute(
            f"SELECT file_id, ts, dur, bare FROM ({sql}) ORDER BY file_id, ts", given
        ).fetchnumpy()
        file_id, ts, dur, bare = columns.values()
        for file in np.unique(file_id).tolist():
            own = file_id == file
            begins, lengths = ts[own], bare[own].astype(np.float64)
            # The time of that kind until each begin and end of a span; between two of them it grows evenly.
            edges = np.stack([begins, begins + dur[own]], axis=1).ravel()
            grown = np.repeat(np.cumsum(lengths), 2)
            grown[0::2] -= lengths
            self.files[file] = edges, grown

    def within(self, file_id: int, start: int, end: int) -> float:
        """How long that kind lasts between two times of a file."""
        if file_id not in self.files:
            return 0.0
        begun, ended = np.interp([start, end], *self.files[file_id])
        return float(ended - begun)


class HostPart:
    """How much of the tasks of the host is of a kind."""

    def __init__(self, part: Spans, whole: Spans, timeline: Timeline, bare: list[float]) -> None:
        self._part, self._whole, self._timeline, self._bare = part, whole, timeline, bare
        self.changes, self.fused = bool(part.files), part.fused

    def left(self, at: int, factor: float) -> float:
        """The duration of the task at a place if its part of that kind takes `factor` times as long."""
        task = self._timeline.tasks[at]
        if task.kind not in ("host", "launch") or not task.dur:
            return self._bare[at]
        # Of light steps another step tells what the host did, between the same calls.
        told = self._timeline.described.get(at, [(task.file_id, task.start, task.end)])
        whole = sum(self._whole.within(*piece) for piece in told)
        of_kind = sum(self._part.within(*piece) for piece in told)
        return self._bare[at] * (1 + of_kind / whole * (factor - 1)) if whole else self._bare[at]


def _left_by_one_call(update: tuple[float | None, ...] | None) -> float:
    """The part of an update's time that is left where one call does all of it, of the row of `_UPDATE`.

    Of calling one kind is left. What computes reads and writes each array once: the parameter, its gradient and the
    optimizer's state, of which about every fourth operator has one.

    >>> round(_left_by_one_call((13, 100.0, 0.0, 1.0)), 3), round(_left_by_one_call((13, 100.0, 100.0, 8.0)), 3)
    (0.077, 0.33)
    """
    kinds, whole, computing, calls = update or (None,) * 4
    if not kinds or not whole:
        return 1.0
    computes = min((computing or 0.0) / whole, 1.0)
    states = math.ceil(((calls or 1.0) - 1) / 4)
    passes = min((2 * states + 3) / (_ARRAYS * (calls or 1.0)), 1.0)
    return (1 - computes) / kinds + computes * passes
