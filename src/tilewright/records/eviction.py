"""The size limit of the disk cache: above it, the entries that were used least recently are removed.

A process checks the size when it writes its first entry.

used     an entry's modification time: `touch` renews it at each hit
exempt   what was used in the last minute, which a process may be about to load
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from tilewright.records.errors import CacheError

VARIABLE = "TILEWRIGHT_CACHE_LIMIT"
DEFAULT = 4 * 2**30
"""Bytes."""
LOW_WATER = 0.9
"""Entries are removed until they take this share of the limit."""
RECENT_S = 60.0
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_trimmed: set[Path] = set()
"""Caches that this process has brought within the limit."""


def limit() -> int | None:
    """Bytes that the cache may take; None: any number. Raises CacheError if the variable is no size."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return DEFAULT
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.strip().upper())
    if match is None:
        raise CacheError(f"{VARIABLE} is {text!r}; give bytes, or a number with K, M, G or T (0: no limit)")
    return int(match[1]) * _UNITS[match[2]] or None


def touch(path: Path) -> None:
    """Mark an entry as used now. A cache that cannot be written stays as it is."""
    with suppress(OSError):
        os.utime(path)


def trim(folder: Path, most: int | None) -> None:
    """Bring the cache in `folder` within `most` bytes, once a process."""
    if most is None or folder in _trimmed:
        return
    _trimmed.add(folder)
    entries = []
    for path in folder.glob("??/[!.]*"):
        # Other processes remove entries too.
        with suppress(FileNotFoundError):
            status = path.stat()
            entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    wanted = most * LOW_WATER if total > most else total
    recent = time.time() - RECENT_S
    for used, size, path in sorted(entries):
        if total <= wanted or used > recent:
            return
        with suppress(FileNotFoundError):
            path.unlink()
        total -= size
