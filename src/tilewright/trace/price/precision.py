"""What another precision would leave of each operator's time."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tilewright.trace.price.distance import device_profiles
from tilewright.trace.price.recorded_rows import rows_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_ROWS = """
SELECT operator, device_ns, bytes, floor_us, bound FROM operator_distance
WHERE dtype IN ('float32', 'tf32') AND floor_us > 0 AND attributed_by <> 'host' AND bytes IS NOT NULL"""


def tensor_core_times(connection: DuckDBPyConnection, dtype: str) -> float:
    """How many times as fast as fp32 the slowest device multiplies matrices in a dtype; 1 if that is unknown."""
    rates = [
        profile.matmul_TFLOPs for (_, device), profile in device_profiles(connection).items() if device is not None
    ]
    return min((of[dtype] / of["float32"] for of in rates if {dtype, "float32"} <= of.keys()), default=1.0)


def floors_in_bf16(connection: DuckDBPyConnection) -> dict[str, float]:
    """By operator, its floor in bf16 as a share of that in fp32: half of the bytes, products at the rate of bf16."""
    profiles = [of for (_, device), of in device_profiles(connection).items() if device is not None]
    if not profiles:
        return {}
    copy_GBps = min(of.copy_GBps for of in profiles)
    times = tensor_core_times(connection, "bfloat16")
    whole: dict[str, float] = defaultdict(float)
    left: dict[str, float] = defaultdict(float)
    for operator, device_ns, nbytes, floor_us, bound in connection.execute(_ROWS).fetchall():
        product = any(row.operator_class == "compute" for row in rows_of(operator.removeprefix("aten::")))
        factor = 1.0
        if bound in ("DRAM-bound", "cache-bound"):
            factor = 0.5
        elif bound == "compute-bound" and product:
            factor = min(1.0, max(1 / times, nbytes / 2 / copy_GBps / 1e3 / floor_us))
        whole[operator] += device_ns
        left[operator] += device_ns * factor
    return {operator: left[operator] / ns for operator, ns in whole.items() if ns}
