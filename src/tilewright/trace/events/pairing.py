"""Pairs begin and end events to slices, with a stack per thread or asynchronous id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Event = tuple[int, str, object, int, str | None, str | None]  # seq, phase, place, ts, category, name


@dataclass
class Paired:
    """Slices by the seq of their begin; `dur` is -1 if there was no end."""

    seq: list[int] = field(default_factory=list)
    place: list[object] = field(default_factory=list)
    ts: list[int] = field(default_factory=list)
    dur: list[int] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)  # (seq of the begin, seq of the end)
    unmatched: list[int] = field(default_factory=list)  # seq of ends without a begin

    def add(self, seq: int, place: object, ts: int, dur: int) -> int:
        self.seq.append(seq)
        self.place.append(place)
        self.ts.append(ts)
        self.dur.append(dur)
        return len(self.seq) - 1


def pair(events: Iterable[Event], begins: Sequence[str], ends: Sequence[str]) -> Paired:
    """Pair `events`, given in the order of time, for each place.

    An end closes the last open begin whose category and name agree with the end's own, as far as both have
    them. A phase that is neither is an instant of no length.
    """
    paired = Paired()
    open_at: dict[object, list[tuple[int, str | None, str | None]]] = {}
    for seq, phase, place, ts, category, name in events:
        if phase in begins:
            open_at.setdefault(place, []).append((paired.add(seq, place, ts, -1), category, name))
        elif phase in ends:
            stack = open_at.get(place, [])
            at = _last_that_agrees(stack, category, name)
            if at is None:
                paired.unmatched.append(seq)
                continue
            index = stack.pop(at)[0]
            paired.dur[index] = ts - paired.ts[index]
            paired.ends.append((paired.seq[index], seq))
        else:
            paired.add(seq, place, ts, 0)
    return paired


def _last_that_agrees(
    stack: Sequence[tuple[int, str | None, str | None]], category: str | None, name: str | None
) -> int | None:
    for at in range(len(stack) - 1, -1, -1):
        _, its_category, its_name = stack[at]
        if category and its_category and category != its_category:
            continue
        if name and its_name and name != its_name:
            continue
        return at
    return None
