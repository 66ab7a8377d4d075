"""The page's part for a run's trace: timeline, flame graphs, memory, and tables of the analyses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.records.counted import counted
from tilewright.report.charts import allocated, boxes
from tilewright.report.flame import drawn
from tilewright.report.page_budget import cut, fitting
from tilewright.report.quantity import count, duration, nbytes
from tilewright.report.queries import Answer, ask_traced
from tilewright.report.timeline import curve, laid_out, points_of_one, timeline
from tilewright.store.query import reading
from tilewright.trace.flame import flame
from tilewright.trace.memory import DeviceMemory, memory
from tilewright.trace.verdict.verdict import read_verdict

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_HOLDERS = 200
MOST_DEVICES = 16
_HOLDERS_BUDGET = 200_000
_STEPS = """
    SELECT count(*), coalesce(median(dur), 0) / 1e3
    FROM slice WHERE category = 'user_annotation' AND name LIKE 'ProfilerStep#%' AND dur > 0"""
_DEVICE_STEP = """
    SELECT process.name, sum(ms_per_step) * 1e3 AS us, any_value(steps)
    FROM step_account JOIN process USING (upid) GROUP BY upid, process.name ORDER BY us DESC LIMIT 1"""
"""The mean step of the slowest device; the host's own step time means little if it runs ahead."""
_FUSED = "SELECT EXISTS (FROM slice JOIN region USING (name))"
"""Whether a region of the plan ran; else the plan is what would be if it did."""
_TIMED = " AND id IN (SELECT id FROM step)"
"""Only timed steps; an analysed run excludes described ones."""


def traced(run: Path) -> dict[str, Any] | None:
    """The page's data of the run's trace, as JSON; None if the run has no slice.

    Raises:
        StoreError: the run is missing or damaged.
    """
    with reading(run) as connection:
        present = {str(name) for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
        present |= {str(name) for (name,) in connection.execute("SELECT view_name FROM duckdb_views()").fetchall()}
        lines = timeline(connection) if {"slice", "arg_set", "flow"} <= present else None
        if lines is None:
            return None
        devices = memory(connection)[:MOST_DEVICES] if "memory_event" in present else []
        origin = lines["origin"]
        depths = _queue_depths(connection, origin) if "queue_depth" in present else []
        files = _files(connection)
        # Three curves per device: allocated bytes in two charts, and reserved bytes.
        most = points_of_one(3 * len(devices))
        budget = _HOLDERS_BUDGET // max(len(devices), 1)
        curves = [_curve(device, origin, files, most) for device in devices]
        lines["counters"] = [*depths, *curves, *lines["counters"]]
        tables: dict[str, Answer] = {}
        if "device_time" in present:
            tables = ask_traced(connection)
        lines = laid_out(lines)
        trees = [flame(connection, weight) for weight in ("host", "device")]
        flames = [drawn(tree) for tree in trees if tree.total[0] > 0]
        steps, step_us = connection.execute(_STEPS + (_TIMED if "step" in present else "")).fetchall()[0]
        slowest = connection.execute(_DEVICE_STEP).fetchall() if "step_account" in present else []
        return {
            "headlines": [
                *((duration(us), f"mean step, {name}", _profiled(over)) for name, us, over in slowest),
                *_headlines(lines, steps, step_us, devices),
            ],
            "verdict": read_verdict(connection),
            "steps": steps,
            "fused": "region" in present and connection.execute(_FUSED).fetchall()[0][0],
            "timeline": lines,
            "flames": flames,
            "memory": [_shown(device, origin, files, most, budget) for device in devices],
            "tables": {name: asdict(answer) for name, answer in tables.items()},
            "files": list(files.values()),
            "charts": {
                "timeline": boxes(
                    lines["rows"], lines["span"] / 1e9, "slices", [kind for _, _, kind in lines["names"]], curves=True
                ),
                "flames": [_flame_chart(each) for each in flames],
                "allocated": allocated(),
            },
        }


def _flame_chart(drawn: dict[str, Any]) -> dict[str, Any]:
    rows = 1 + max(depth for _, depth, *_ in drawn["nodes"])
    return boxes(rows, drawn["nodes"][0][4] / 1e9, "frames", [kind for _, kind in drawn["names"]])


def _headlines(
    lines: dict[str, Any], steps: int, step_us: float, devices: list[DeviceMemory]
) -> Iterable[tuple[str, str, str]]:
    """Headlines of a trace: figure, meaning, detail."""
    if steps:
        yield duration(step_us), "median step while profiled", _profiled(steps)
    yield duration(lines["span"] / 1000), "traced", f"{count(lines['kept']['slices'])} slices"
    for device in devices[:1]:
        yield nbytes(device.peak_bytes), f"peak memory, {device.device}", "training" if device.training else "inference"


def _profiled(steps: int) -> str:
    return counted(steps, "profiled step")


def _queue_depths(connection: DuckDBPyConnection, origin: int) -> list[dict[str, Any]]:
    """Launched kernels that have not started, one curve per device."""
    found = connection.execute("SELECT DISTINCT upid, name FROM queue_depth JOIN process USING (upid) ORDER BY upid")
    curves = []
    for upid, name in found.fetchall()[:MOST_DEVICES]:
        points = connection.execute("SELECT ts, depth FROM queue_depth WHERE upid = ? ORDER BY ts", [upid]).fetchnumpy()
        curves.append(curve(f"Queued for {name}", "launches", points["ts"] - origin, points["depth"]))
    return curves


def _files(connection: DuckDBPyConnection) -> dict[int, dict[str, Any]]:
    """The loaded files by number, with their losses."""
    found = connection.execute("SELECT id, path, events, rejects, note FROM trace_file ORDER BY id").fetchall()
    return {
        number: {
            "name": cut(Path(str(path)).name, 200),
            "events": events,
            "rejects": rejects,
            "note": cut(str(note or ""), 400),
        }
        for number, path, events, rejects, note in found[:64]
    }


def _curve(device: DeviceMemory, origin: int, files: dict[int, dict[str, Any]], most: int) -> dict[str, Any]:
    file = _file(device, files)
    name = f"{device.device} memory" + (f", {file}" if file else "")
    return curve(name, "bytes", device.ts - origin, device.allocated, most)


def _file(device: DeviceMemory, files: dict[int, dict[str, Any]]) -> str:
    """The file of this memory, if there are several."""
    return str(files[device.file]["name"]) if device.file in files and len(files) > 1 else ""


def _shown(
    device: DeviceMemory, origin: int, files: dict[int, dict[str, Any]], most: int, budget: int
) -> dict[str, Any]:
    ts = device.ts - origin
    holders = [
        {"operator": cut(each.operator, 200), "phase": each.phase, "bytes": each.bytes, "count": each.allocations}
        for each in device.holders[:MOST_HOLDERS]
    ]
    kept = fitting(holders, budget)
    return {
        "device": cut(device.device, 60),
        "file": _file(device, files),
        "process": device.process,
        "allocated": curve("allocated", "bytes", ts, device.allocated, most),
        "reserved": curve("reserved", "bytes", ts, device.reserved, most) if device.reserved.any() else None,
        "peak_bytes": device.peak_bytes,
        "peak_ns": device.peak_ts - origin,
        "training": device.training,
        "holders": kept,
        "left_out": len(device.holders) - len(kept),
        "phases": [
            {"phase": each.phase, "peak": each.peak_bytes, "allocated": each.allocated_bytes, "kept": each.kept_bytes}
            for each in device.phases
        ],
    }
