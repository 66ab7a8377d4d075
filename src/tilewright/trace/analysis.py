"""Everything that the timeline says beyond its events: attribution, waits, steps, waves, accounting, distance."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from tilewright.trace.account.accounting import account
from tilewright.trace.account.waves import add_waves
from tilewright.trace.operators.operator_table import add_operator_table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def analyse(connection: DuckDBPyConnection) -> None:
    """Add to a run that holds a timeline the tables and views that docs/accounting.md describes.

    Doing it again replaces them.
    """
    # Costs need sympy, which takes longer to import than all of this room.
    from tilewright.trace.price.distance import add_distances

    for script in ("attribution", "graphs", "waits", "steps", "accounting"):
        _execute(connection, f"account/{script}.sql")
    add_operator_table(connection)
    add_waves(connection)
    account(connection)
    _execute(connection, "price/operator_call.sql")
    add_distances(connection)
    for script in ("price/distance.sql", "account/ranks.sql"):
        _execute(connection, script)


def _execute(connection: DuckDBPyConnection, script: str) -> None:
    connection.execute(files("tilewright.trace").joinpath(script).read_text("utf-8"))
