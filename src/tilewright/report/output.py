"""Files that come into being whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright.records.errors import StoreError


def write_whole(out: Path, text: str, what: str) -> Path:
    """Write `text` to `out`, replacing what is there in one step; returns `out`.

    Raises:
        StoreError: `out`, which the message calls a `what`, cannot be written.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write the {what} {out}: {error.strerror}") from error
    return out
