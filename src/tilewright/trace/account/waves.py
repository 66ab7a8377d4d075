"""The tail of each kernel's last wave, from its grid and the occupancy that its registers and memory allow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tilewright.hardware.architectures import architecture
from tilewright.hardware.occupancy import Waves, occupancy
from tilewright.records.errors import UsageError
from tilewright.trace.events.rows import append

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def add_waves(connection: DuckDBPyConnection) -> None:
    """Fill table `wave`: a row for each kernel with known grid and device.

    A grid of several waves leaves slots idle in its last one: `tail_ns` is d · (1 − waves / turns) of its duration
    d, with turns = ⌈waves⌉. A grid of at most one wave has no tail; its floor covers that case. Thread-block clusters
    and concurrent kernels are not visible in a trace and are ignored.
    """
    connection.execute(
        "CREATE OR REPLACE TABLE wave "
        "(slice_id BIGINT, waves DOUBLE, occupancy DOUBLE, idle_of_last DOUBLE, tail_ns BIGINT)"
    )
    devices = device_properties(connection)
    shapes = connection.execute(
        """SELECT file_id, device, grid, block, registers, shared_bytes, list(slice_id), list(dur)
           FROM device_slice
           WHERE kind = 'kernel' AND len(grid) = 3 AND len(block) = 3 AND registers IS NOT NULL
           GROUP BY ALL"""
    ).fetchall()
    rows: list[tuple[object, ...]] = []
    for file_id, device, grid, block, registers, shared_bytes, slices, durations in shapes:
        found = _waves(devices.get((file_id, device)), grid, block, registers, shared_bytes or 0)
        if found is None:
            continue
        waves, share = found
        tail = 1 - waves.waves / waves.turns if waves.turns > 1 else 0.0
        rows += [
            (slice_id, waves.waves, share, waves.idle, round(tail * duration))
            for slice_id, duration in zip(slices, durations, strict=True)
        ]
    append(connection, "wave", rows)


def device_properties(connection: DuckDBPyConnection) -> dict[tuple[int, int], dict[str, object]]:
    """The properties of each device that PyTorch's profiler recorded, by file and device number."""
    found: dict[tuple[int, int], dict[str, object]] = {}
    for file_id, text in connection.execute(
        "SELECT file_id, str_value FROM metadata WHERE name = 'deviceProperties'"
    ).fetchall():
        try:
            listed = json.loads(text or "[]")
        except (ValueError, RecursionError):
            continue
        for one in listed if isinstance(listed, list) else []:
            if isinstance(one, dict) and isinstance(one.get("id"), int):
                found[file_id, one["id"]] = one
    return found


def _waves(
    properties: dict[str, object] | None, grid: list[int], block: list[int], registers: int, shared_bytes: int
) -> tuple[Waves, float] | None:
    """Waves and occupancy of a launch; None if the device is unknown or the figures exceed its limits."""
    if properties is None:
        return None
    sms = properties.get("numSms")
    programs, threads = (axes[0] * axes[1] * axes[2] for axes in (grid, block))
    if not isinstance(sms, int) or sms < 1 or programs < 1 or threads < 1:
        return None
    try:
        sm = architecture(f"{properties.get('computeMajor')}.{properties.get('computeMinor')}")
    except UsageError:
        return None
    held = occupancy(sm, threads, registers, shared_bytes)
    return (Waves(programs, sms, held.blocks), held.share) if held.blocks else None
