"""The bytes of a trace file in pieces, decompressed if necessary."""

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
# Traces compress by a factor of 10 to 30; a far larger factor is a decompression bomb.
_BOMB_RATIO, _BOMB_BYTES = 150, 1 << 28


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Convert errors of the operating system and of decompression to TraceError."""
    try:
        yield
    except zlib.error as error:
        raise TraceError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


def too_large(size: int, packed: int) -> bool:
    """Whether so many packed bytes give more than those of a trace would."""
    return size > _BOMB_BYTES and size > _BOMB_RATIO * packed


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == _GZIP


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The file itself, or a temporary file with the content of a compressed one."""
    if not is_gzip(path):
        yield path
        return
    with NamedTemporaryFile(prefix="tilewright-", suffix=".trace") as plain:
        for piece in pieces(path):
            plain.write(piece)
        plain.flush()
        yield Path(plain.name)


def pieces(path: Path) -> Iterator[bytes]:
    """The file's decompressed content; the last piece may end anywhere if a compressed file was truncated.

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
    """With zlib directly, because `gzip` discards the decompressed part of a truncated file."""
    unpacker, size = zlib.decompressobj(wbits=31), 0
    while chunk := packed.read(_PACKED):
        while chunk:
            piece = unpacker.decompress(chunk, PIECE)
            chunk = unpacker.unconsumed_tail
            if unpacker.eof:
                # Another member may follow, or padding zeros.
                chunk = unpacker.unused_data.lstrip(b"\0")
                unpacker = zlib.decompressobj(wbits=31)
            size += len(piece)
            if too_large(size, packed.tell()):
                raise TraceError(
                    f"{path} decompresses to more than {_BOMB_RATIO} times its size; no trace does, so it is not read"
                )
            if piece:
                yield piece
    if rest := unpacker.flush():
        yield rest
