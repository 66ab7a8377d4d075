"""Compares two sets of runs: step time, device time, and the operators that changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from tilewright.records.errors import StoreError
from tilewright.store.query import reading
from tilewright.trace.compare.change import Change, compare

Where = Literal["device", "host"]

_STEPS = "SELECT dur / 1e3 FROM step WHERE file_id = (SELECT min(file_id) FROM step) AND dur > 0 ORDER BY ts"
_CREATED = "SELECT epoch_us(created) FROM run"

# The time of each operator in each step: on the device that of the kernels it launched, on the host its self time.
# Of several ranks the first is compared.
_OPERATORS = """
WITH steps AS (
    SELECT ts, host_dur, row_number() OVER (ORDER BY ts) AS step
    FROM step WHERE file_id = (SELECT min(file_id) FROM step)
),
inner_time AS (
    SELECT parent_id AS id, sum(dur) AS dur FROM slice WHERE parent_id IS NOT NULL AND dur > 0 GROUP BY parent_id
),
host AS (
    SELECT slice.name, slice.ts, greatest(slice.dur - coalesce(inner_time.dur, 0), 0) AS dur
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    LEFT JOIN inner_time ON inner_time.id = slice.id
    WHERE slice.category IN ('cpu_op', 'cuda_runtime', 'cuda_driver')
      AND process.file_id = (SELECT min(file_id) FROM step)
),
piece AS (
    SELECT 'device' AS place, coalesce(operator, name) AS operator, coalesce(launch_ts, ts) AS ts, dur
    FROM device_slice WHERE file_id = (SELECT min(file_id) FROM step)
    UNION ALL
    SELECT 'host', name, ts, dur FROM host
)
SELECT place, operator, step, count(*), sum(dur) / 1e3
FROM piece JOIN steps ON piece.ts >= steps.ts AND piece.ts < steps.ts + steps.host_dur
GROUP BY place, operator, step
ORDER BY place, operator, step"""


@dataclass(frozen=True)
class RunSteps:
    """The steps of one run and their operators; times in microseconds."""

    path: Path
    created_us: int
    steps: tuple[float, ...]
    operators: Mapping[tuple[Where, str], Mapping[int, float]]
    """Time by place, operator and step number; steps without the operator are missing."""
    calls: Mapping[tuple[Where, str], int]

    def series(self, key: tuple[Where, str]) -> list[float]:
        """The operator's time in every step."""
        found = self.operators.get(key, {})
        return [found.get(step, 0.0) for step in range(1, len(self.steps) + 1)]

    def device(self) -> list[float]:
        """The time of all kernels in every step; empty if the run has no device."""
        keys = [key for key in self.operators if key[0] == "device"]
        columns = [self.series(key) for key in keys]
        return [sum(values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True)
class OperatorChange:
    """One operator, before and after: mean microseconds and calls per step."""

    where: Where
    operator: str
    before_us: float
    after_us: float
    before_calls: float
    after_calls: float

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
        if not {"step", "device_slice"} <= tables:
            raise StoreError(
                f"run {path} has no timeline; `tilewright profile` and `tilewright trace` make runs with one"
            )
        steps = tuple(us for (us,) in connection.execute(_STEPS).fetchall())
        rows = connection.execute(_OPERATORS).fetchall()
        created = connection.execute(_CREATED).fetchone()
    operators: dict[tuple[Where, str], dict[int, float]] = {}
    calls: dict[tuple[Where, str], int] = {}
    for where, operator, step, count, us in rows:
        key = (where, operator)
        operators.setdefault(key, {})[step] = us
        calls[key] = calls.get(key, 0) + count
    return RunSteps(path, created[0] if created else 0, steps, operators, calls)


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
    step = compare([run.steps for run in first], [run.steps for run in second], in_turns=turns)
    device: Change | None = None
    busy = [[run.device() for run in side] for side in (first, second)]
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
        operators=tuple(_operators(first, second)),
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


def _operators(first: Sequence[RunSteps], second: Sequence[RunSteps]) -> list[OperatorChange]:
    keys = dict.fromkeys(key for run in (*first, *second) for key in run.operators)
    found = []
    for where, operator in keys:
        (before_us, before_calls), (after_us, after_calls) = (
            _each_step(side, (where, operator)) for side in (first, second)
        )
        found.append(OperatorChange(where, operator, before_us, after_us, before_calls, after_calls))
    return sorted(found, key=lambda change: -abs(change.difference_us))


def _each_step(side: Sequence[RunSteps], key: tuple[Where, str]) -> tuple[float, float]:
    steps = sum(len(run.steps) for run in side)
    us = sum(sum(run.operators.get(key, {}).values()) for run in side)
    return us / steps, sum(run.calls.get(key, 0) for run in side) / steps


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan
