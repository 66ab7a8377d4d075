"""Compares two sets of runs: step time, device time, and the operators that changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from tilewright.records.errors import StoreError
from tilewright.store.query import reading
from tilewright.trace.compare.change import MANY_RUNS, Change, compare

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Where = Literal["device", "host"]
BUSY = 0.05
"""The share of its steps in which a single run had no processor, from which it tells nothing: an idle machine has 0."""

_RUN = "SELECT epoch_us(created), command FROM run"
_TIMED = "SELECT timed_us, {queued}, workers FROM recording WHERE file_id = (SELECT min(file_id) FROM step)"
_HAS_DEVICE = "SELECT count(*) > 0 FROM device_slice WHERE file_id = (SELECT min(file_id) FROM step)"
# With several ranks, the first is compared. A step's device time is that of the work that it launched.
_WORK = """
step LEFT JOIN (SELECT *, coalesce(launch_ts, ts) AS launched FROM device_slice) AS work
  ON work.file_id = step.file_id AND launched >= step.ts AND launched < step.ts + step.host_dur
WHERE step.file_id = (SELECT min(file_id) FROM step) AND step.dur > 0"""
_STEPS = f"""
SELECT any_value(step.dur) / 1e3, coalesce(sum(work.dur), 0) / 1e3
FROM {_WORK} GROUP BY step.ts ORDER BY step.ts"""

# Microseconds and calls of each operator in the mean step: on the device those of the kernels it launched, on the host
# its self time, by which the time of slices that overlap counts once.
_OPERATORS = f"""
SELECT 'device', coalesce(operator, work.name), sum(work.dur) / 1e3 / $steps, count(*) / $steps::DOUBLE
FROM {_WORK} AND work.slice_id IS NOT NULL GROUP BY 2
UNION ALL
SELECT 'host', name, sum(own.ns) / 1e3 / any_value(host.steps), sum(own.calls) / any_value(host.steps)::DOUBLE
FROM {{own}} AS own JOIN operator_time USING (name, kind), (SELECT count(*) AS steps FROM operator_step) AS host
WHERE kind IN ('operator', 'call') AND NOT one_off GROUP BY name
ORDER BY ALL"""
_WITHIN_STEPS = "(SELECT name, kind, self_ns AS ns, calls FROM operator_step_time)"
# Runs of earlier versions do not count the calls of a step.
_OF_ALL = "(SELECT name, kind, cpu_self AS ns, calls FROM operator_time)"

# The same, in each step; an operator that a step lacks took no time there.
_OF_STEPS = f"""
WITH held AS (
    SELECT 'device' AS place, coalesce(operator, work.name) AS name, step.ts::VARCHAR AS step, sum(work.dur) / 1e3 AS us
    FROM {_WORK} AND work.slice_id IS NOT NULL GROUP BY 2, 3
    UNION ALL
    SELECT 'host', name, step, self_ns / 1e3 FROM operator_step_time WHERE kind IN ('operator', 'call')
)
SELECT place, name, list(us) FROM held GROUP BY place, name HAVING count(*) = $steps"""


@dataclass(frozen=True)
class RunSteps:
    """The steps of one run and their operators; times in microseconds."""

    path: Path
    created_us: int
    steps: tuple[float, ...]
    """Those that were timed without the profiler, if there are any; else those in the trace."""
    device: tuple[float, ...]
    """The time of all kernels in every step; empty if the run has no device."""
    operators: Mapping[tuple[Where, str], tuple[float, float]]
    """Time and calls of the mean step, by place and operator."""
    of_steps: Mapping[tuple[Where, str], tuple[float, ...]] = field(default_factory=dict)
    """The time of those that every step has, in each step."""
    traced: int = 1
    """How many steps are in the trace."""
    command: str = ""
    bare: bool = False
    queued: float = 0.0
    """The share of the bare steps in which their thread could have run and had no processor; 0 if it is not known, or
    if the program has workers, which may have taken it."""


@dataclass(frozen=True)
class OperatorChange:
    """One operator, before and after: mean microseconds and calls per step."""

    where: Where
    operator: str
    before_us: float
    after_us: float
    before_calls: float
    after_calls: float
    change: Change | None = None
    """Of its time, if it is in every step of both sides."""

    @property
    def called_differently(self) -> bool:
        """Whether the mean step calls it more or less often: no noise does that."""
        return abs(self.after_calls - self.before_calls) > 1e-9

    @property
    def difference_us(self) -> float:
        return self.after_us - self.before_us


@dataclass(frozen=True)
class Difference:
    """The comparison of two sides; `device` is None if one of them has no device."""

    before: tuple[Path, ...]
    after: tuple[Path, ...]
    before_us: float
    """The median step."""
    after_us: float
    step: Change
    device: Change | None
    before_device_us: float
    after_device_us: float
    operators: tuple[OperatorChange, ...]
    """The largest difference first."""
    decide: str = ""
    """What will tell, where the verdict on the step is that nobody can."""

    def of_device(self, operator: OperatorChange) -> float | None:
        """The operator's share of the device's difference; None if that is close to zero."""
        total = self.after_device_us - self.before_device_us
        if operator.where != "device" or abs(total) < 0.002 * self.before_device_us:
            return None
        return operator.difference_us / total


def runs_of(side: Path) -> list[Path]:
    """A run, or the runs in a folder; StoreError for a folder without any."""
    if not side.is_dir():
        return [side]
    found = sorted(side.glob("*.duckdb"))
    if not found:
        raise StoreError(f"no run (*.duckdb) in the folder {side}")
    return found


def read_run(path: Path) -> RunSteps:
    """The steps and operators of a run; StoreError if it has no timeline."""
    with reading(path) as connection:
        tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
        if not {"step", "device_slice", "operator_time"} <= tables:
            raise StoreError(
                f"run {path} has no timeline; `tilewright profile` and `tilewright trace` make runs with one"
            )
        steps = connection.execute(_STEPS).fetchall()
        ((has_device,),) = connection.execute(_HAS_DEVICE).fetchall()
        own = _WITHIN_STEPS if "calls" in _columns(connection, "operator_step_time") else _OF_ALL
        rows = connection.execute(_OPERATORS.format(own=own), {"steps": max(len(steps), 1)}).fetchall()
        each = connection.execute(_OF_STEPS, {"steps": len(steps)}).fetchall() if "operator_step_time" in tables else []
        timed, queued_us, workers = _timed(connection)
        created, command = connection.execute(_RUN).fetchone() or (0, "")
    bare = tuple(timed)
    return RunSteps(
        path,
        created,
        steps=bare or tuple(us for us, _ in steps),
        device=tuple(us for _, us in steps) if has_device else (),
        operators={(where, operator): (us, calls) for where, operator, us, calls in rows},
        of_steps={(where, operator): tuple(us) for where, operator, us in each},
        traced=len(steps),
        command=command,
        bare=bool(bare),
        queued=queued_us / sum(bare) if bare and not workers else 0.0,
    )


def _timed(connection: DuckDBPyConnection) -> tuple[Sequence[float], float, int]:
    """The steps that ran without the profiler, how long they had no processor, and the number of the program's workers.

    Runs of earlier versions, and those of `tilewright trace`, have no such steps.
    """
    columns = _columns(connection, "recording")
    if "timed_us" not in columns:
        return (), 0.0, 0
    asked = _TIMED.format(queued="timed_queued_us" if "timed_queued_us" in columns else "NULL")
    steps, queued, workers = connection.execute(asked).fetchone() or ((), None, 0)
    return steps, queued or 0.0, workers


def _columns(connection: DuckDBPyConnection, table: str) -> set[str]:
    """Its names; none where the run lacks the table."""
    asked = "SELECT column_name FROM duckdb_columns() WHERE table_name = ?"
    return {name for (name,) in connection.execute(asked, [table]).fetchall()}


def diff(before: Sequence[RunSteps], after: Sequence[RunSteps]) -> Difference:
    """Compare the runs of two sides, as `tilewright.trace.compare.change` does.

    Raises:
        StoreError: a side has no steps.
    """
    for side in (before, after):
        if not any(run.steps for run in side):
            raise StoreError(f"no step was recorded in {', '.join(str(run.path) for run in side)}")
    first, second = (sorted(side, key=lambda run: run.created_us) for side in (before, after))
    turns = in_turns([run.created_us for run in first], [run.created_us for run in second])
    disturbed = _disturbed((*first, *second))
    step = compare([run.steps for run in first], [run.steps for run in second], in_turns=turns, disturbed=disturbed)
    device: Change | None = None
    busy = [[run.device for run in side] for side in (first, second)]
    if all(run and min(run) > 0 for side in busy for run in side):
        device = compare(busy[0], busy[1], in_turns=turns, shared_machine=False)
    return Difference(
        before=tuple(run.path for run in first),
        after=tuple(run.path for run in second),
        before_us=median(us for run in first for us in run.steps),
        after_us=median(us for run in second for us in run.steps),
        step=step,
        device=device,
        before_device_us=_mean(us for run in busy[0] for us in run),
        after_device_us=_mean(us for run in busy[1] for us in run),
        operators=tuple(_operators(first, second, turns, disturbed)),
        decide=_what_decides(first, second) if step.verdict == "cannot tell" else "",
    )


def _disturbed(runs: Iterable[RunSteps]) -> str:
    """What other programs did to the run that they disturbed most; empty if they let all run."""
    share = max(run.queued for run in runs)
    if share < BUSY:
        return ""
    return f"other programs used the processors, and one of the runs had none for {share:.0%} of its steps"


def _what_decides(first: Sequence[RunSteps], second: Sequence[RunSteps]) -> str:
    """How to record what tells two sides apart."""
    fewest = min(len(first), len(second))
    wanted = MANY_RUNS if fewest < MANY_RUNS else 2 * fewest
    commands = dict.fromkeys(run.command for side in (first, second) for run in side)
    profiled = [command for command in commands if command.startswith("tilewright profile")]
    if not profiled:
        return f"{wanted} traces per side, recorded in turns, can tell: compare the two folders of traces"
    return (
        f"{wanted} runs per side, recorded in turns, can tell: repeat "
        f"{' and '.join(f'`{one}`' for one in profiled[:2])}, put the runs of each side into a folder of its own, and "
        "run `tilewright diff FOLDER FOLDER`"
    )


def in_turns(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether the runs of two sides were interleaved, given their times.

    >>> in_turns([1, 3, 5], [2, 4, 6]), in_turns([1, 2, 3], [4, 5, 6])
    (True, False)
    """
    if len(first) != len(second):
        return False
    order = sorted([(at, 0) for at in first] + [(at, 1) for at in second])
    # Each pair has one run of each side, in any order.
    return all(low[1] != high[1] for low, high in list(pairwise(order))[::2])


def _operators(
    first: Sequence[RunSteps], second: Sequence[RunSteps], turns: bool, disturbed: str
) -> list[OperatorChange]:
    keys = dict.fromkeys(key for run in (*first, *second) for key in run.operators)
    found = []
    for where, operator in keys:
        (before_us, before_calls), (after_us, after_calls) = (
            _each_step(side, (where, operator)) for side in (first, second)
        )
        times = [[run.of_steps.get((where, operator), ()) for run in side] for side in (first, second)]
        change = None
        if all(run and min(run) > 0 for side in times for run in side):
            on_host = where == "host"
            change = compare(*times, in_turns=turns, shared_machine=on_host, disturbed=disturbed if on_host else "")
        found.append(OperatorChange(where, operator, before_us, after_us, before_calls, after_calls, change))
    return sorted(found, key=lambda change: -abs(change.difference_us))


def _each_step(side: Sequence[RunSteps], key: tuple[Where, str]) -> tuple[float, float]:
    """Time and calls in the mean step of all runs of a side."""
    steps = sum(run.traced for run in side)
    us, calls = (sum(run.traced * run.operators.get(key, (0.0, 0.0))[place] for run in side) for place in (0, 1))
    return us / steps, calls / steps


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan
