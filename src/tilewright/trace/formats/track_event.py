"""Decodes one track event of Perfetto: its phase, names and arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.trace.formats.exact import InvalidEvent, arguments

_PHASES = {1: "B", 2: "E", 3: "i"}
# Phases of legacy events, the letters of Chrome's JSON.
_OLDER_PHASES = frozenset("BEXIiben")
# Fields that become columns. All others become arguments under their own name.
_READ = frozenset(
    ("category_iids", "categories", "name_iid", "name", "type", "track_uuid", "counter_value", "double_counter_value",
     "extra_counter_track_uuids", "extra_counter_values", "extra_double_counter_track_uuids",
     "extra_double_counter_values", "flow_ids_old", "flow_ids", "terminating_flow_ids_old", "terminating_flow_ids",
     "debug_annotations", "legacy_event")
)  # fmt: skip


Fields = Mapping[str, Any]
"""The fields of an event, by name."""


def phase_of(event: Fields) -> tuple[str, int | None, str | None]:
    """The phase in the letters of Chrome's JSON, the duration in nanoseconds, and the id; raises InvalidEvent."""
    kind, older = event.get("type", 0), event.get("legacy_event")
    if kind in _PHASES:
        return _PHASES[kind], None, None
    if older is None:
        raise InvalidEvent(f"an event of type {kind}")
    phase = chr(older.phase) if 0 < older.phase < 128 else "?"
    if phase not in _OLDER_PHASES:
        raise InvalidEvent(f"a legacy event with phase {phase}")
    if phase == "X" and not 0 <= older.duration_us < 2**52:
        raise InvalidEvent("duration is out of range")
    which = older.WhichOneof("id")
    identity = None if which is None else f"{decoded(older.id_scope)}:{getattr(older, which)}"
    return phase, older.duration_us * 1000 if phase == "X" else None, identity


@dataclass
class Names:
    """The interned strings of a writer, by number."""

    events: dict[int, str] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    annotations: dict[int, str] = field(default_factory=dict)
    strings: dict[int, str] = field(default_factory=dict)

    def add(self, data: Any) -> None:
        for table, entries in (
            (self.events, data.event_names),
            (self.categories, data.event_categories),
            (self.annotations, data.debug_annotation_names),
        ):
            table.update((entry.iid, decoded(entry.name)) for entry in entries)
        self.strings.update((entry.iid, decoded(entry.str)) for entry in data.debug_annotation_string_values)

    def event_name(self, event: Fields) -> str | None:
        """Raises InvalidEvent for an undefined number."""
        iid = event.get("name_iid") or ("legacy_event" in event and event["legacy_event"].name_iid)
        return _looked_up(self.events, iid) if iid else decoded(event.get("name", "")) or None

    def category(self, event: Fields) -> str | None:
        """The categories, joined by commas as in Chrome's JSON."""
        found = [decoded(name) for name in event.get("categories", ())]
        found += [_looked_up(self.categories, iid) for iid in event.get("category_iids", ())]
        return ",".join(found) or None

    def annotation(self, one: Any) -> str:
        return _looked_up(self.annotations, one.name_iid) if one.name_iid else decoded(one.name)

    def string(self, iid: int) -> str:
        return _looked_up(self.strings, iid)


def arguments_of(event: Fields, names: Names) -> str | None:
    """The annotations by name, and the event's other fields, as JSON; raises InvalidEvent."""
    found = {names.annotation(one): _value(one, names) for one in event.get("debug_annotations", ())}
    for name, value in event.items():
        if name not in _READ:
            found.setdefault(name, _plain(value))
    return arguments(found) if found else None


def _value(one: Any, names: Names) -> object:
    if one.dict_entries:
        return {names.annotation(entry): _value(entry, names) for entry in one.dict_entries}
    if one.array_values:
        return [_value(entry, names) for entry in one.array_values]
    kind = one.WhichOneof("value")
    if kind is None:
        return None
    value = getattr(one, kind)
    if kind == "string_value_iid":
        return names.string(value)
    if kind == "legacy_json_value":
        return _json(decoded(value))
    return _plain(value)


def _plain(value: Any) -> object:
    """A value of a message, converted for JSON."""
    if isinstance(value, (bytes, str)):
        return decoded(value)
    if isinstance(value, float):
        # JSON has no NaN and no infinities.
        return value if value - value == 0 else str(value)
    return value if isinstance(value, (bool, int)) else str(value).strip()


def _json(text: str) -> object:
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def _looked_up(table: dict[int, str], iid: int) -> str:
    try:
        return table[iid]
    except KeyError:
        raise InvalidEvent(f"name number {iid} is undefined") from None


def decoded(text: str | bytes) -> str:
    """A string of a message; invalid UTF-8 comes as bytes."""
    return text if isinstance(text, str) else text.decode("utf-8", "replace")
