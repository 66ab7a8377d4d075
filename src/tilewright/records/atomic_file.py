"""Writing a file in one step."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.records.errors import StoreError, with_advice


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace the file at `path` by `text` in one step: safe against interruption and concurrent writers."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_document(out: Path, text: str, what: str) -> Path:
    """Write `text` to `out`, which the user named, and make its folder; returns `out`.

    `what` names the document in error messages. Raises StoreError if `out` cannot be written.
    """
    with writing(out, what):
        write_atomically(out, text, mode=0o644)
    return out


def ensure_writable(out: Path, what: str) -> None:
    """Raise StoreError if `write_document` could not write `out`: called before the work that fills it."""
    with writing(out, what):
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=out.parent):
            pass


@contextmanager
def writing(out: Path, what: str) -> Iterator[None]:
    """Make the folder of `out`; an OSError becomes a StoreError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StoreError(with_advice(f"cannot write the {what} {out}", error)) from error
