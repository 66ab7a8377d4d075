"""Reads Chrome's trace format with Python's JSON, one event at a time, with memory bounded by the largest event."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tilewright.records.errors import TraceError
from tilewright.trace.formats.source import pieces

_BLANK = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")
# A longer event is damage, such as a missing closing quote.
_LARGEST = 1 << 26
# How Kineto begins each event. It does not escape every name of a function, a file or a module.
_KINETO_EVENT = re.compile(r'\n[ \t]*\{[ \t\r]*\n[ \t]*"ph"')
_HALF_A_NUMBER = re.compile(r"-|\.|[eE][+-]?")
_WORDS = ("true", "false", "null", "NaN", "-Infinity", "Infinity")
_CUT = "the file ends early"


class Exact(float):
    """A number that keeps its text."""

    text: str

    def __new__(cls, text: str) -> Exact:
        number = super().__new__(cls, text)
        number.text = text
        return number


@dataclass(frozen=True)
class Damaged:
    """An event of Kineto's that is no JSON."""

    text: str
    why: str


class Scanner:
    """One pass over the unpacked file `plain`, which errors call `path`: an object with `traceEvents`, or a bare array.

    Control characters within strings are kept; bytes that are no UTF-8 become U+FFFD; NaN and infinities come
    as strings. A file may end early, as the format allows.

    Attributes:
        header: the other keys of the object, complete after the last event.
        notes: what was repaired.
        cut_off: the text of the last event, if the file ends within it.
    """

    def __init__(self, plain: Path, path: Path) -> None:
        self.path = path
        self.header: dict[str, object] = {}
        self.notes: list[str] = []
        self.cut_off: str | None = None
        self._decoder = json.JSONDecoder(strict=False, parse_float=Exact, parse_constant=str)
        self._pieces = _text(plain, self.notes)
        self._buffer = ""
        self._at = 0
        self._passed = 0

    def events(self) -> Iterator[object]:
        """Every element of the event array, of any type; of Kineto's events also those that are no JSON.

        Raises:
            TraceError: the file is empty, no JSON, or has no events.
        """
        start = self._next(_BLANK)
        if start == "":
            raise TraceError(f"{self.path} is empty")
        if start not in ("[", "{"):
            self._refuse("it begins with neither { nor [")
        self._at += 1
        try:
            yield from self._array() if start == "[" else self._object()
        except _NoJson as damage:
            self._at = damage.at
            self._refuse(damage.why)

    def _object(self) -> Iterator[object]:
        found = False
        try:
            while (token := self._next(_BETWEEN)) not in ("", "}"):
                key = self._value()
                if not isinstance(key, str) or self._next(_BLANK) != ":":
                    self._refuse("a name and a colon were expected")
                self._at += 1
                opening = self._next(_BLANK)
                if key == "traceEvents" and opening == "[":
                    self._at += 1
                    found = True
                    yield from self._array()
                else:
                    self.header[key] = self._value()
        except _Ends:
            token = ""
        if not found:
            raise TraceError(f"{self.path} is not a trace: it has no array traceEvents")
        if token == "" and _CUT not in self.notes:
            self.notes.append(_CUT)

    def _array(self) -> Iterator[object]:
        while (token := self._next(_BETWEEN)) != "]":
            if token == "":
                self.notes.append(_CUT)
                return
            start = self._at
            try:
                yield self._value()
            except _Ends:
                self.cut_off = self._buffer[start:]
                self._at = len(self._buffer)
            except _NoJson as damage:
                yield self._damaged(damage)
        self._at += 1

    def _value(self) -> object:
        """The JSON value that begins here; raises _Ends if the file ends within it."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                if not _may_go_on(error) or len(self._buffer) - self._at > _LARGEST:
                    raise _NoJson(error.msg, error.pos) from error
                if not self._more():
                    raise _Ends from error
            except RecursionError:
                self._refuse("an event is nested too deeply")
            except ValueError as error:  # an integer of more digits than Python converts
                self._refuse(str(error).partition(":")[0])
            else:
                if end == len(self._buffer) and self._more():
                    continue
                self._at = end
                return value

    def _damaged(self, damage: _NoJson) -> Damaged:
        """Go on where the next event of Kineto's begins; raises `damage` again if none does."""
        while not (found := _KINETO_EVENT.search(self._buffer, damage.at)):
            begin = self._at
            if len(self._buffer) - begin > _LARGEST or not self._more():
                raise damage
            damage.at -= begin
        text, self._at = self._buffer[self._at : found.start()], found.start()
        return Damaged(text, damage.why)

    def _next(self, skipped: re.Pattern[str]) -> str:
        """The next character after `skipped`, not consumed; empty at the end of the file."""
        while True:
            match = skipped.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read at least as much as is in the buffer, so that a long event is parsed only a few times."""
        left = self._buffer[self._at :]
        self._passed += self._at
        self._at = 0
        parts, size = [left], 0
        for piece in self._pieces:
            parts.append(piece)
            size += len(piece)
            if size > len(left):
                break
        self._buffer = "".join(parts)
        return size > 0

    def _refuse(self, why: str) -> NoReturn:
        raise TraceError(f"{self.path} is not a trace: {why}, at character {self._passed + self._at}")


def _may_go_on(error: json.JSONDecodeError) -> bool:
    """Whether more text could complete the value."""
    if error.msg.startswith("Unterminated string"):
        return True
    rest = error.doc[error.pos :]
    if error.msg.startswith("Invalid \\"):
        return len(rest) < len("\\uXXXX")
    return any(word.startswith(rest) for word in _WORDS) or _HALF_A_NUMBER.fullmatch(rest) is not None


class _NoJson(Exception):
    """What begins here is no JSON from the position `at` in the buffer on."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.why, self.at = why, at


class _Ends(Exception):
    """The file ends within a value."""


def _text(path: Path, notes: list[str]) -> Iterator[str]:
    decoder: codecs.IncrementalDecoder | None = None
    repaired = False
    for piece in pieces(path):
        if decoder is None:
            decoder = codecs.getincrementaldecoder(_encoding(piece))(errors="replace")
        text = decoder.decode(piece)
        if "\ufffd" in text and not repaired:
            repaired = True
            notes.append("invalid UTF-8 was replaced")
        yield text
    if decoder is not None and (rest := decoder.decode(b"", final=True)):
        yield rest


def _encoding(start: bytes) -> str:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig"
