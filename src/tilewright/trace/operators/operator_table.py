"""The operator table: self and total time on the host and on the devices, and the denominators of its shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from tilewright.trace.events.nesting import nest
from tilewright.trace.events.rows import Ints, fetch
from tilewright.trace.events.self_time import self_times

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Kind = Literal["operator", "call", "range", "kernel", "replayed"]


@dataclass(frozen=True)
class OperatorTime:
    """The time of all calls with one name, in nanoseconds, summed over calls and threads.

    Self is the time of an operator itself and of its launches; total includes the calls in it. `kind` is `operator`;
    `call`, into CUDA; `range`, a user's named range; `replayed`, a kernel of a CUDA graph; or
    `kernel`, one that no call of the trace launched. The last two have no host time.
    """

    name: str
    kind: Kind
    calls: int
    cpu_self: int
    cpu_total: int
    device_self: int
    device_total: int
    launches: int
    """Kernels, copies and fills that it launched itself."""
    steps: int | None
    """The number of steps that call it."""
    source: str | None
    """The user's line that launched most of its device time, if stacks were recorded."""
    one_off: bool
    """Called in one step of several, or a call that a process makes once: negligible in a long run."""


@dataclass(frozen=True)
class ParentTime:
    """The time of calls with one name inside a parent operator or range, in nanoseconds."""

    name: str
    outer_name: str
    outer_kind: Kind
    calls: int
    dur: int
    outer_dur: int


@dataclass(frozen=True)
class OperatorTable:
    """The rows, longest first (on a device if one worked), and the denominators of their shares."""

    rows: Sequence[OperatorTime]
    inside: Sequence[ParentTime]
    cpu_ns: int
    """The sum of self times on the host: the time that its threads spent in operators, calls and ranges, exactly."""
    device_ns: int
    """The sum over kernels, copies and fills of all streams; more than the elapsed time if streams overlap."""
    losses: Sequence[tuple[str, int, int]]
    """Events missing from the trace: what, how many, and of how many."""
    steps: int
    steps_ns: int
    """The duration of the steps on the host's clock, or of the whole trace without steps."""
    timed_steps: int
    timed_ns: int
    timed_device_ns: int
    """The timed steps and their device time; with light steps they differ from the described step."""

    @property
    def on_device(self) -> bool:
        return self.device_ns > 0

    @property
    def described(self) -> bool:
        """Whether the operators are those of a described step, not of the timed ones."""
        return (self.steps, self.steps_ns) != (self.timed_steps, self.timed_ns)


def add_operator_table(connection: DuckDBPyConnection) -> None:
    """Add tables `operator_time`, `operator_in`, `loss` and view `operator_share`; attribution and steps come first."""
    add_host_calls(connection)
    for script in ("operator_table.sql", "losses.sql"):
        _execute(connection, script)


def add_host_calls(connection: DuckDBPyConnection) -> None:
    """Temporary tables `host_slice`, and `host_call`: its rows with their self time, outer call, step, and whether
    a call around them has their name."""
    _execute(connection, "host_slice.sql")
    ids, file_id, utid, ts, dur, name = fetch(
        connection, "SELECT id, file_id, utid, ts, dur, (hash(name) >> 1)::BIGINT FROM host_slice"
    )
    nested = nest(utid, ts, dur)
    own, outer = self_times(nested)
    place = np.argsort(nested.order)
    outer_id = np.r_[ids[nested.order], 0][outer][place]
    steps = connection.execute("SELECT file_id, ts, name FROM operator_step ORDER BY file_id, ts").fetchall()
    timed = {  # noqa: F841  # DuckDB finds it by its name
        "outer_id": np.ma.masked_array(outer_id, (outer < 0)[place]),
        "self_ns": own[place],
        "is_recursive": _recursive(outer, name[nested.order])[place],
        "step": _steps_of(file_id, ts, [(file, begun) for file, begun, _ in steps]),
    }
    # Both in the order of the table.
    connection.execute(
        """
        CREATE OR REPLACE TEMP TABLE host_call AS
        SELECT host_slice.*, timed.outer_id, timed.self_ns, timed.is_recursive, ($names::VARCHAR[])[timed.step] AS step
        FROM host_slice POSITIONAL JOIN timed
        """,
        {"names": [name for _, _, name in steps]},
    )


def _recursive(outer: Ints, name: Ints) -> NDArray[np.bool_]:
    """Whether a call around each has its name; `outer` is the place of the next one around, or -1."""
    found = np.zeros(len(outer), np.bool_)
    around = outer.copy()
    climbing = np.flatnonzero(around >= 0)
    while climbing.size:
        same = name[around[climbing]] == name[climbing]
        found[climbing[same]] = True
        climbing = climbing[~same]
        around[climbing] = outer[around[climbing]]
        climbing = climbing[around[climbing] >= 0]
    return found


def _steps_of(file_id: Ints, ts: Ints, steps: Sequence[tuple[int, int]]) -> Ints:
    """The number, from 1, of the last of the `steps`, sorted (file, begin), of the file that began by `ts`; else 0."""
    found = np.zeros(len(ts), np.int64)
    for file in {file for file, _ in steps}:
        before = sum(other < file for other, _ in steps)
        begins = np.array([begin for other, begin in steps if other == file], np.int64)
        own = file_id == file
        count = np.searchsorted(begins, ts[own], side="right")
        found[own] = np.where(count > 0, before + count, 0)
    return found


def _execute(connection: DuckDBPyConnection, script: str) -> None:
    connection.execute(files("tilewright.trace.operators").joinpath(script).read_text("utf-8"))


def read_operator_table(connection: DuckDBPyConnection) -> OperatorTable:
    """The operator table of a run, from the tables of `add_operator_table`."""
    names = ", ".join(OperatorTime.__dataclass_fields__)
    rows = connection.execute(f"SELECT {names} FROM operator_share").fetchall()
    order = ", ".join(ParentTime.__dataclass_fields__)
    inside = connection.execute(f"SELECT {order} FROM operator_in ORDER BY dur DESC, name").fetchall()
    sums = "SELECT count(*), coalesce(sum(dur), 0)::BIGINT FROM"
    ((steps, steps_ns),) = connection.execute(f"{sums} operator_step").fetchall()
    ((timed_steps, timed_ns),) = connection.execute(f"{sums} step").fetchall()
    ((_, timed_device_ns),) = connection.execute(f"{sums} device_slice").fetchall()
    losses = connection.execute("SELECT what, found, of FROM loss").fetchall()
    times = [OperatorTime(*row) for row in rows]
    return OperatorTable(
        rows=times,
        inside=[ParentTime(*row) for row in inside],
        cpu_ns=sum(row.cpu_self for row in times),
        device_ns=sum(row.device_self for row in times),
        losses=[(str(what), int(found), int(of)) for what, found, of in losses],
        steps=int(steps),
        steps_ns=int(steps_ns),
        timed_steps=int(timed_steps),
        timed_ns=int(timed_ns),
        timed_device_ns=int(timed_device_ns),
    )
