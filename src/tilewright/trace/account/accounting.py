"""The time of each device by class: every nanosecond is in exactly one class, with its cause.

At any instant a device does the first of these that applies: a kernel; the tail of a kernel's last wave; a
collective; a copy or fill. What remains are gaps. A gap is what a synchronisation took from it, then what the
host was late by, then idle:

- *synchronisation*: had the host not waited in a call, it would have come to every later launch earlier by so
  much. So a wait is a debt, and gaps before work that was launched after it are taken from that debt, the latest
  first, until it is used up. This is the time that the step would save if the host did not wait.
- *launch-bound*: the host came to the launch after the device ran dry, or the device took its time between two
  queued pieces of work.
- *idle*: the host was outside every operator and CUDA call for longer than `PAUSE_NS` (it loads data, or
  sleeps), or nothing follows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tilewright.trace.events.nesting import PENDING
from tilewright.trace.events.rows import Ints, append, distinct, fetch

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PAUSE_NS = 500_000
"""Python between two operators takes about 10 µs; a longer gap means that the host is not launching."""
CLASSES = ("kernel", "wave tail", "communication", "copy", "synchronisation", "launch-bound", "idle")
"""Classes of a busy device first, in the order of precedence for overlaps."""


@dataclass(frozen=True)
class DeviceWork:
    """The kernels, copies and fills of one device, in the order of their starts; times in nanoseconds."""

    slice_id: Ints
    start: Ints
    end: Ints
    tail: Ints
    """The length in nanoseconds of the tail of a kernel's last wave."""
    kind: Ints
    """Index into `CLASSES`."""
    launched: Ints
    """When the host launched it; the latest possible time if unknown."""


class AccountSpan(NamedTuple):
    """A part of a device's time; `cause` is the slice of the work, of the wait, or of the late launch."""

    start: int
    end: int
    kind: str
    cause: int | None


@dataclass(frozen=True)
class AccountSpans:
    """Parts of a device's time as int64[n] arrays: `kind` is an index into `CLASSES`, `cause` a slice or -1."""

    start: Ints
    end: Ints
    kind: Ints
    cause: Ints

    @classmethod
    def of(cls, spans: Sequence[AccountSpan]) -> AccountSpans:
        start, end, kind, cause = zip(*spans, strict=True) if spans else ((), (), (), ())
        codes = [CLASSES.index(name) for name in kind]
        causes = [-1 if slice_id is None else slice_id for slice_id in cause]
        return cls(*(np.array(column, np.int64) for column in (start, end, codes, causes)))

    @classmethod
    def joined(cls, *parts: AccountSpans) -> AccountSpans:
        """All of them in the order of their starts."""
        start = np.concatenate([part.start for part in parts])
        order = np.argsort(start, kind="stable")
        rest = ([getattr(part, name) for part in parts] for name in ("end", "kind", "cause"))
        return cls(start[order], *(np.concatenate(column)[order] for column in rest))

    def clipped(self, start: int, end: int) -> AccountSpans:
        """Their parts between `start` and `end`."""
        starts, ends = np.maximum(self.start, start), np.minimum(self.end, end)
        some = starts < ends
        return AccountSpans(starts[some], ends[some], self.kind[some], self.cause[some])


@dataclass(frozen=True)
class Gaps:
    """The times between busy spans, as int64[n] arrays: the work after each, and when the host launched that."""

    start: Ints
    end: Ints
    following: Ints
    launched: Ints

    @classmethod
    def between(cls, busy: AccountSpans, work: DeviceWork) -> Gaps:
        before = np.flatnonzero(busy.start[1:] > busy.end[:-1])
        end = busy.start[before + 1]
        following = np.searchsorted(work.start, end)
        return cls(busy.end[before], end, work.slice_id[following], np.minimum(work.launched[following], end))

    def irregular(self, pauses: Sequence[tuple[int, int]]) -> Ints:
        """Which are longer than `PAUSE_NS` or overlap a pause of the host."""
        begun = np.array([start for start, _ in pauses] + [PENDING], np.int64)
        after = np.searchsorted(np.array([end for _, end in pauses], np.int64), self.start, side="right")
        return np.flatnonzero((self.end - self.start > PAUSE_NS) | (begun[after] < self.end))


@dataclass
class Waits:
    """Calls in which the host waited for the device, in the order of their ends, and the gaps charged to each."""

    slice_id: Sequence[int]
    start: Sequence[int]
    end: Sequence[int]
    lost: dict[int, int] = field(default_factory=dict)
    _next: int = 0
    _debts: list[list[int]] = field(default_factory=list)
    """The waits that are not used up: slice, remaining nanoseconds."""

    def first_affected(self, launched: Ints, at: int) -> int:
        """The first place from `at` on whose work was launched after a wait that is not used up.

        `launched` is the running maximum of the launches; all waits that ended by that of `at - 1` were taken.
        """
        if self._debts:
            return at
        return int(np.searchsorted(launched, self.end[self._next])) if self._next < len(self.end) else len(launched)

    def take(self, gap: int, before: int) -> Iterator[tuple[int, int]]:
        """Up to `gap` nanoseconds of the waits that ended by `before`, the latest first: (slice, nanoseconds)."""
        while self._next < len(self.end) and self.end[self._next] <= before:
            self._debts.append([self.slice_id[self._next], self.end[self._next] - self.start[self._next]])
            self._next += 1
        while gap and self._debts:
            waited, left = self._debts[-1]
            taken = min(gap, left)
            self._debts[-1][1] -= taken
            if taken == left:
                self._debts.pop()
            gap -= taken
            self.lost[waited] = self.lost.get(waited, 0) + taken
            if taken:
                yield waited, taken


def partition(
    work: DeviceWork, waits: Waits, pauses: Sequence[tuple[int, int]], start: int, end: int, starting: int | None = None
) -> AccountSpans:
    """The time of one device from `start` to `end`, divided into consecutive spans.

    `pauses` are the times, sorted, at which the host was outside every operator for longer than `PAUSE_NS`. `starting`
    is the cause of the time before the first work.
    """
    busy = busy_spans(work)
    if not len(busy.start):
        return AccountSpans.of([AccountSpan(start, end, "idle", None)]).clipped(start, end)
    before = AccountSpan(start, int(busy.start[0]), "idle", starting)
    gaps = Gaps.between(busy, work)
    between = _gap_spans(gaps, waits, pauses)
    after = AccountSpans.of([before, *_after(int(busy.end[-1]), end, waits)])
    return AccountSpans.joined(busy, between, after).clipped(start, end)


def _gap_spans(gaps: Gaps, waits: Waits, pauses: Sequence[tuple[int, int]]) -> AccountSpans:
    """All gaps by class. Most are launch-bound as a whole: a long trace has a million gaps, so those take no loop."""
    irregular, launched = gaps.irregular(pauses), np.maximum.accumulate(gaps.launched)
    plain = np.ones(len(gaps.start), np.bool_)
    spans: list[AccountSpan] = []
    at = 0
    while at < len(plain):
        coming = np.searchsorted(irregular, at)
        next_irregular = int(irregular[coming]) if coming < len(irregular) else len(plain)
        at = min(next_irregular, waits.first_affected(launched, at))
        if at < len(plain):
            plain[at] = False
            spans.extend(_gap(gaps, at, waits, pauses))
            at += 1
    late = np.full(int(plain.sum()), CLASSES.index("launch-bound"), np.int64)
    whole = AccountSpans(gaps.start[plain], gaps.end[plain], late, gaps.following[plain])
    return AccountSpans.joined(whole, AccountSpans.of(spans))


def _after(reached: int, end: int, waits: Waits) -> Iterator[AccountSpan]:
    """The time after the last work."""
    if reached < end:
        for waited, nanoseconds in waits.take(end - reached, end):
            yield AccountSpan(reached, reached + nanoseconds, "synchronisation", waited)
            reached += nanoseconds
        yield AccountSpan(reached, end, "idle", None)


def _gap(gaps: Gaps, place: int, waits: Waits, pauses: Sequence[tuple[int, int]]) -> Iterator[AccountSpan]:
    """The spans of one gap, before the work `following` that the host launched at `launched`."""
    start, end, launched, following = (
        int(column[place]) for column in (gaps.start, gaps.end, gaps.launched, gaps.following)
    )
    late = max(launched, start)
    at = start
    # If the work was queued before the device became idle, no wait of the host caused the gap.
    for waited, nanoseconds in waits.take(end - start if late > start else 0, launched):
        yield AccountSpan(at, at + nanoseconds, "synchronisation", waited)
        at += nanoseconds
    if late == start and end - start > PAUSE_NS:
        yield AccountSpan(at, end, "idle", following)
        return
    first = max(bisect_left(pauses, (at, at)) - 1, 0)
    for low, high in pauses[first : bisect_right(pauses, (late, late))]:
        low, high = max(low, at), min(high, late)
        if low < high:
            if at < low:
                yield AccountSpan(at, low, "launch-bound", following)
            yield AccountSpan(low, high, "idle", following)
            at = high
    if at < end:
        yield AccountSpan(at, end, "launch-bound", following)


def busy_spans(work: DeviceWork) -> AccountSpans:
    """The busy time by class in the order of `CLASSES`; neighbours with the same class and cause are merged.

    >>> one = np.array([0, 2]), np.array([4, 6])
    >>> busy = busy_spans(DeviceWork(np.array([7, 8]), *one, np.array([0, 0]), np.array([0, 3]), np.array([0, 0])))
    >>> [(int(start), int(end), CLASSES[kind]) for start, end, kind in zip(busy.start, busy.end, busy.kind)]
    [(0, 4, 'kernel'), (4, 6, 'copy')]
    """
    starts, ends, kinds, causes = _parts(work)
    edges = distinct(np.concatenate([starts, ends]))
    if len(edges) < 2:
        return AccountSpans.of([])
    kind = np.full(len(edges) - 1, len(CLASSES))
    cause = np.zeros(len(edges) - 1, np.int64)
    firsts, lasts = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    alone = _alone(starts, ends)
    kind[firsts[alone]] = kinds[alone]
    cause[firsts[alone]] = causes[alone]
    # Later writes win: the highest class last, and within a class the part that began first.
    order = np.lexsort((-starts, -kinds))
    order = order[~alone[order]]
    for part, first, last in zip(order.tolist(), firsts[order].tolist(), lasts[order].tolist(), strict=True):
        kind[first:last] = kinds[part]
        cause[first:last] = causes[part]
    new = np.flatnonzero(np.r_[True, (np.diff(kind) != 0) | (np.diff(cause) != 0)])
    stops = edges[np.r_[new[1:], len(kind)]]
    busy = kind[new] < len(CLASSES)
    return AccountSpans(edges[new][busy], stops[busy], kind[new][busy], cause[new][busy])


def _alone(starts: Ints, ends: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which intervals overlap no other."""
    order = np.lexsort((ends, starts))
    begun, reached = starts[order], np.maximum.accumulate(ends[order])
    apart = np.r_[True, begun[1:] >= reached[:-1], True]
    alone = np.empty(len(starts), np.bool_)
    alone[order] = apart[:-1] & apart[1:]
    return alone


def _parts(work: DeviceWork) -> tuple[Ints, Ints, Ints, Ints]:
    """Kernels in two parts, before their tail and the tail; empty parts are omitted."""
    body_end = work.end - work.tail
    tail = np.ones_like(work.kind)
    starts = np.concatenate([work.start, body_end])
    ends = np.concatenate([body_end, work.end])
    kinds = np.concatenate([work.kind, tail])
    causes = np.concatenate([work.slice_id, work.slice_id])
    some = ends > starts
    return starts[some], ends[some], kinds[some], causes[some]


def pauses_between(starts: Ints, ends: Ints) -> list[tuple[int, int]]:
    """The gaps longer than `PAUSE_NS` between the intervals.

    >>> pauses_between(np.array([0, 5, 900_000]), np.array([10, 7, 900_001]))
    [(10, 900000)]
    """
    if not len(starts):
        return []
    order = np.argsort(starts, kind="stable")
    begun, covered = starts[order], np.maximum.accumulate(ends[order])
    long = np.flatnonzero(begun[1:] - covered[:-1] > PAUSE_NS)
    return [(int(covered[i]), int(begun[i + 1])) for i in long]


def account(connection: DuckDBPyConnection) -> None:
    """Fill tables `device_time` and `lost` from `device_slice`, `wave`, `wait` and `step`."""
    for file_id, start, end in connection.execute(
        "SELECT file_id, min(ts), max(ts + dur) FROM step GROUP BY file_id ORDER BY file_id"
    ).fetchall():
        host = fetch(connection, "SELECT ts, ts + dur FROM host_activity WHERE file_id = ?", file_id)
        pauses = pauses_between(host[0], host[1])
        devices = connection.execute(
            "SELECT DISTINCT upid FROM device_slice WHERE file_id = ? ORDER BY upid", [file_id]
        ).fetchall()
        for (upid,) in devices:
            work, waits = _work(connection, upid), _waits(connection, file_id, upid)
            starting = _longest_call(connection, file_id, start, int(work.start[0]))
            _write(connection, upid, partition(work, waits, pauses, start, end, starting))
            append(connection, "lost", [(upid, slice_id, lost) for slice_id, lost in waits.lost.items()])


def _longest_call(connection: DuckDBPyConnection, file_id: int, start: int, end: int) -> int | None:
    """The CUDA call in which the host was for more than half of that time: the start-up of CUDA, for instance."""
    found = connection.execute(
        """SELECT slice_id FROM device_call
           WHERE file_id = $file AND 2 * (least(ts + dur, $end) - greatest(ts, $start)) > $end - $start
           ORDER BY dur DESC, slice_id LIMIT 1""",
        {"file": file_id, "start": start, "end": end},
    ).fetchone()
    return int(found[0]) if found else None


def _write(connection: DuckDBPyConnection, upid: int, spans: AccountSpans) -> None:
    columns = {  # noqa: F841  # DuckDB finds it by its name
        "start": spans.start,
        "end": spans.end,
        "kind": spans.kind,
        "cause": np.ma.masked_array(spans.cause, spans.cause < 0),
    }
    connection.execute(
        'INSERT INTO device_time SELECT $upid, start, "end" - start, $classes[kind + 1], cause FROM columns',
        {"upid": upid, "classes": list(CLASSES)},
    )


def _work(connection: DuckDBPyConnection, upid: int) -> DeviceWork:
    columns = fetch(
        connection,
        """SELECT d.slice_id, d.ts, d.ts + d.dur, coalesce(w.tail_ns, 0),
                  CASE d.kind WHEN 'kernel' THEN 0 WHEN 'communication' THEN 2 ELSE 3 END,
                  coalesce(d.launch_ts, d.ts)
           FROM device_slice d LEFT JOIN wave w USING (slice_id)
           WHERE d.upid = ? ORDER BY d.ts, d.slice_id""",
        upid,
    )
    return DeviceWork(*columns)


def _waits(connection: DuckDBPyConnection, file_id: int, upid: int) -> Waits:
    slice_id, start, end = fetch(
        connection,
        """SELECT slice_id, ts, ts + dur FROM wait
           WHERE file_id = ? AND (upid IS NULL OR upid = ?) ORDER BY ts + dur, slice_id""",
        file_id,
        upid,
    )
    return Waits(slice_id.tolist(), start.tolist(), end.tolist())
