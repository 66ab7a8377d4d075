"""Atomic writing of documents."""

from __future__ import annotations

from pathlib import Path

from tilewright.records.atomic_file import write_atomically
from tilewright.records.errors import StoreError


def write_document(out: Path, text: str, what: str) -> Path:
    """Write `text` to `out` atomically; returns `out`. `what` names the document in error messages.

    Raises:
        StoreError: `out` cannot be written.
    """
    try:
        write_atomically(out, text, mode=0o644)
    except OSError as error:
        raise StoreError(f"cannot write the {what} {out}: {error.strerror}") from error
    return out
