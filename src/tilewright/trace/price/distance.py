"""Each operator's time beside its floor: table `operator_distance`, one row per kind of call.

The time is that on the device; in a file without a device, the operator's self time on the host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile, profile_for, profile_of_driver
from tilewright.records.program import Cost
from tilewright.trace.account.waves import device_properties
from tilewright.trace.events.rows import append
from tilewright.trace.price.pricing import Price, price, price_generated
from tilewright.trace.price.recorded_call import read_call

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TABLE = """
CREATE OR REPLACE TABLE operator_distance (
    file_id         BIGINT NOT NULL,
    operator        VARCHAR NOT NULL,   -- or the region, or the kernel where nobody knows the operator
    shapes          VARCHAR,            -- of the operands, as the profiler wrote them
    dtype           VARCHAR,
    source          VARCHAR,
    phase           VARCHAR,            -- the range around it: the model's step, phase and layer
    attributed_by   VARCHAR,            -- launch, capture, description, same kernel, name, region, range, graph; host
    calls           BIGINT NOT NULL,
    device_ns       BIGINT NOT NULL,    -- of all calls
    typical_ns      BIGINT NOT NULL,    -- the same if each call of the host took as long as their median
    waited_ns       BIGINT NOT NULL,    -- the device, for the host to launch it
    bytes           BIGINT,             -- of one call, as all that follows
    flops           BIGINT,
    transcendentals BIGINT,
    provenance      VARCHAR NOT NULL,   -- formula; estimate, of a generated kernel by its arguments alone; unknown
    floor_us        DOUBLE,
    bound           VARCHAR
)"""

_COMPILED_COSTS = """
SELECT name, bytes_read, bytes_written, flops, transcendentals, provenance FROM region
UNION ALL
SELECT name, bytes_read, bytes_written, flops, transcendentals, provenance FROM operator
WHERE stage = 'after' AND region IS NULL"""


_THREADS = """
SELECT trace_file.id, TRY_CAST(metadata.str_value AS BIGINT) FROM trace_file
LEFT JOIN metadata ON metadata.file_id = trace_file.id AND metadata.name = 'tilewright threads'"""
"""How many threads PyTorch uses for an operator in the process of each file, if that is known."""

_HOPPER, _PCIE_5_GBPS = 9, 54.0
_COUNTABLE = 1 << 62
"""A file may claim shapes that no device holds."""


@dataclass(frozen=True)
class _Kind:
    """One kind of call: a row of the view `operator_call`."""

    file_id: int
    device: int | None
    operator: str
    attributed_by: str | None
    region: str | None
    kind: str
    source: str | None
    phase: str | None
    dims: str | None
    types: str | None
    strides: str | None
    concrete: str | None
    kernel: str
    calls: int
    device_ns: int
    typical_ns: int
    waited_ns: int
    programs: int | None
    moved: int | None
    given: int | None


def add_distances(connection: DuckDBPyConnection) -> None:
    """Fill `operator_distance`; the run may hold regions with their costs and the device's measured ceilings."""
    connection.execute(TABLE)
    regions = _regions(connection)
    profiles = device_profiles(connection)
    rows: list[tuple[object, ...]] = []
    for found in connection.execute("FROM operator_call").fetchall():
        kind = _Kind(*found)
        priced, provenance = _price(kind, regions)
        bound: tuple[float | None, str | None] = (None, None)
        profile = profiles.get((kind.file_id, kind.device))
        if priced is not None and profile is not None:
            bound = _floor(kind, priced, profile)
        cost = priced.cost if priced else None
        rows.append(
            (
                *(kind.file_id, kind.operator, kind.dims, priced.dtype if priced else None, kind.source),
                *(kind.phase or None, kind.attributed_by, kind.calls, kind.device_ns, kind.typical_ns, kind.waited_ns),
                cost.bytes if cost else None,
                *((cost.flops, cost.transcendentals) if cost and provenance == "formula" else (None, None)),
                *(provenance, *bound),
            )
        )
    append(connection, "operator_distance", rows)


def _price(kind: _Kind, regions: Mapping[str, Cost]) -> tuple[Price | None, str]:
    """The price of one call, and its provenance."""
    if kind.region is not None:
        cost = regions.get(kind.region)
        return (Price(cost, "float32", "pointwise"), "formula") if cost else (None, "unknown")
    args = {
        name: json.loads(text)
        for name, text in (
            ("Input Dims", kind.dims),
            ("Input type", kind.types),
            ("Input Strides", kind.strides),
            ("Concrete Inputs", kind.concrete),
        )
        if text is not None
    }
    call = read_call(kind.operator, args, _listed_dtype(kind.kernel))
    # On a host an operator of tilewright calls PyTorch's operators, which have rows of their own.
    if call is not None and not (kind.device is None and kind.operator.startswith("tilewright::")):
        generated = kind.operator.startswith("triton_")
        found = price_generated(call) if generated else price(call)
        if found is not None and max(found.cost.bytes, found.cost.flops, found.cost.transcendentals) < _COUNTABLE:
            return found, "estimate" if generated else "formula"
    if kind.kind in ("copy", "fill") and kind.moved is not None and "HtoD" not in kind.kernel:
        read = kind.moved if kind.kind == "copy" else 0
        return Price(Cost(bytes_read=read, bytes_written=kind.moved), "", "pointwise"), "formula"
    if kind.kind == "communication" and kind.moved is not None and kind.given is not None:
        return Price(Cost(bytes_read=kind.moved, bytes_written=kind.given), "", "pointwise"), "formula"
    return None, "unknown"


def _listed_dtype(kernel: str) -> str:
    """The dtype of lists of tensors: the profiler omits it, but the kernel's template arguments name it."""
    return next((name for name in ("c10::BFloat16", "c10::Half", "double") if name in kernel), "float")


def _floor(kind: _Kind, priced: Price, profile: DeviceProfile) -> tuple[float | None, str | None]:
    if kind.kind == "communication":
        # Limited by the link, whose ceiling is unknown here, and by the last rank.
        return None, "communication"
    if "Pageable" in kind.kernel or "Pinned" in kind.kernel:
        # A copy from or to the host is limited by the bus, whose ceiling is unknown here.
        return None, None
    cost, dtype = priced.cost, priced.dtype
    # PyTorch lets cuDNN round the operands of convolutions to TF32 unless it is told not to.
    if dtype == "float32" and "convolution" in kind.operator and kind.device is not None:
        dtype = "tf32"
    return floor_us(
        cost.bytes,
        cost.flops,
        cost.transcendentals,
        dtype,
        cost.bytes,
        profile,
        priced.kind,
        bytes_written=cost.bytes_written,
        programs=kind.programs,
    )


def _regions(connection: DuckDBPyConnection) -> dict[str, Cost]:
    """The cost of each region or launch with a unique name; two graphs may use the same name."""
    found: dict[str, set[Cost]] = {}
    for name, read, written, flops, special, provenance in connection.execute(_COMPILED_COSTS).fetchall():
        cost = Cost(0, 0, 0, read, written, flops, special, provenance=provenance)
        found.setdefault(name, set()).add(cost)
    return {
        name: cost
        for name, costs in found.items()
        for cost in costs
        if len(costs) == 1 and cost.provenance == "formula"
    }


def device_profiles(connection: DuckDBPyConnection) -> dict[tuple[int, int | None], DeviceProfile]:
    """The profile of each device: the datasheet's or the shipped one of its name, with the run's own ceilings."""
    ceilings = connection.execute("SELECT device, kind, dtype, value FROM ceiling").fetchall()
    found: dict[tuple[int, int | None], DeviceProfile] = {}
    # An operator of the host has no device number. A trace does not name its host: without ceilings, no floor.
    devices = {str(properties.get("name")) for properties in device_properties(connection).values()}
    own = {
        (kind, dtype): value
        for device, kind, dtype, value in ceilings
        if device not in devices and profile_of_driver(device) is None
    }
    if own:
        host, cores = _with_ceilings(profile_for("cpu"), own), host_cores(connection)
        for file_id, threads in connection.execute(_THREADS).fetchall():
            found[file_id, None] = _on_threads(host, threads / cores) if threads and cores else host
    for key, properties in device_properties(connection).items():
        name = str(properties.get("name"))
        profile = profile_of_driver(name)
        if profile is not None:
            measured = {(kind, dtype): value for device, kind, dtype, value in ceilings if device == name}
            found[key] = _with_ceilings(profile, measured)
    return found


def link_GBps(connection: DuckDBPyConnection) -> float:
    """What pinned memory and the slowest device exchange: of PCIe 5 from Hopper on (34 MB to an H200: 0.62 ms), else of
    PCIe 4."""
    generations = [of.generation for (_, device), of in device_profiles(connection).items() if device is not None]
    return _PCIE_5_GBPS if min(generations, default=0) >= _HOPPER else _PCIE_5_GBPS / 2


def host_cores(connection: DuckDBPyConnection) -> int | None:
    """The cores that the program could use, if the run names them: no more than the processors it was bound to."""
    named = connection.execute("SELECT machine['cores'] FROM run").fetchall() if _has_run(connection) else []
    found = re.match(r"(\d+)(?: \((\d+) threads\))?", str(named[0][0])) if named else None
    return min(int(number) for number in found.groups() if number) if found else None


def _has_run(connection: DuckDBPyConnection) -> bool:
    return bool(connection.execute("FROM duckdb_tables() WHERE table_name = 'run'").fetchall())


def _on_threads(profile: DeviceProfile, part: float) -> DeviceProfile:
    """What a part of the cores computes at most; one core may take all that memory gives."""
    part = min(part, 1.0)
    products = {dtype: part * rate for dtype, rate in profile.matmul_TFLOPs.items()}
    return replace(profile, vector_TFLOPs=part * profile.vector_TFLOPs, matmul_TFLOPs=products)


def _with_ceilings(profile: DeviceProfile, measured: Mapping[tuple[str, str], float]) -> DeviceProfile:
    kinds = {kind: value for (kind, _), value in measured.items()}
    products = {dtype: value for (kind, dtype), value in measured.items() if kind == "matmul"}
    return replace(
        profile,
        copy_GBps=kinds.get("copy", profile.copy_GBps),
        read_GBps=kinds.get("read", profile.read_GBps),
        write_GBps=kinds.get("write", profile.write_GBps),
        l2_GBps=kinds.get("cache", profile.l2_GBps),
        l2_read_GBps=kinds.get("cache read", profile.l2_read_GBps),
        l2_write_GBps=kinds.get("cache write", profile.l2_write_GBps),
        vector_TFLOPs=kinds.get("vector", profile.vector_TFLOPs),
        launch_us=kinds.get("launch in a graph", kinds.get("launch", profile.launch_us)),
        matmul_TFLOPs={**profile.matmul_TFLOPs, **products},
    )
