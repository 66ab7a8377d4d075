"""The folders of runs, measured ceilings and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright.records.errors import CacheError, StoreError, TilewrightError


def home() -> Path:
    """Runs and measured ceilings: `$TILEWRIGHT_HOME`, else `~/.local/share/tilewright`; StoreError without a `~`."""
    return _folder("TILEWRIGHT_HOME", "~/.local/share/tilewright", StoreError)


def cache_dir() -> Path:
    """Compiled kernels: `$TILEWRIGHT_CACHE`, else `~/.cache/tilewright`; CacheError without a `~`."""
    return _folder("TILEWRIGHT_CACHE", "~/.cache/tilewright", CacheError)


def _folder(variable: str, default: str, failure: type[TilewrightError]) -> Path:
    path = os.environ.get(variable) or default
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise failure(f"{path} has no home folder here; set {variable} to a folder that you can write") from error
