"""The operator table: self and total time on the host and on the devices, and what its shares are shares of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Kind = Literal["operator", "call", "range", "kernel", "replayed"]


@dataclass(frozen=True)
class OperatorTime:
    """The time of everything of one name. Times are nanoseconds, summed over all calls and threads.

    Self is what an operator did or launched itself, total includes what it called. `kind` is `operator`;
    `call`, into CUDA; `range`, a name put around other things; `replayed`, a kernel of a CUDA graph; or
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
    """In how many of the steps it was called."""
    source: str | None
    """The user's line that launched most of its device time, where stacks were recorded."""
    one_off: bool
    """Called in one step of several, or a call that a process makes once: no part of a long run."""


@dataclass(frozen=True)
class Inside:
    """What calls of one name take of the operators and ranges that they lie in directly, in nanoseconds."""

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
    inside: Sequence[Inside]
    cpu_ns: int
    """All self times on the host: the time that its threads spent in operators, calls and ranges."""
    device_ns: int
    """All kernels, copies and fills on all streams; more than the time passed where streams overlap."""
    losses: Sequence[tuple[str, int, int]]
    """What the trace ought to hold and does not: what, how many, and of how many."""
    steps: int
    steps_ns: int
    """The steps from begin to end on the host's clock, or the whole trace where no steps are marked."""
    timed_steps: int
    timed_ns: int
    timed_device_ns: int
    """The steps that are accounted for, and the work of their devices: others, where light steps were recorded."""

    @property
    def on_device(self) -> bool:
        return self.device_ns > 0

    @property
    def described(self) -> bool:
        """Whether the operators are of another step than those that are timed."""
        return (self.steps, self.steps_ns) != (self.timed_steps, self.timed_ns)


def add_operator_table(connection: DuckDBPyConnection) -> None:
    """Add tables `operator_time`, `operator_in`, `loss` and view `operator_share`; attribution and steps come first."""
    for script in ("operator_table.sql", "losses.sql"):
        connection.execute(files("tilewright.trace.operators").joinpath(script).read_text("utf-8"))


def read_operator_table(connection: DuckDBPyConnection) -> OperatorTable:
    """What `add_operator_table` left in a run."""
    names = ", ".join(OperatorTime.__dataclass_fields__)
    rows = connection.execute(f"SELECT {names} FROM operator_share").fetchall()
    order = ", ".join(Inside.__dataclass_fields__)
    inside = connection.execute(f"SELECT {order} FROM operator_in ORDER BY dur DESC, name").fetchall()
    sums = "SELECT count(*), coalesce(sum(dur), 0)::BIGINT FROM"
    ((steps, steps_ns),) = connection.execute(f"{sums} operator_step").fetchall()
    ((timed_steps, timed_ns),) = connection.execute(f"{sums} step").fetchall()
    ((_, timed_device_ns),) = connection.execute(f"{sums} device_slice").fetchall()
    losses = connection.execute("SELECT what, found, of FROM loss").fetchall()
    times = [OperatorTime(*row) for row in rows]
    return OperatorTable(
        rows=times,
        inside=[Inside(*row) for row in inside],
        cpu_ns=sum(row.cpu_self for row in times),
        device_ns=sum(row.device_self for row in times),
        losses=[(str(what), int(found), int(of)) for what, found, of in losses],
        steps=int(steps),
        steps_ns=int(steps_ns),
        timed_steps=int(timed_steps),
        timed_ns=int(timed_ns),
        timed_device_ns=int(timed_device_ns),
    )
