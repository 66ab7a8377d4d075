"""The folders of runs, measured ceilings and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Runs and measured ceilings: `$TILEWRIGHT_HOME`, else `~/.local/share/tilewright`."""
    return Path(os.environ.get("TILEWRIGHT_HOME") or "~/.local/share/tilewright").expanduser()


def cache_dir() -> Path:
    """Compiled kernels: `$TILEWRIGHT_CACHE`, else `~/.cache/tilewright`."""
    return Path(os.environ.get("TILEWRIGHT_CACHE") or "~/.cache/tilewright").expanduser()
