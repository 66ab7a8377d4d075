"""Splits Perfetto's own format into packets.

A trace is a Protocol Buffers message whose only field, 1, is the repeated packet. So packets can be split without
decoding them, and a damaged packet does not affect others.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path

from tilewright.records.errors import TraceError

_PACKET = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# A packet has an event, or a page of compressed ones. A larger size means damage or an attack on memory.
_LARGEST = 1 << 26
_WIDEST_VARINT = 10


class DamagedPacket(Exception):
    """No packet begins here, or its content cannot be decompressed."""


class _Cut(Exception):
    """The bytes end within a packet."""


def is_perfetto(plain: Path) -> bool:
    """Whether the decompressed file begins with a packet; a newline before JSON has the same first byte."""
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
        """Raises TraceError at a byte that cannot begin a packet."""
        with self._plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                yield from _split(content)
            except _Cut:
                self.cut_off = True
            except DamagedPacket as damage:
                raise TraceError(f"{self._path} is not a trace: {damage}") from damage


def unpacked(compressed: bytes) -> Iterator[bytes]:
    """The packets inside a packet of compressed packets; raises DamagedPacket."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(compressed, _LARGEST)
    except zlib.error as error:
        raise DamagedPacket(str(error)) from error
    if unpacker.unconsumed_tail:
        raise DamagedPacket("it unpacks to more than any packet holds")
    try:
        yield from _split(content)
    except _Cut as cut:
        raise DamagedPacket("it ends within a packet") from cut


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
            raise DamagedPacket(f"no packet begins at byte {begun:,}")
        if size > _LARGEST:
            raise DamagedPacket(f"the packet at byte {begun:,} claims {size:,} bytes")
        if at + size > len(content):
            raise _Cut
        if tag >> 3 == _PACKET:
            yield content[at : at + size]
        at += size


def _varint(content: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """The varint at `at` (seven bits per byte), and its end."""
    value = 0
    for index in range(_WIDEST_VARINT):
        if at + index >= len(content):
            raise _Cut
        byte = content[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise DamagedPacket(f"no number ends within {_WIDEST_VARINT} bytes of byte {at:,}")
