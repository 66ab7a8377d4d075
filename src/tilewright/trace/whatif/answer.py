"""The predictions for a run, and the critical path of its steps by what it consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.records.errors import StoreError, UsageError
from tilewright.store.query import reading
from tilewright.trace.events.rows import append
from tilewright.trace.whatif.changes import Prediction, Simulator
from tilewright.trace.whatif.simulation import PathPart, critical_path
from tilewright.trace.whatif.timeline import read_timeline

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MOST_FLOORS = 5
_MOST_KERNELS, _MOST_SPANS = 20_000, 200_000


@dataclass(frozen=True)
class OnPath:
    """How much of the step's critical path is of one kind and name."""

    kind: str
    name: str
    us_per_step: float
    share: float


@dataclass(frozen=True)
class Answer:
    """The predictions, the largest gain first, and the critical path, the longest part first."""

    predictions: tuple[Prediction, ...]
    path: tuple[OnPath, ...]


def what_if(run: Path, changes: Sequence[str], step_us: float | None = None) -> Answer:
    """The predictions for `changes`, forms of `changes.FORMS`; for none of them, for all that the run allows.

    `step_us` is the step without the profiler, where it is known better than by the run.

    Raises:
        StoreError: the run is missing or damaged, or has no timeline or no steps.
        UsageError: a change is none, or changes nothing in this run.
    """
    with reading(run) as connection:
        tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
        if not {"step", "device_slice", "host_span", "operator_distance"} <= tables:
            raise StoreError(
                f"run {run} has no timeline; `tilewright profile` and `tilewright trace` make runs with one"
            )
        answer, _ = _ask(connection, changes, step_us)
    return answer


def add_predictions(connection: DuckDBPyConnection) -> None:
    """Fill tables `prediction`, with what the run allows, and `critical_path`, both of the schema.

    They stay empty without steps, and where there are so much that the simulation takes longer than all else.
    """
    ((kernels, spans),) = connection.execute(
        "SELECT (SELECT count(*) FROM device_slice), (SELECT count(*) FROM host_time)"
    ).fetchall()
    if kernels > _MOST_KERNELS or spans > _MOST_SPANS:
        return
    try:
        answer, path = _ask(connection, [])
    except StoreError:
        return
    rows = [(each.change, each.what, each.measured_us, each.predicted_us) for each in answer.predictions]
    append(connection, "prediction", rows)
    parts = [(round(part.start), round(part.end) - round(part.start), part.kind, part.name) for part in path]
    append(connection, "critical_path", parts)


def _ask(
    connection: DuckDBPyConnection, changes: Sequence[str], step_us: float | None = None
) -> tuple[Answer, list[PathPart]]:
    """The answer, and the critical path from begin to end; StoreError without steps, UsageError as `what_if`."""
    timeline = read_timeline(connection)
    simulator = Simulator(connection, timeline, step_us)
    parts = critical_path(timeline.tasks, timeline.begin, simulator.measured)
    predictions = [simulator.predict(change) for change in changes]
    if not changes:
        predictions = list(_all(connection, simulator))
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        spent[part.kind, part.name if part.kind != "host" else ""] += (part.end - part.start) / 1e3
    whole, steps = sum(spent.values()), max(timeline.steps.values())
    path = [OnPath(kind, name, us / steps, us / whole) for (kind, name), us in spent.items() if whole]
    gains = tuple(sorted(predictions, key=lambda each: -each.gain))
    return Answer(gains, tuple(sorted(path, key=lambda each: -each.us_per_step))), parts


def _all(connection: DuckDBPyConnection, simulator: Simulator) -> Iterator[Prediction]:
    """What the run allows: operators that would win most, classes of the host, ranks."""
    operators = connection.execute(
        """SELECT operator FROM distance WHERE win_ms_per_step > 0 GROUP BY operator
           ORDER BY sum(win_ms_per_step) DESC, operator LIMIT ?""",
        [_MOST_FLOORS],
    ).fetchall()
    classes = connection.execute(
        """SELECT class FROM host_account WHERE class NOT IN ('operators', 'untraced', 'profiler')
           GROUP BY class HAVING max(percent) > 1 ORDER BY class"""
    ).fetchall()
    asked = [f"floor:{operator}" for (operator,) in operators] + [f"class:{name}" for (name,) in classes]
    ((on_device, communicates),) = connection.execute(
        """SELECT count(*) > 0, coalesce(bool_or(kind = 'communication'), false) OR EXISTS (FROM host_collective)
           FROM device_slice"""
    ).fetchall()
    asked += ["host", "graph", "pinned", "bf16"] if on_device else []
    asked += ["overlap"] if communicates else []
    asked += ["optimizer", "batch:2"]
    asked += [
        f"rank:{rank}"
        for (rank,) in connection.execute("SELECT DISTINCT rank FROM collective ORDER BY rank").fetchall()
    ]
    for change in asked:
        try:
            yield simulator.predict(change)
        except UsageError:
            # The run has nothing of it.
            continue
