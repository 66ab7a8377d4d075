"""Perfetto's own format as a row of packets, read one after another.

A trace is a Protocol Buffers message whose only field, 1, is repeated: the packets. So their borders are known
without reading what is in them, and a damaged packet costs only itself.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path

from tilewright.records.errors import TraceError

_PACKET = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# A packet holds an event, or a page of compressed ones. What claims more is damage, or made to fill the memory.
_LARGEST = 1 << 26
_WIDEST_VARINT = 10


class Damaged(Exception):
    """No packet can begin here, or what one holds cannot be unpacked."""


class _Cut(Exception):
    """The bytes end within a packet."""


def is_perfetto(plain: Path) -> bool:
    """Whether the unpacked file begins as a packet does; a newline before JSON is the same byte."""
    with plain.open("rb") as file:
        start = file.read(256)
    return start.startswith(b"\n") and start.lstrip(b" \t\r\n")[:1] not in (b"", b"{", b"[")


class Packets:
    """The packets of the unpacked file `plain`, which errors call `path`.

    Attributes:
        cut_off: the file ends within a packet, which is left out.
    """

    def __init__(self, plain: Path, path: Path) -> None:
        self._plain, self._path = plain, path
        self.cut_off = False

    def __iter__(self) -> Iterator[bytes]:
        """Raises TraceError where no packet can begin."""
        with self._plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                yield from _split(content)
            except _Cut:
                self.cut_off = True
            except Damaged as damage:
                raise TraceError(f"{self._path} is no trace: {damage}") from damage


def unpacked(compressed: bytes) -> Iterator[bytes]:
    """The packets within a packet that holds others, compressed; raises Damaged."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(compressed, _LARGEST)
    except zlib.error as error:
        raise Damaged(str(error)) from error
    if unpacker.unconsumed_tail:
        raise Damaged("it unpacks to more than any packet holds")
    try:
        yield from _split(content)
    except _Cut as cut:
        raise Damaged("it ends within a packet") from cut


def _split(content: bytes | mmap.mmap) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        begun = at
        tag, at = _varint(content, at)
        if tag & 7 == _BYTES:
            size, at = _varint(content, at)
        elif tag & 7 in (_VARINT, _FIXED32, _FIXED64) and tag >> 3 != _PACKET:
            _, at = _varint(content, at) if tag & 7 == _VARINT else (0, at)
            size = {_VARINT: 0, _FIXED32: 4, _FIXED64: 8}[tag & 7]
        else:
            raise Damaged(f"no packet begins at byte {begun:,}")
        if size > _LARGEST:
            raise Damaged(f"the packet at byte {begun:,} claims {size:,} bytes")
        if at + size > len(content):
            raise _Cut
        if tag >> 3 == _PACKET:
            yield content[at : at + size]
        at += size


def _varint(content: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """The number that begins at `at`, seven bits a byte, and where it ends."""
    value = 0
    for index in range(_WIDEST_VARINT):
        if at + index >= len(content):
            raise _Cut
        byte = content[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise Damaged(f"no number ends within {_WIDEST_VARINT} bytes of byte {at:,}")
