"""The size limit of the disk cache: above it, the entries that were used least recently are removed.

used     an entry's modification time: `touch` renews it at each hit
exempt   outcomes of races, which are small and cost a measurement, and what was used in the last minute, which
         a process may be about to load
"""

from __future__ import annotations

import fcntl
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
CHECKED_EACH = 1 / 64
"""A process adds up the cache after its first entry, and again after it has written this share of the limit."""
RECENT_S = 60.0
EXEMPT = ".race.json"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_unchecked: dict[Path, int] = {}
"""Bytes that this process has written to a cache since it last added it up."""


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


def note_written(folder: Path, path: Path, most: int | None) -> None:
    """Keep the cache in `folder` within `most` bytes after `path` was written."""
    if most is None:
        return
    written = _unchecked.get(folder)
    total = (written or 0) + path.stat().st_size
    if written is None or total >= most * CHECKED_EACH:
        _evict(folder, most)
        total = 0
    _unchecked[folder] = total


def _evict(folder: Path, most: int) -> None:
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        # Another process that holds the lock evicts already.
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_oldest(folder, most)
    finally:
        os.close(handle)


def _remove_oldest(folder: Path, most: int) -> None:
    entries = []
    for path in folder.glob("??/*"):
        # Other processes remove entries too.
        with suppress(FileNotFoundError):
            status = path.stat()
            if not path.name.startswith("."):
                entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    if total <= most:
        return
    recent = time.time() - RECENT_S
    for used, size, path in sorted(entries):
        if total <= most * LOW_WATER or used > recent:
            return
        if not path.name.endswith(EXEMPT):
            with suppress(FileNotFoundError):
                path.unlink()
            total -= size
