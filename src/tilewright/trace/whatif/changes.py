"""Changes of a program, and the step that a simulation predicts for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.records.errors import UsageError
from tilewright.trace.account.host_time import CLASSES
from tilewright.trace.price.distance import link_GBps
from tilewright.trace.price.precision import floors_in_bf16
from tilewright.trace.whatif.host_part import HostPart, Spans
from tilewright.trace.whatif.simulation import Edge, Simulated, Task, simulate
from tilewright.trace.whatif.timeline import AWAITS_RANKS, Timeline

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

WORK = ("kernel", "copy", "communication")
_FIXED_NS = 2_000
"""What a kernel takes however little it does."""
_REPLAYED_NS = 300
"""From a kernel to the next in a CUDA graph on an H200: 124 of 0.325 ms took 0.363, 255 of 0.640 took 0.695."""
_MOST_SLOWER, _HALVINGS = 1.5, 12
"""Of what is fitted, as recorded, and how often the search for what it takes without the profiler halves the rest."""
_CLEARLY = 1.01
"""A step that is longer by this than with a host that takes no time is the host's."""
_RETURNS, _COPIES = ("cudaFree", "hipFree"), ("cudaMemcpyAsync", "hipMemcpyAsync", "cudaMemcpy", "hipMemcpy")
"""Calls that wait: of an allocator that returns memory, and of copies from and to pageable memory."""
_NAMED = "EXISTS (FROM (SELECT unnest(?) AS one) WHERE what GLOB one)"
_WITHOUT_DEVICE = "file_id NOT IN (SELECT file_id FROM device_slice)"
# What an operator or function calls goes with it: all that its thread does while the outermost of them is open.
_WITHIN = """(file_id, ts) IN (
    SELECT called.file_id, called.ts FROM host_time AS called ASOF JOIN (
        SELECT utid, ts, ended FROM (
            SELECT utid, ts, ts + dur AS ended, max(ts + dur) OVER (
                PARTITION BY utid ORDER BY ts, dur DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before
            FROM slice JOIN thread_track ON thread_track.id = track_id, (SELECT unnest(?) AS one)
            WHERE slice.name GLOB one AND dur > 0 AND category IN ('cpu_op', 'python_function')
        ) WHERE before IS NULL OR ended > before
    ) AS gone ON gone.utid = called.utid AND called.ts >= gone.ts WHERE called.ts < gone.ended)"""
_UPDATES = """(
    SELECT file_id, slice.ts, slice.ts + slice.dur AS ended
    FROM slice JOIN thread_track ON thread_track.id = track_id
    JOIN (SELECT DISTINCT file_id, utid FROM host_time) USING (utid)
    WHERE slice.name LIKE 'Optimizer.step#%')"""
_NO_UPDATE = f"""(file_id, ts) NOT IN (
    SELECT called.file_id, called.ts FROM host_time AS called ASOF JOIN {_UPDATES} AS step
    ON step.file_id = called.file_id AND called.ts >= step.ts WHERE called.ts < ended)"""
FORMS = {
    "floor:OPERATOR": "the operator at its floor",
    "gone:NAME": "without that operator, kernel or function; * stands for any letters, a comma parts several",
    "host": "a host that takes no time",
    "graph": "a CUDA graph: no time of the host for operators and launches",
    "class:CLASS": "without that class of the host's time",
    "workers:N": "a DataLoader with so many workers",
    "batch:TIMES": "a batch that many times as large; each step then has more to do",
    "pinned": "copies from and to the host in pinned memory, for which it does not wait",
    "bf16": "parameters and data in bf16 instead of fp32",
    "optimizer": "a fused optimizer",
    "overlap": "communication that is hidden entirely",
    "rank:R": "that rank no later than the others",
}


@dataclass(frozen=True)
class Prediction:
    """A change, the step that was measured (bare, if steps were timed without the profiler), and that predicted."""

    change: str
    what: str
    measured_us: float
    predicted_us: float

    @property
    def gain(self) -> float:
        """The share of the step that it saves; negative if the step gets longer."""
        return 1 - self.predicted_us / self.measured_us


@dataclass(frozen=True)
class _Change:
    """How long a task takes then, and how long after another it begins, or None if it does not wait for it."""

    dur: Callable[[int, Task], float] | None = None
    lag: Callable[[int, Task, Edge], float | None] | None = None
    without: int | None = None
    """The file whose end does not count."""


class Simulator:
    """Predicts steps of one run."""

    def __init__(self, connection: DuckDBPyConnection, timeline: Timeline, step_us: float | None = None) -> None:
        self._connection, self._timeline = connection, timeline
        self.measured = simulate(timeline.tasks, timeline.begin)
        self._whole = Spans(connection, "true", [])
        self._bare = [self._bare_dur(task) for task in timeline.tasks]
        rows = connection.execute(
            "SELECT avg(bare_ms) * 1e3, avg(recorded_ms) * 1e3 FROM bare_step WHERE bare_ms > 0"
        ).fetchone()
        recorded = self._step_us(self.measured)
        self._bare_us = step_us or (float(rows[0]) if rows and rows[0] and rows[0] < rows[1] else recorded)
        if step_us or (rows and rows[0]):
            self._fit()
        self._unchanged = simulate(timeline.tasks, timeline.begin, self._dur)

    def _fit(self) -> None:
        """Where the step without the profiler is known, it is the step that is simulated.

        Between processes on a host data moves at another speed in each run, and slower while it is recorded: there
        collectives take as long as makes the step so long, else the host does. Where a device alone says how long the
        step is, the host takes what its thread had of a processor: it waits where a stream takes no more launches.
        """
        of_hosts = {
            slice_id for (slice_id,) in self._connection.execute("SELECT slice_id FROM host_collective").fetchall()
        }
        tasks = self._timeline.tasks
        moved = [at for at, task in enumerate(tasks) if task.kind == "communication" and task.slice_id in of_hosts]
        fitted = moved or [at for at, task in enumerate(tasks) if task.kind in ("host", "launch")]
        measured = [self._bare[at] for at in fitted]

        def step_us(times: float) -> float:
            for at, took in zip(fitted, measured, strict=True):
                self._bare[at] = times * took
            return self._step_us(simulate(tasks, self._timeline.begin, self._dur))

        low, high = 0.0, _MOST_SLOWER
        if not moved and not (_CLEARLY * step_us(low) < self._bare_us < step_us(high)):
            step_us(self._on_processor(sum(measured)))
            return
        for _ in range(_HALVINGS if any(measured) else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if step_us(middle) < self._bare_us else (low, middle)

    def _on_processor(self, host_ns: float) -> float:
        """For how much of the host's recorded time its thread had a processor, at most 1."""
        rows = self._connection.execute("SELECT avg(list_avg(recorded_thread_us)) FROM recording").fetchone()
        recorded_us = host_ns / 1e3 / max(self._timeline.steps.values())
        return min(1.0, rows[0] / recorded_us) if rows and rows[0] and recorded_us else 1.0

    def _bare_dur(self, task: Task) -> float:
        """Of the host's time what the recording of its events did not add to it; light steps record none."""
        known = task.kind == "host" and task.file_id in self._whole.files
        return self._whole.within(task.file_id, task.start, task.end) if known else task.dur

    def _dur(self, at: int, _: Task) -> float:
        return self._bare[at]

    def _step_us(self, found: Simulated, without: int | None = None) -> float:
        ends = (end for end, task in zip(found.ends, self._timeline.tasks, strict=True) if task.file_id != without)
        return (max(ends) - self._timeline.begin) / 1e3 / max(self._timeline.steps.values())

    def predict(self, asked: str) -> Prediction:
        """The step after the change `asked`, one of `FORMS`.

        Raises:
            UsageError: there is no such form, or nothing in the run that it would change.
        """
        kind, _, given = asked.partition(":")
        make = getattr(self, f"_{kind}", None) if any(form.partition(":")[0] == kind for form in FORMS) else None
        if make is None or any(form.startswith(f"{kind}:") for form in FORMS) != bool(given):
            raise UsageError(f"no change {asked!r}; known: {', '.join(FORMS)}")
        change: _Change = make(given) if given else make()
        found = simulate(self._timeline.tasks, self._timeline.begin, change.dur or self._dur, change.lag)
        ratio = self._step_us(found, change.without) / self._step_us(self._unchanged)
        what = next(text for form, text in FORMS.items() if form.partition(":")[0] == kind)
        return Prediction(asked, what, self._bare_us, self._bare_us * ratio)

    def _floor(self, operator: str) -> _Change:
        found = self._connection.execute(
            """SELECT sum(calls * floor_us * 1e3), sum(device_ns) FROM operator_distance
               WHERE operator = ? AND floor_us IS NOT NULL""",
            [operator],
        ).fetchone()
        if not found or not found[1]:
            raise UsageError(f"no operator {operator!r} with a floor in the run; the view `distance` lists them")
        return self._scaled(operator, min(1.0, found[0] / found[1]))

    def _gone(self, name: str) -> _Change:
        return self._scaled(name, 0.0)

    def _scaled(self, name: str, factor: float) -> _Change:
        """The operator on the device, with its launches if nothing is left of it; without a device on the host."""
        tasks, any_of = self._timeline.tasks, [_pattern(one) for one in name.split(",")]
        found = self._connection.execute(
            "SELECT slice_id FROM device_slice, (SELECT unnest($any) AS one) WHERE operator GLOB one OR name GLOB one",
            {"any": any_of},
        ).fetchall()
        slices = {slice_id for (slice_id,) in found}
        own = {at for at, task in enumerate(tasks) if task.kind in WORK and task.slice_id in slices}
        launches = {tasks[at].launched_by for at in own} if not factor else set()
        # What stays of an operator on a device is called all the same.
        host = (
            self._host_part(f"{_NAMED} AND class = 'operators' AND {_WITHOUT_DEVICE}", any_of)
            if factor
            else self._host_part(f"{_NAMED} OR {_WITHOUT_DEVICE} AND {_WITHIN}", any_of, any_of)
        )
        if not own and not host.changes:
            raise UsageError(
                f"no operator, kernel or function {name!r} in the run's steps; the table `operator_time` lists them"
            )

        def dur(at: int, task: Task) -> float:
            if at in own:
                return task.dur * factor
            return 0 if at in launches else host.left(at, factor)

        def lag(at: int, task: Task, edge: Edge) -> float | None:
            # What does not run waits for no launch, and leaves no gap before the next.
            if factor or (at not in own and at not in launches):
                return edge.lag
            if at in launches:
                # As a copy's call, which waits for the device until then.
                return None if tasks[edge.task].kind in WORK else 0
            return None if edge.task == task.launched_by - 1 else 0

        return _Change(dur, lag)

    def _bf16(self) -> _Change:
        """Each kernel stays as far above its floor; half of the bytes move, and products run at that dtype's rate."""
        left = floors_in_bf16(self._connection)
        if not left:
            raise UsageError("no operator in fp32 on a device whose rates in both are known")
        sql = "SELECT slice_id, operator FROM device_slice WHERE list_contains($names, operator)"
        found = self._connection.execute(sql, {"names": list(left)}).fetchall()
        factors = {slice_id: left[operator] for slice_id, operator in found}

        def dur(at: int, task: Task) -> float:
            fixed = min(task.dur, _FIXED_NS)
            return (
                fixed + (self._bare[at] - fixed) * factors[task.slice_id]
                if task.slice_id in factors
                else self._bare[at]
            )

        return _Change(dur)

    def _host(self) -> _Change:
        return _Change(lambda at, task: 0 if task.kind in ("host", "launch") else self._bare[at])

    def _graph(self) -> _Change:
        """What is not data, compilation and the like takes no time: the graph replays it, launch after launch."""
        kept = self._host_part("class NOT IN ('operators', 'Python', 'profiler', 'untraced', 'device')")
        tasks = self._timeline.tasks

        def lag(_: int, task: Task, edge: Edge) -> float | None:
            if task.kind not in WORK or len(task.after) < 2:
                return edge.lag
            return None if tasks[edge.task].kind == "launch" else min(edge.lag, _REPLAYED_NS)

        return _Change(
            lambda at, task: self._bare[at] - (kept.left(at, 0) if task.kind in ("host", "launch") else 0), lag
        )

    def _class(self, name: str) -> _Change:
        if name not in CLASSES:
            raise UsageError(f"no class {name!r} of the host's time; known: {', '.join(CLASSES[1:])}")
        part, tasks = self._host_part("class = ?", name), self._timeline.tasks

        def lag(_: int, task: Task, edge: Edge) -> float | None:
            # Where an allocator returns memory, the host waits for the device too.
            awaited = AWAITS_RANKS if task.name == AWAITS_RANKS else "allocator" if task.name in _RETURNS else "device"
            if task.kind != "wait" or name != awaited:
                return edge.lag
            return None if tasks[edge.task].kind in WORK else 0 if name == AWAITS_RANKS else edge.lag

        def dur(at: int, task: Task) -> float:
            return 0 if name == AWAITS_RANKS and task.kind == "communication" else part.left(at, 0)

        return _Change(dur, lag)

    def _pinned(self) -> _Change:
        """Such copies move at the rate of the link, and the host goes on at once."""
        copies = self._connection.execute(
            "SELECT slice_id, bytes FROM device_slice WHERE kind = 'copy' AND name LIKE '%Pageable%' AND bytes > 0"
        ).fetchall()
        if not copies:
            raise UsageError("no copy from or to pageable memory in the run")
        lasts: dict[int, float] = {
            slice_id: _FIXED_NS + nbytes / link_GBps(self._connection) for slice_id, nbytes in copies
        }
        tasks = self._timeline.tasks

        def dur(at: int, task: Task) -> float:
            return min(self._bare[at], lasts.get(task.slice_id, self._bare[at]))

        def lag(_: int, task: Task, edge: Edge) -> float | None:
            awaits = task.kind == "wait" and (task.name in _COPIES or tasks[edge.task].slice_id in lasts)
            if awaits and tasks[edge.task].kind in WORK:
                return None
            # Nothing is copied to pinned memory first.
            return min(edge.lag, _FIXED_NS) if awaits or task.slice_id in lasts else edge.lag

        return _Change(dur, lag)

    def _workers(self, number: str) -> _Change:
        """They make batches while the step goes on, and the step waits for what they lack."""
        count = int(number) if number.isdecimal() else 0
        rows = self._connection.execute(
            "SELECT sum(ms_per_step) FILTER (WHERE class = 'data'), sum(ms_per_step) FROM host_account"
        ).fetchone()
        if not count or not rows or not rows[0]:
            raise UsageError(f"workers:{number} needs a number of workers, and a run that waits for a DataLoader")
        data, whole = rows
        part, factor = self._host_part("class = 'data'"), max(0.0, data / count - (whole - data)) / data
        return _Change(lambda at, _: part.left(at, factor))

    def _batch(self, times: str) -> _Change:
        """An update of the parameters takes as long."""
        try:
            factor = float(times)
        except ValueError:
            factor = 0.0
        if not 0 < factor < float("inf"):
            raise UsageError(f"batch:{times} is no multiple of the batch, such as batch:2")
        on_host = self._host_part(f"class IN ('operators', 'data') AND {_WITHOUT_DEVICE} AND {_NO_UPDATE}")
        sql = f"""SELECT slice_id FROM device_slice AS work ASOF JOIN {_UPDATES} AS step
                  ON step.file_id = work.file_id AND launch_ts >= step.ts WHERE launch_ts < ended"""
        found = self._connection.execute(sql).fetchall()
        updates = {slice_id for (slice_id,) in found}

        def dur(at: int, task: Task) -> float:
            if task.slice_id in updates and task.kind == "kernel":
                return self._bare[at]
            if task.kind in ("kernel", "copy"):
                fixed = min(task.dur, _FIXED_NS)
                return fixed + (task.dur - fixed) * factor
            return on_host.left(at, factor)

        return _Change(dur)

    def _optimizer(self) -> _Change:
        """One call instead of one for each parameter."""
        part = self._host_part("class IN ('operators', 'Python')", of="optimizer")
        if not part.changes:
            raise UsageError("no step of an optimizer in the run, or one that is fused already")
        return _Change(lambda at, _: part.left(at, part.fused))

    def _overlap(self) -> _Change:
        return _Change(lambda at, task: 0 if task.kind == "communication" else self._bare[at])

    def _rank(self, rank: str) -> _Change:
        """The others do not wait for it, and it is done when they are."""
        tasks = self._timeline.tasks
        files = {task.file_id for task in tasks if task.kind == "arrival" and str(task.rank) == rank}
        if not files or len(self._timeline.steps) < 2:
            raise UsageError(f"no rank {rank!r} with collectives in the run; the view `straggler` lists the ranks")
        (late,) = files

        def lag(_: int, task: Task, edge: Edge) -> float | None:
            return edge.lag if task.file_id == late or tasks[edge.task].file_id != late else None

        return _Change(lag=lag, without=late)

    def _host_part(self, condition: str, *given: object, of: str = "host_time") -> HostPart:
        return HostPart(Spans(self._connection, condition, list(given), of), self._whole, self._timeline, self._bare)


def _pattern(name: str) -> str:
    """As of GLOB, in which only * is not itself.

    >>> _pattern("aten::*_norm"), _pattern("a?[3]")
    ('aten::*_norm', 'a[?][[]3]')
    """
    return name.replace("[", "[[]").replace("?", "[?]")
