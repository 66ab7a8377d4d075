"""Finds the array of events in a file without reading all of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_HEAD, _TAIL, _MIDDLE = 1 << 22, 1 << 20, 1 << 20
_TOKEN = re.compile(r"[ \t\r\n,]*")
_BORDER = re.compile(rb'\}[ \t\r\n]*,(?=[ \t\r\n]*\{[ \t\r\n]*")')


@dataclass(frozen=True)
class Extent:
    """The array is at bytes `start` to `end` of the file, brackets included; `header` has the keys around it."""

    start: int
    end: int
    header: dict[str, object]


def find_extent(path: Path) -> Extent | None:
    """The array of events, or None if it cannot be found quickly: damage, or large keys around it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
    try:
        found = _start(head)
        after = None if found is None else _end(tail, bare=found[1] is None)
    except (UnicodeDecodeError, ValueError, RecursionError):
        return None
    if found is None or after is None:
        return None
    end = size - after[0]
    return Extent(found[0], end, {**(found[1] or {}), **after[1]}) if end > found[0] else None


def borders(path: Path, extent: Extent, size: int) -> list[int]:
    """Positions of commas between two events, about every `size` bytes; fewer if none is found.

    A comma may lie within an event after all; then neither side of it is JSON.
    """
    found: list[int] = []
    with path.open("rb") as file:
        for at in range(extent.start + size, extent.end - size // 2, size):
            file.seek(at)
            border = _BORDER.search(file.read(min(_MIDDLE, extent.end - at)))
            if border is not None:
                found.append(at + border.end() - 1)
    return found


def _start(head: bytes) -> tuple[int, dict[str, object] | None] | None:
    """The offset of the array and the keys before it, which are None for a bare array."""
    # The last character may be cut.
    text = head.decode("utf-8", "strict" if len(head) < _HEAD else "ignore")
    at = _skip(text, 0)
    if text[at : at + 1] == "[":
        return len(text[:at].encode()), None
    if text[at : at + 1] != "{":
        return None
    decoder, keys = json.JSONDecoder(), dict[str, object]()
    at = _skip(text, at + 1)
    while text[at : at + 1] == '"':
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            return None
        at = _skip(text, at + 1)
        if key == "traceEvents":
            return (len(text[:at].encode()), keys) if text[at : at + 1] == "[" else None
        keys[key], at = decoder.raw_decode(text, at)
        at = _skip(text, at)
    return None


def _end(tail: bytes, bare: bool) -> tuple[int, dict[str, object]] | None:
    """The number of bytes after the array, and the keys in them.

    It ends at the first bracket after which only the rest of the object stands. After a bracket within an event
    more would have to be closed than was opened; after one within a string, a quote would stay open.
    """
    if bare:
        rest = tail.rstrip(b" \t\r\n")
        return (len(tail) - len(rest), {}) if rest.endswith(b"]") else None
    # Keys after the array are few and short, so the search from the end is bounded.
    best, at = None, len(tail)
    for _ in range(300):
        at = tail.rfind(b"]", 0, at)
        if at < 0:
            break
        rest = tail[at + 1 :].lstrip(b" \t\r\n,")
        try:
            best = len(tail) - at - 1, json.loads(b"{" + rest)
        except ValueError:
            continue
    return best


def _skip(text: str, at: int) -> int:
    match = _TOKEN.match(text, at)
    assert match is not None
    return match.end()
