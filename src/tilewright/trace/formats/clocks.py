"""Converts the times of Perfetto's packets, which have different clocks, to the time since boot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

REALTIME, BOOT = 1, 6
# Ids of clocks that are local to one writer.
_OF_A_WRITER = range(64, 128)

Clock = tuple[int, int]
"""The id of a clock, and its writer, or 0 for a global clock."""


class NoSnapshot(Exception):
    """No snapshot relates the clock of a time to the trace's clock."""


@dataclass
class _Delta:
    """A clock whose times count from the one before."""

    last: int
    unit_ns: int


@dataclass
class Clocks:
    """Offsets between clocks, from the snapshots read so far; a snapshot has several clocks at one moment."""

    base_ns: int = 0
    """The time since 1970 minus that since boot, at the first snapshot with both."""
    _snapshots: dict[Clock, list[tuple[int, int]]] = field(default_factory=dict)
    """For each clock (time, boot time) pairs at snapshots, ascending."""
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
            snapshots = self._snapshots.setdefault(clock, [])
            if not snapshots or time > snapshots[-1][0]:
                snapshots.append((time, boot))

    def _boot_time(self, times: dict[Clock, int]) -> int | None:
        """The boot time of a snapshot: its own, or derived from an earlier one that shares a clock."""
        if (BOOT, 0) in times:
            return times[BOOT, 0]
        known = next((clock for clock in times if clock in self._snapshots), None)
        return None if known is None else self._on_boot_clock(known, times[known])

    def boot_ns(self, number: int, writer: int, time: int) -> int:
        """`time` of clock `number` in nanoseconds since boot; raises NoSnapshot."""
        clock = _clock(number, writer)
        if clock == (BOOT, 0):
            return time
        delta = self._deltas.get(clock)
        if delta is not None:
            delta.last += time * delta.unit_ns
            return self._on_boot_clock(clock, delta.last)
        if clock not in self._snapshots:
            raise NoSnapshot
        return self._on_boot_clock(clock, time * self._units[clock])

    def _on_boot_clock(self, clock: Clock, time: int) -> int:
        """By the last snapshot before that time, or else the first one."""
        snapshots = self._snapshots.get(clock)
        if not snapshots:
            raise NoSnapshot
        there, boot = snapshots[max(bisect_right(snapshots, (time, 1 << 80)) - 1, 0)]
        return boot + time - there


def _clock(number: int, writer: int) -> Clock:
    return number, writer if number in _OF_A_WRITER else 0
