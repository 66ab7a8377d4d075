"""Tables of the page from the views of the timeline analysis."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewright.report.page_budget import fitting
from tilewright.report.queries import shown
from tilewright.store.query import first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MOST_ROWS = 500
_ROOM_OF_ONE = 100_000


class TraceTable(NamedTuple):
    """One table: `needs` are the views of its query; the suffix of a column's name is its unit."""

    id: str
    short: str
    title: str
    lead: str
    needs: frozenset[str]
    sql: str


TABLES = (
    TraceTable(
        "accounting",
        "Accounting",
        "Where a step's time went",
        "Each device's mean step, divided into classes. A gap counts as synchronisation if the host had waited, and as "
        "launch-bound if it launched late.",
        frozenset({"step_account"}),
        """\
SELECT process.name AS device, class, ms_per_step AS time_ms, percent, steps
FROM step_account JOIN process USING (upid)
ORDER BY upid, ms_per_step DESC""",
    ),
    TraceTable(
        "synchronisation",
        "Waits",
        "What made the host wait",
        "Calls that returned only when the device had caught up, by the line that made them. Lost is the time that "
        "the device stood still for it.",
        frozenset({"synchronisation", "file_rank"}),
        """\
SELECT rank, source, what, calls, waited_ms_per_step AS waited_ms, lost_ms_per_step AS lost_ms
FROM synchronisation LEFT JOIN file_rank USING (file_id) ORDER BY lost_ms DESC, waited_ms DESC""",
    ),
    TraceTable(
        "win",
        "What to win",
        "What you would win",
        "The largest possible gains first: operators that reach their floor, and gaps caused by the host. They are of "
        "a step without the profiler, where one was timed.",
        frozenset({"what_you_would_win", "file_rank"}),
        """\
SELECT rank, ms_per_step AS time_ms, how, operator, calls, why, source
FROM what_you_would_win LEFT JOIN file_rank USING (file_id) ORDER BY time_ms DESC""",
    ),
    TraceTable(
        "distance",
        "Floors",
        "Operators beside their floors",
        "Each operator's time in the mean step beside the least that its bytes and FLOPs allow.",
        frozenset({"distance", "file_rank"}),
        """\
SELECT rank, operator, source, calls, ms_per_step AS time_ms, percent, floor_us, times_floor, verdict, GBps, TFLOPs,
       dtype, shapes
FROM distance LEFT JOIN file_rank USING (file_id) ORDER BY ms_per_step DESC""",
    ),
    TraceTable(
        "shares",
        "Operator times",
        "Operators, self and total",
        "Self is what an operator did or launched itself, total includes what it called. Shares are of all host time "
        "within operators, calls and ranges, and of all device time.",
        frozenset({"operator_share"}),
        """\
SELECT name, kind, calls, cpu_self AS host_self_ns, cpu_total AS host_total_ns, 100 * of_cpu AS of_host_percent,
       nullif(device_self, 0) AS device_self_ns, nullif(device_total, 0) AS device_total_ns,
       100 * of_device AS of_device_percent,
       CASE WHEN one_off THEN 'once' ELSE 'every step' END AS happens, source
FROM operator_share""",
    ),
    TraceTable(
        "ranks",
        "Communication",
        "Communication",
        "The time that each rank's device spent in collectives, and the part that no kernel overlapped.",
        frozenset({"communication"}),
        """\
SELECT rank, device, collectives, communication_ms, exposed_ms, hidden_percent, computing_ms
FROM communication""",
    ),
    TraceTable(
        "stragglers",
        "Stragglers",
        "Who kept the others waiting",
        "A collective begins on all ranks when the last has come. Caused is how much less the others would have "
        "waited without that rank; at work, the share of it in which that rank's device worked and did not stand still "
        "for a host that launched late. Clocks are aligned by the collectives' ends.",
        frozenset({"straggler"}),
        """\
SELECT rank, collectives, came_last, waited_ms, caused_ms, at_work_percent, clock_ahead_us
FROM straggler""",
    ),
    TraceTable(
        "losses",
        "Losses",
        "Missing from the trace",
        "Events that the profiler dropped, or that could not be read.",
        frozenset({"loss"}),
        "FROM loss",
    ),
)


def trace_tables(connection: DuckDBPyConnection, present: Collection[str]) -> list[dict[str, Any]]:
    """The non-empty tables whose views are all `present`, each with at most 500 rows and 100 kB.

    A run of another version may have a view of that name with other columns: its table says so in `problem`.
    """
    import duckdb

    found = []
    for table in TABLES:
        if not table.needs <= set(present):
            continue
        columns: list[str] = []
        rows: list[tuple[object, ...]] = []
        problem = ""
        try:
            cursor = connection.execute(table.sql)
            columns = [str(column[0]) for column in cursor.description or ()]
            rows = cursor.fetchall()
        except duckdb.BinderException as error:
            problem = f"This run was written by another version of tilewright. {first_line(error)}"
        if rows or problem:
            kept = fitting(([shown(value) for value in row] for row in rows[:_MOST_ROWS]), _ROOM_OF_ONE)
            told = {"id": table.id, "short": table.short, "title": table.title, "lead": table.lead, "sql": table.sql}
            found.append(told | {"columns": columns, "rows": kept, "total": len(rows), "problem": problem})
    return found
