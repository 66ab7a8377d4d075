"""Times of Perfetto's packets, each told by some clock, on the one clock of the trace: the time since boot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

REALTIME, BOOT = 1, 6
# Ids of clocks that only one writer knows.
_OF_A_WRITER = range(64, 128)

Clock = tuple[int, int]
"""The id of a clock, and the writer that it belongs to, or 0."""


class Unplaced(Exception):
    """A time of a clock that no snapshot joins to the trace's."""


@dataclass
class _Delta:
    """A clock whose times count from the one before."""

    last: int
    unit_ns: int


@dataclass
class Clocks:
    """Offsets between clocks, as far as the file was read: a snapshot is several clocks at one moment."""

    base_ns: int = 0
    """Between the time since boot and that since 1970, at the first snapshot that has both."""
    _seen: dict[Clock, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each clock its times at snapshots, rising, and the boot time of each."""
    _deltas: dict[Clock, _Delta] = field(default_factory=dict)
    _units: dict[Clock, int] = field(default_factory=dict)

    def add(self, writer: int, snapshot: Iterable[tuple[int, int, bool, int]]) -> None:
        """A snapshot by `writer`: for each clock its id, its time, whether it counts deltas, and its unit in ns."""
        times = {}
        for number, time, counts_deltas, unit_ns in snapshot:
            clock = _clock(number, writer)
            self._units[clock] = unit_ns or 1
            times[clock] = time * self._units[clock]
            if counts_deltas:
                self._deltas[clock] = _Delta(times[clock], self._units[clock])
        boot = self._boot_time(times)
        if boot is None:
            return
        if not self.base_ns and (REALTIME, 0) in times:
            self.base_ns = times[REALTIME, 0] - boot
        for clock, time in times.items():
            seen = self._seen.setdefault(clock, [])
            if not seen or time > seen[-1][0]:
                seen.append((time, boot))

    def _boot_time(self, times: dict[Clock, int]) -> int | None:
        """Of a snapshot: told by it, or by an earlier one that has one of its clocks."""
        if (BOOT, 0) in times:
            return times[BOOT, 0]
        known = next((clock for clock in times if clock in self._seen), None)
        return None if known is None else self._on_boot_clock(known, times[known])

    def boot_ns(self, number: int, writer: int, time: int) -> int:
        """What clock `number` tells as `time`, in nanoseconds since boot; raises Unplaced."""
        clock = _clock(number, writer)
        if clock == (BOOT, 0):
            return time
        delta = self._deltas.get(clock)
        if delta is not None:
            delta.last += time * delta.unit_ns
            return self._on_boot_clock(clock, delta.last)
        if clock not in self._seen:
            raise Unplaced
        return self._on_boot_clock(clock, time * self._units[clock])

    def _on_boot_clock(self, clock: Clock, time: int) -> int:
        """By the last snapshot before that time, or else the first one."""
        seen = self._seen.get(clock)
        if not seen:
            raise Unplaced
        there, boot = seen[max(bisect_right(seen, (time, 1 << 80)) - 1, 0)]
        return boot + time - there


def _clock(number: int, writer: int) -> Clock:
    return number, writer if number in _OF_A_WRITER else 0
