"""The analysis of a timeline: attribution, waits, steps, waves, classes of time, distance from the floor."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.trace.account.accounting import account
from tilewright.trace.account.host_time import add_host_time
from tilewright.trace.account.waves import add_waves
from tilewright.trace.operators.operator_table import add_operator_table
from tilewright.trace.price.distance import add_distances
from tilewright.trace.verdict.verdict import add_verdict

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LEAST_BYTES, _EVENT_BYTES = 430_000_000, 500
"""Of memory: with less for each event DuckDB writes much to its temporary folder, with more nothing gets faster."""


def analyse(connection: DuckDBPyConnection) -> None:
    """Add the tables and views of docs/accounting.md to a run with a timeline.

    Doing it again replaces them. The connection must be in no transaction.
    """
    with _scratch(connection), _bounded(connection):
        attribute(connection)
        # They are independent, and each is single-threaded most of the time, so they run in parallel.
        with ThreadPoolExecutor(1) as beside:
            priced = beside.submit(_account_and_price, connection.cursor())
            add_host_time(connection)
            priced.result()
    judge(connection)


def attribute(connection: DuckDBPyConnection) -> None:
    """Find the operator and the line of each kernel, the waits and the steps; needs the database `scratch`."""
    connection.execute("CREATE OR REPLACE TEMP TABLE standard AS SELECT unnest(?) AS begins", [_standard_files()])
    for script in ("python_lines", "attribution", "graphs", "lines", "waits", "steps", "described"):
        _execute(connection, f"account/{script}.sql")


def account_for_device(connection: DuckDBPyConnection) -> None:
    """Divide the time of each step of each device into classes, after `attribute`."""
    _execute(connection, "account/accounting.sql")
    add_waves(connection)
    account(connection)


def price_operators(connection: DuckDBPyConnection) -> None:
    """Compare operators with their floors and ranks with each other, after `account_for_device` and the table."""
    _execute(connection, "price/operator_call.sql")
    add_distances(connection)
    for script in ("price/distance.sql", "account/ranks.sql"):
        _execute(connection, script)


def judge(connection: DuckDBPyConnection) -> None:
    """Say what makes the steps slow and what could be won, after all others."""
    add_verdict(connection)
    _execute(connection, "verdict/win.sql")


def _account_and_price(connection: DuckDBPyConnection) -> None:
    with closing(connection):
        for stage in (account_for_device, add_operator_table, price_operators):
            stage(connection)


def _standard_files() -> list[str]:
    """How the names of frames begin that are in the standard library, which PyTorch writes without its folder."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [f"{name}/" if (folder / name).is_dir() else f"{name}.py(" for name in sorted(sys.stdlib_module_names)]


@contextmanager
def _scratch(connection: DuckDBPyConnection) -> Iterator[None]:
    """The database `scratch`, in memory, for tables that cursors share: a temporary one belongs to one of them."""
    connection.execute("ATTACH ':memory:' AS scratch")
    try:
        yield
    finally:
        connection.execute("DETACH scratch")


@contextmanager
def _bounded(connection: DuckDBPyConnection) -> Iterator[None]:
    """Bound DuckDB's memory by the size of the timeline; what does not fit goes to its temporary folder."""
    ((before, most),) = connection.execute(
        """SELECT current_setting('memory_limit'),
                  least(parse_formatted_bytes(current_setting('memory_limit')),
                        greatest($least, $event * (SELECT sum(events) FROM trace_file)))::BIGINT""",
        {"least": _LEAST_BYTES, "event": _EVENT_BYTES},
    ).fetchall()
    connection.execute(f"SET memory_limit = '{most}B'")
    try:
        yield
    finally:
        connection.execute(f"SET memory_limit = '{before}'")


def _execute(connection: DuckDBPyConnection, script: str) -> None:
    connection.execute(files("tilewright.trace").joinpath(script).read_text("utf-8"))
