"""The terminal view of a timeline: tables of a step's time, waits of the host and possible gains, and remarks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.records.measurement import BUSY
from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration
from tilewright.report.queries import ask_traced
from tilewright.report.rows import show_view
from tilewright.report.views import TRACE
from tilewright.store.query import reading

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_STARTS = """
SELECT process.name, device_time.dur / 1e3, call.name
FROM device_time JOIN device_call AS call ON call.slice_id = device_time.cause JOIN process USING (upid)
WHERE class = 'idle' AND device_time.dur > 1_000_000 ORDER BY upid"""
_QUEUES = """
WITH held AS (
    SELECT upid, depth, lead(ts) OVER (PARTITION BY upid ORDER BY ts) - ts AS dur FROM queue_depth
),
ahead AS (SELECT upid, median(lag_ns) / 1e3 AS lag_us FROM launch_lag GROUP BY upid)
SELECT any_value(process.name), any_value(lag_us), coalesce(sum(depth * dur)::DOUBLE / nullif(sum(dur), 0), 0),
       max(depth)
FROM held JOIN ahead USING (upid) JOIN process USING (upid) GROUP BY upid ORDER BY upid"""
_BARE = "SELECT max(bare_ms) * 1e3 FROM bare_step HAVING max(bare_ms) < max(recorded_ms)"
_KNOWN = "SELECT what, avg(percent) AS percent FROM attribution GROUP BY what ORDER BY percent DESC, what"
_BELOW = """
SELECT sum(device_ns) / 1e3 AS us, sum(calls * operator_distance.floor_us) AS least FROM operator_distance
WHERE operator_distance.floor_us IS NOT NULL GROUP BY file_id HAVING us < 0.8 * least ORDER BY file_id"""
_SHAPES = "SELECT count(*) > 0 AND count(shapes) = 0, (SELECT count(*) > 0 FROM device_slice) FROM operator_distance"


def show_accounting(run: Path) -> RenderableType:
    """The timeline's tables for a terminal, then remarks.

    Raises:
        StoreError: the run is missing or damaged.
    """
    with reading(run) as connection:
        analysed = connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'device_time'").fetchone()
        answers = ask_traced(connection) if analysed else {}
        remarks = list(_remarks(connection)) if answers else []
    if not answers:
        return Text("no operator, call or kernel in this trace", "dim")
    shown = [show_view(view, answers[view.id]) for view in TRACE if view.in_terminal and view.id in answers]
    return Group(*shown, Text(), *(Text(plain(remark), "dim") for remark in remarks))


def _remarks(connection: DuckDBPyConnection) -> Iterator[str]:
    """What the tables do not show, one sentence each."""
    for device, us, call in connection.execute(_STARTS).fetchall():
        yield f"before its first work {device} waited {duration(us)} for {call} on the host"
    for device, lag_us, mean, most in connection.execute(_QUEUES).fetchall():
        ahead = f"kernels began {duration(lag_us)} after their launch (median)"
        yield f"{device}: {ahead}; {mean:.1f} launches queued on average, {most} at most"
    for (bare,) in connection.execute(_BARE).fetchall():
        yield f'"What you would win" refers to a step without the profiler, which takes {duration(bare)}'
    for took, least in connection.execute(_BELOW).fetchall():
        yield (
            f"operators with a floor took {duration(took)}, less than their floors of {duration(least)}: their data "
            "lay in a cache, or the ceilings are too low (`tilewright doctor --refresh` measures this machine's again)"
        )
    if connection.execute("SELECT 1 FROM ceiling WHERE origin = ? LIMIT 1", [BUSY]).fetchone():
        yield (
            f"ceilings were {BUSY}, so they are too low and floors too long: `tilewright doctor --refresh` measures "
            "them again, best while nothing else runs"
        )
    ((without_shapes, on_device),) = connection.execute(_SHAPES).fetchall()
    known = [f"the {what} {percent:.1f} %" for what, percent in connection.execute(_KNOWN).fetchall()]
    if known:
        whose = "the device's time" if on_device else "the operators' own time"
        yield f"share of {whose} for which is known: {', '.join(known)}"
    if without_shapes:
        yield "no operator has shapes, and so no cost: record_shapes=True of PyTorch's profiler adds them"
