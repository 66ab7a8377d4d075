"""The analysis of a timeline: attribution, waits, steps, waves, classes of time, distance from the floor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.resources import files
from typing import TYPE_CHECKING

from tilewright.trace.account.accounting import account
from tilewright.trace.account.host_time import add_host_time
from tilewright.trace.account.waves import add_waves
from tilewright.trace.operators.operator_table import add_operator_table
from tilewright.trace.price.distance import add_distances
from tilewright.trace.verdict.verdict import add_verdict

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def analyse(connection: DuckDBPyConnection) -> None:
    """Add the tables and views of docs/accounting.md to a run with a timeline.

    Doing it again replaces them. The connection must be in no transaction.
    """
    for script in ("python_lines", "attribution", "graphs", "lines", "waits", "steps", "described"):
        _execute(connection, f"account/{script}.sql")
    add_host_time(connection)
    # They are independent, and each is single-threaded most of the time, so they run in parallel.
    with ThreadPoolExecutor(1) as beside:
        accounted = beside.submit(_account, connection.cursor())
        add_operator_table(connection)
        accounted.result()
    _execute(connection, "price/operator_call.sql")
    add_distances(connection)
    for script in ("price/distance.sql", "account/ranks.sql"):
        _execute(connection, script)
    add_verdict(connection)
    _execute(connection, "verdict/win.sql")


def _account(connection: DuckDBPyConnection) -> None:
    with closing(connection):
        _execute(connection, "account/accounting.sql")
        add_waves(connection)
        account(connection)


def _execute(connection: DuckDBPyConnection, script: str) -> None:
    connection.execute(files("tilewright.trace").joinpath(script).read_text("utf-8"))
