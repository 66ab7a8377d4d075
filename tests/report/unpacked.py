"""What a page's packed columns say, read back without the code that wrote them."""

from __future__ import annotations

from base64 import b64decode
from itertools import accumulate
from typing import Any


def unpack(text: str) -> list[int]:
    """Integers in LEB128 in base64."""
    values, value, shift = [], 0, 0
    for byte in b64decode(text, validate=True):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    assert shift == 0, "the last number has no end"
    return values


def unzigzag(values: list[int]) -> list[int]:
    return [-(value + 1) // 2 if value % 2 else value // 2 for value in values]


def slices_of(packed: dict[str, Any]) -> list[dict[str, Any]]:
    """Every drawn slice of a page's timeline, in the order of the page's own numbers for them."""
    found: dict[int, dict[str, Any]] = {}
    for number, track in enumerate(packed["tracks"]):
        columns = {key: unpack(track[key]) for key in ("ts", "dur", "label", "args", "count")}
        columns["id"] = list(accumulate(unzigzag(unpack(track["id"]))))
        place = 0
        for depth, size in track["rows"]:
            starts = list(accumulate(columns["ts"][place : place + size]))
            for i in range(size):
                row = {key: values[place + i] for key, values in columns.items()}
                name, category, kind = packed["names"][row["label"]]
                found[track["first"] + place + i] = row | {
                    "ts": int(packed["origin"]) + starts[i], "dur": row["dur"] - 1, "depth": depth, "track": number,
                    "name": name, "category": category, "kind": kind,
                }  # fmt: skip
            place += size
        assert place == len(columns["ts"])
    assert sorted(found) == list(range(len(found)))
    return [found[number] for number in range(len(found))]
