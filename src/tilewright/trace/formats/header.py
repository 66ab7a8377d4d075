"""The metadata of a trace in Chrome's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tilewright.store.rows import storable
from tilewright.trace.events.staging import Header

# Kineto's name of the devices' limits until 2022, and the name since.
_RENAMED = {"computeProperties": "deviceProperties"}


def header_of(values: Mapping[str, object], notes: Sequence[str]) -> Header:
    """The header from the keys around `traceEvents`, where Kineto writes its clock's zero and the rank."""
    base, distributed = values.get("baseTimeNanoseconds"), values.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rows = [
        (storable(_RENAMED.get(key, key)), storable(value if isinstance(value, str) else json.dumps(value)))
        for key, value in values.items()
    ]
    return Header(
        format="chrome",
        base_ns=_whole(base) or 0,
        rank=_whole(distributed.get("rank")),
        world_size=_whole(distributed.get("world_size")),
        metadata=tuple(rows),
        notes=tuple(notes),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62 else None
