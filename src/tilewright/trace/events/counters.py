"""Counter events: each number among the arguments is a counter of its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.trace.events.rows import append, next_id
from tilewright.trace.events.staging import COUNTER_PHASES
from tilewright.trace.events.tracks import Tracks

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_NO_NUMBER = "a counter without a number"


def add_counters(connection: DuckDBPyConnection, tracks: Tracks) -> int:
    """Rows of `counter` from the staged events; returns the number of events with a counter."""
    connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE reading AS
        SELECT seq, ts, event.pid, concat_ws(' ', event.name, event.id, item.key) AS name,
               TRY_CAST(item.atom AS DOUBLE) AS value
        FROM (FROM event WHERE ph IN {COUNTER_PHASES}) AS event, json_each(event.args) AS item
        WHERE item.atom IS NOT NULL AND isfinite(TRY_CAST(item.atom AS DOUBLE))
        """
    )
    names = connection.execute("SELECT pid, name FROM reading GROUP BY pid, name ORDER BY min(seq)").fetchall()
    made = [(*name, tracks.counter_track(*name)) for name in names]
    connection.execute("CREATE OR REPLACE TEMP TABLE reading_track (pid VARCHAR, name VARCHAR, track_id BIGINT)")
    append(connection, "reading_track", made)
    first = next_id(connection, "counter", "id")
    connection.execute(
        f"INSERT INTO counter SELECT {first} - 1 + row_number() OVER (ORDER BY ts, seq, track_id), ts, track_id, value "
        "FROM reading JOIN reading_track USING (pid, name)"
    )
    connection.execute(
        f"INSERT INTO event_reject SELECT '{_NO_NUMBER}', to_json({{ph: ph, name: name, pid: pid, ts: ts / 1000.0, "
        f"args: args}}) FROM event WHERE ph IN {COUNTER_PHASES} AND seq NOT IN (SELECT seq FROM reading)"
    )
    row = connection.execute("SELECT count(DISTINCT seq) FROM reading").fetchone()
    connection.execute("DROP TABLE reading; DROP TABLE reading_track")
    assert row is not None
    return int(row[0])
