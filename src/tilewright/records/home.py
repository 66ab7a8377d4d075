"""Where tilewright keeps what outlives a process."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Runs and measured ceilings: `$TILEWRIGHT_HOME`, else `~/.local/share/tilewright`."""
    return Path(os.environ.get("TILEWRIGHT_HOME") or Path.home() / ".local/share/tilewright")


def cache_dir() -> Path:
    """Compiled kernels: `$TILEWRIGHT_CACHE`, else `~/.cache/tilewright`."""
    return Path(os.environ.get("TILEWRIGHT_CACHE") or Path.home() / ".cache/tilewright")
