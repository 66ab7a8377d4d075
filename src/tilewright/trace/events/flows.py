"""Joins flow events to arrows between slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewright.trace.events.rows import Ints, fetch, next_id
from tilewright.trace.events.slices import Slices, reject
from tilewright.trace.events.staging import FLOW_PHASES

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

START, STEP, END = 0, 1, 2
_HOMELESS = "a flow event where no slice is"
_PARTNERLESS = "a flow event whose other end is missing"


def find_points(connection: DuckDBPyConnection) -> FlowPoints:
    """The flow events among the staged ones."""
    columns = fetch(
        connection,
        "SELECT seq, dense_rank() OVER (ORDER BY id, category, name), "
        f"CASE ph WHEN 's' THEN {START} WHEN 't' THEN {STEP} ELSE {END} END, track_id, ts, "
        "(ph <> 'f' OR bp IS NOT DISTINCT FROM 'e')::INT "
        f"FROM event JOIN place USING (pid, tid) WHERE ph IN {FLOW_PHASES}",
    )
    seq, key, phase, track, ts, enclosing = columns
    return FlowPoints(seq, key, phase, track, ts, enclosing.astype(np.bool_))


def write_flows(connection: DuckDBPyConnection, slices: Slices, flows: Flows) -> str | None:
    """Rows of `flow` and of rejects; returns a note if the clocks disagree."""
    reject(connection, flows.homeless, _HOMELESS)
    reject(connection, flows.partnerless, _PARTNERLESS)
    first = next_id(connection, "flow", "id")
    arrows = {  # noqa: F841  # DuckDB finds it by its name
        "seq": flows.seq,
        "slice_out": slices.ids[flows.slice_out],
        "slice_in": slices.ids[flows.slice_in],
    }
    connection.execute(
        f"INSERT INTO flow SELECT {first} - 1 + row_number() OVER (ORDER BY seq), slice_out, slice_in, "
        "id, name, category FROM arrows JOIN event USING (seq)"
    )
    lag = slices.nest.ts[flows.slice_in] - slices.nest.ts[flows.slice_out]
    back = lag < 0
    if not back.any():
        return None
    return f"{back.sum()} arrows go back in time, by up to {-lag.min() / 1e3:.3f} µs: their clocks disagree"


@dataclass(frozen=True)
class FlowPoints:
    """Flow events as int64[n] arrays; each binds to the slice around it (`enclosing`), or to the next one.

    `key` is a small number, one for each (id, category, name); `phase` is START, STEP or END.
    """

    seq: Ints
    key: Ints
    phase: Ints
    track: Ints
    ts: Ints
    enclosing: NDArray[np.bool_]

    def joined(self, slices: Slices) -> Flows:
        return join_flows(self, self.places(slices))

    def places(self, slices: Slices) -> Ints:
        """The index in the nest of the slice that each binds to, or -1."""
        place = slices.nest.holding(self.track, self.ts)
        if self.enclosing.all():
            return place
        return np.where(self.enclosing, place, slices.nest.following(self.track, self.ts))


@dataclass(frozen=True)
class Flows:
    """Arrows as indices in the nest, ordered by the seq of their later event; and the events without an arrow."""

    seq: Ints
    slice_out: Ints
    slice_in: Ints
    homeless: Ints  # seq of events where no slice is
    partnerless: Ints  # seq of events whose other half is missing, or has no slice

    @property
    def rejected(self) -> int:
        return len(self.homeless) + len(self.partnerless)


def join_flows(points: FlowPoints, place: Ints) -> Flows:
    """Arrows from each start or step to the step or ends after it under the same key; `place` is each event's slice.

    One start may have many ends: every kernel of a replayed CUDA graph points back to one launch. With a single
    start the order of time does not matter, since clocks of host and device disagree; where a key is used
    again, each end belongs to the start before it.
    """
    has_slice = place >= 0
    kept = np.flatnonzero(has_slice)
    key, phase = points.key[kept], points.phase[kept]
    starts = np.bincount(key[phase == START], minlength=key.max() + 1 if len(key) else 0)
    first = np.where(starts[key] == 1, phase, 0)
    order = np.lexsort((points.seq[kept], points.ts[kept], first, key))
    key, phase, kept = key[order], phase[order], kept[order]
    here = np.arange(len(kept))
    giver = np.maximum.accumulate(np.where(phase != END, here, -1)) if len(kept) else here
    # A step continues the event before it, not itself.
    giver = np.where(phase == STEP, np.concatenate([[-1], giver[:-1]]), giver) if len(kept) else giver
    joined = (phase != START) & (giver >= 0)
    joined &= key[np.maximum(giver, 0)] == key
    taken = np.flatnonzero(joined)
    used = np.zeros(len(kept), np.bool_)
    used[taken] = True
    used[giver[taken]] = True
    return Flows(
        seq=points.seq[kept[taken]],
        slice_out=place[kept[giver[taken]]],
        slice_in=place[kept[taken]],
        homeless=points.seq[~has_slice],
        partnerless=points.seq[kept[~used]],
    )
