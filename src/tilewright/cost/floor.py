"""The floor of a kernel of known cost on a device."""

from __future__ import annotations

from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile
from tilewright.records.program import Cost


def floor_of(cost: Cost, dtype: str, kind: str, profile: DeviceProfile) -> tuple[float | None, str | None]:
    """The least time of one kernel in microseconds and its bound; None for both if its cost is unknown."""
    if cost.provenance == "unknown":
        return None, None
    return floor_us(
        cost.bytes, cost.flops, cost.transcendentals, dtype, cost.bytes, profile, kind, bytes_written=cost.bytes_written
    )
