"""Memory over time, and its peak by operator and by phase, on CPU and GPU.

The profiler's `[memory]` events have every allocation and free with its address and the allocator's totals. Blocks
allocated before the peak and freed after it are live at the peak. The rest of a GPU's total was allocated before the
profile, such as a model's weights. A CPU's total counts from the first event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewright.trace.events.rows import Ints, find_ids

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Span = tuple[int, int, str]
"""Begin and end of a range, and its phase."""

PHASES = ("forward", "backward", "optimizer", "other")
BEFORE = "before the profile"
NO_OPERATOR = "outside any operator"
_FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = range(4)
# Operators that allocate on behalf of their caller.
_HELPERS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
    | {"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::zero_", "aten::ones", "aten::ones_like"}
    | {"aten::full", "aten::full_like", "aten::fill_", "aten::scalar_tensor", "aten::resize_"}
    | {"aten::clone", "aten::contiguous", "aten::copy_", "aten::to", "aten::_to_copy"}
)
_ENGINE = "autograd::engine::evaluate_function: "
# Deeper stacks are not from real programs.
_DEEPEST = 2_000

_EVENTS = """
    SELECT slice_id, ts, coalesce(parent_id, -1) AS parent, upid, coalesce(process.file_id, -1) AS file,
           memory_event.device, bytes, allocated, coalesce(reserved, 0) AS reserved,
           dense_rank() OVER (ORDER BY address) AS address
    FROM memory_event LEFT JOIN process USING (upid)
    WHERE bytes IS NOT NULL AND allocated IS NOT NULL AND memory_event.device IS NOT NULL
    ORDER BY upid, memory_event.device, ts, slice_id"""
_STACKS = """
    SELECT id, coalesce(parent_id, -1) AS parent, category IN ('cpu_op', 'allocation') AS operator, name
    FROM slice
    WHERE track_id IN (SELECT DISTINCT track_id FROM slice WHERE name = '[memory]') AND name <> '[memory]'
    ORDER BY id"""
_RANGES = """
    SELECT ts, ts + dur, CASE
               WHEN lower(slice.name) IN ('forward', 'phase forward') THEN 'forward'
               WHEN lower(slice.name) IN ('backward', 'phase backward') THEN 'backward'
               WHEN starts_with(slice.name, 'autograd::engine::') THEN 'backward'
               ELSE 'optimizer'
           END AS phase, coalesce(process.file_id, -1)
    FROM slice
    LEFT JOIN thread_track ON thread_track.id = slice.track_id
    LEFT JOIN thread USING (utid)
    LEFT JOIN process USING (upid)
    WHERE dur > 0 AND (
        category = 'user_annotation' AND (
            regexp_full_match(slice.name, '(phase )?(forward|backward|optimizer)', 'i')
            OR starts_with(slice.name, 'Optimizer.step#') OR starts_with(slice.name, 'Optimizer.zero_grad#'))
        OR category = 'cpu_op' AND starts_with(slice.name, 'autograd::engine::evaluate_function'))
    ORDER BY ts"""


@dataclass(frozen=True)
class Holder:
    """Bytes that one operator allocated in one phase."""

    operator: str
    phase: str
    bytes: int
    allocations: int


@dataclass(frozen=True)
class PhaseMemory:
    """One phase: its peak of live bytes, and the bytes that it allocated and that outlived it.

    `kept_bytes` of forward is what backward needs: the difference between training and inference.
    """

    phase: str
    peak_bytes: int
    allocated_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """One allocator: its curve (ns, bytes) and the holders of its peak, which add up to `peak_bytes` exactly.

    `training`: its file has a backward pass or an optimizer.
    """

    file: int
    process: int | None
    device: str
    ts: Ints
    allocated: Ints
    reserved: Ints
    peak_bytes: int
    peak_ts: int
    training: bool
    holders: list[Holder]
    phases: list[PhaseMemory]


def memory(connection: DuckDBPyConnection) -> list[DeviceMemory]:
    """Every allocator in view `memory_event`, the largest peak first.

    None without profile_memory=True.
    """
    found = connection.execute(_EVENTS).fetchnumpy()
    if not len(found["ts"]):
        return []
    columns = {name: np.ma.filled(column, -1) for name, column in found.items()}
    operator_of = _operators(connection, columns["parent"].astype(np.int64))
    columns["operator"] = np.array(operator_of, dtype=object)
    ranges = connection.execute(_RANGES).fetchall()
    devices = []
    keys = list(zip(columns["upid"].tolist(), columns["device"].tolist(), strict=True))
    for key in dict.fromkeys(keys):
        here = np.array([other == key for other in keys])
        part = {name: column[here] for name, column in columns.items()}
        spans = [span[:3] for span in ranges if span[3] == part["file"][0]]
        devices.append(_device(None if key[0] < 0 else int(key[0]), str(key[1]), part, spans))
    return sorted(devices, key=lambda each: -each.peak_bytes)


def _device(process: int | None, name: str, part: dict[str, NDArray[Any]], ranges: list[Span]) -> DeviceMemory:
    allocated, sizes = part["allocated"].astype(np.int64), part["bytes"].astype(np.int64)
    if name == "CPU":
        # PyTorch counts CPU memory only while it profiles, so the total before the first event is meaningless.
        allocated = allocated - (allocated[0] - sizes[0])
    phase = _phases(part["ts"].astype(np.int64), ranges)
    freed = _freed(part["address"].astype(np.int64), sizes)
    peak = int(np.argmax(allocated))
    live = np.flatnonzero((sizes > 0) & (np.arange(sizes.size) <= peak) & (freed > peak))
    sums: dict[tuple[str, str], list[int]] = {}
    for place in live.tolist():
        held = sums.setdefault((part["operator"][place], PHASES[phase[place]]), [0, 0])
        held[0] += int(sizes[place])
        held[1] += 1
    holders = [Holder(operator, phase, *held) for (operator, phase), held in sums.items()]
    # Negative where a CPU's count, which starts with the profile, has lost blocks that are older.
    before = int(allocated[peak]) - sum(holder.bytes for holder in holders)
    if before > 0:
        holders.append(Holder(BEFORE, "other", before, 0))
    return DeviceMemory(
        file=int(part["file"][0]),
        process=process,
        device=name,
        ts=part["ts"].astype(np.int64),
        allocated=allocated,
        reserved=part["reserved"].astype(np.int64),
        peak_bytes=int(allocated[peak]),
        peak_ts=int(part["ts"][peak]),
        training=any(name in ("backward", "optimizer") for _, _, name in ranges),
        holders=sorted(holders, key=lambda holder: -holder.bytes),
        phases=_by_phase(phase, allocated, sizes, freed),
    )


def _freed(address: Ints, sizes: Ints) -> Ints:
    """For each allocation the index of the next event at its address if that is a free; else past the end."""
    order = np.lexsort((np.arange(sizes.size), address))
    freed = np.full(sizes.size, sizes.size, dtype=np.int64)
    this, following = order[:-1], order[1:]
    paired = (address[this] == address[following]) & (sizes[this] > 0) & (sizes[following] < 0)
    freed[this[paired]] = following[paired]
    return freed


def _by_phase(phase: Ints, allocated: Ints, sizes: Ints, freed: Ints) -> list[PhaseMemory]:
    found = []
    after = np.append(phase, -1)[freed]
    for number, name in enumerate(PHASES):
        here = phase == number
        if here.any():
            own = here & (sizes > 0)
            kept = int(sizes[own & (after != number)].sum())
            found.append(PhaseMemory(name, int(allocated[here].max()), int(sizes[own].sum()), kept))
    return found


def _operators(connection: DuckDBPyConnection, parents: Ints) -> list[str]:
    """The operator of each event: the innermost around it that does not allocate on behalf of its caller."""
    found = connection.execute(_STACKS).fetchnumpy()
    ids, up = (np.asarray(found[name], dtype=np.int64) for name in ("id", "parent"))
    if not ids.size:
        return [NO_OPERATOR] * parents.size
    names = np.ma.filled(found["name"], "")
    operator = np.ma.filled(found["operator"], False).astype(bool)
    serious = operator & ~np.isin(names.astype(str), list(_HELPERS))
    above = find_ids(ids, up)
    at = find_ids(ids, parents)
    best = np.full(parents.size, -1, dtype=np.int64)
    for _ in range(_DEEPEST):
        inside = at >= 0
        if not inside.any():
            break
        known = np.where(inside, operator[at], False)
        best = np.where(known, at, best)
        at = np.where(inside & ~np.where(inside, serious[at], False), above[at], -1)
    return [NO_OPERATOR if place < 0 else str(names[place]).removeprefix(_ENGINE) for place in best.tolist()]


def _phases(ts: Ints, ranges: list[Span]) -> Ints:
    """The phase of each moment.

    Ranges named forward, backward and optimizer on any thread define phases; without them, the autograd engine's
    functions and `Optimizer.step` do. Other time is forward, unless a range is named forward.
    """
    phase = np.full(ts.size, _OTHER, dtype=np.int64)
    if not any(name == "forward" for _, _, name in ranges):
        phase[:] = _FORWARD
    for number in (_FORWARD, _BACKWARD, _OPTIMIZER):
        spans = [(start, end) for start, end, name in ranges if name == PHASES[number]]
        if spans:
            starts, ends = np.array(spans, dtype=np.int64).T
            latest = np.maximum.accumulate(ends)
            place = np.searchsorted(starts, ts, side="right") - 1
            phase[(place >= 0) & (ts <= latest[np.maximum(place, 0)])] = number
    return phase
