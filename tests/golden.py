"""Texts held in files that a person can read."""

import difflib
import os
from pathlib import Path


def check(path: Path, found: str) -> None:
    """The file holds `found`; `TILEWRIGHT_WRITE_GOLDEN=1` writes it down."""
    if os.environ.get("TILEWRIGHT_WRITE_GOLDEN") == "1":
        path.write_text(found)
    wanted = path.read_text()
    lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), path.name, "found", lineterm="")
    assert found == wanted, "\n".join(lines)
