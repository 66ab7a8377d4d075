"""Chrome's trace format, event by event: exact to the nanosecond, and tolerant of damaged events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.store.rows import storable
from tilewright.trace.events.rows import append
from tilewright.trace.events.staging import KNOWN_PHASES, Header
from tilewright.trace.formats.header import header_of
from tilewright.trace.formats.scanner import Damaged, Exact, Scanner

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_BATCH = 20_000
_LONGEST = 2000
# One encoder for all: `json.dumps` would make one for each value.
_as_json = json.JSONEncoder(ensure_ascii=False).encode


def stage(plain: Path, connection: DuckDBPyConnection, path: Path) -> Header:
    """Fill `staged` and `event_reject` from the unpacked file `plain`, which errors call `path`.

    Raises:
        TraceError: the file is not a trace.
    """
    scanner = Scanner(plain, path)
    rows: list[tuple[object, ...]] = []
    rejects: list[tuple[object, ...]] = []
    for event in scanner.events():
        try:
            rows.append(staged(event))
        except InvalidEvent as why:
            rejects.append((str(why), shown(event.text if isinstance(event, Damaged) else event)))
        if len(rows) + len(rejects) >= _BATCH:
            append(connection, "staged", rows)
            append(connection, "event_reject", rejects)
            rows, rejects = [], []
    if scanner.cut_off is not None:
        rejects.append(("the file ends within this event", storable(scanner.cut_off[:_LONGEST])))
    append(connection, "staged", rows)
    append(connection, "event_reject", rejects)
    return header_of(scanner.header, scanner.notes)


class InvalidEvent(Exception):
    """The reason why an event cannot become a row."""


def staged(event: object) -> tuple[object, ...]:
    """One event of the file as a row of `staged`; raises InvalidEvent."""
    if isinstance(event, Damaged):
        raise InvalidEvent(f"no JSON: {event.why}")
    if not isinstance(event, dict):
        raise InvalidEvent("not an object")
    phase = event.get("ph")
    if phase not in KNOWN_PHASES:
        raise InvalidEvent(f"unknown phase {_short(phase)}")
    timed = phase != "M"
    duration = _nanoseconds(event, "dur") if phase == "X" else None
    if duration is not None and duration < 0:
        raise InvalidEvent("negative duration")
    return (
        0,
        phase,
        text(event.get("cat")),
        text(event.get("name")),
        text(event.get("pid")) or "",
        text(event.get("tid")) or "",
        _nanoseconds(event, "ts") if timed else None,
        duration,
        identity(event),
        text(event.get("bp")),
        text(event.get("s")),
        arguments(event.get("args")),
    )


def identity(event: Mapping[str, Any]) -> str | None:
    """The id shared by the events of one flow or asynchronous slice."""
    given = event.get("id")
    if given is None and isinstance(event.get("id2"), dict):
        given = event["id2"].get("global", event["id2"].get("local"))
    if given is None:
        return None
    scope = event.get("scope")
    return text(given) if scope is None else f"{text(scope)}:{text(given)}"


def arguments(value: object) -> str | None:
    """Arguments as JSON text; a value that is not an object becomes `{"value": ...}`."""
    if value is None or value == {}:
        return None
    return storable(_as_json(value if isinstance(value, dict) else {"value": value}))


def text(value: object) -> str | None:
    if value is None:
        return None
    if type(value) is int:
        return str(value)
    return storable(value if isinstance(value, str) else _as_json(value))


def shown(event: object) -> str:
    whole = storable(_as_json(event))
    return whole if len(whole) <= _LONGEST else whole[:_LONGEST] + "…"


def _nanoseconds(event: Mapping[str, Any], key: str) -> int:
    """Microseconds of the file in nanoseconds, exactly; raises InvalidEvent."""
    value = event.get(key)
    if value is None:
        raise InvalidEvent(f"no {key}")
    if isinstance(value, bool) or not isinstance(value, (int, Exact, str)):
        raise InvalidEvent(f"{key} is not a number")
    try:
        nanoseconds = Decimal(value.text if isinstance(value, Exact) else value) * 1000
    except InvalidOperation as error:
        raise InvalidEvent(f"{key} is not a number") from error
    if not nanoseconds.is_finite():
        raise InvalidEvent(f"{key} is not finite")
    if not -(2**62) < nanoseconds < 2**62:
        raise InvalidEvent(f"{key} is out of range")
    return int(nanoseconds.to_integral_value(ROUND_HALF_UP))


def _short(value: object) -> str:
    whole = storable(_as_json(value))
    return whole if len(whole) <= 40 else whole[:40] + "…"
