"""The bytes of a trace file, unpacked where it is packed, a piece at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from tilewright.records.errors import TraceError

PIECE = 1 << 22
_PACKED = 1 << 18
_GZIP = b"\x1f\x8b"
# Traces pack to between a tenth and a thirtieth. What unpacks to far more is made to fill a disk.
_BOMB_RATIO, _BOMB_BYTES = 150, 1 << 28


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """What the operating system and the unpacker object to, as a TraceError."""
    try:
        yield
    except zlib.error as error:
        raise TraceError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == _GZIP


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The file itself, or, of a packed one, its content in a temporary file."""
    if not is_gzip(path):
        yield path
        return
    with NamedTemporaryFile(prefix="tilewright-", suffix=".trace") as plain:
        for piece in pieces(path):
            plain.write(piece)
        plain.flush()
        yield Path(plain.name)


def pieces(path: Path) -> Iterator[bytes]:
    """The file's content, unpacked; the last piece may end anywhere if a packed file was cut off.

    Raises:
        TraceError: it unpacks to far more than a trace would.
        OSError, zlib.error: it cannot be read, or is damaged.
    """
    if is_gzip(path):
        with path.open("rb") as packed:
            yield from _unpacked(path, packed)
    else:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece


def _unpacked(path: Path, packed: BinaryIO) -> Iterator[bytes]:
    """By hand, because `gzip` throws away what it unpacked of a file that was cut off."""
    unpacker, size = zlib.decompressobj(wbits=31), 0
    while chunk := packed.read(_PACKED):
        while chunk:
            piece = unpacker.decompress(chunk, PIECE)
            chunk = unpacker.unconsumed_tail
            if unpacker.eof:
                # Another member may follow, or zeros that fill up a block.
                chunk = unpacker.unused_data.lstrip(b"\0")
                unpacker = zlib.decompressobj(wbits=31)
            size += len(piece)
            if size > _BOMB_BYTES and size > _BOMB_RATIO * packed.tell():
                raise TraceError(
                    f"{path} unpacks to more than {_BOMB_RATIO} times its size; no trace does, so it is not read"
                )
            if piece:
                yield piece
    if rest := unpacker.flush():
        yield rest
