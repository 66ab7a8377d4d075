"""This machine's measurements as one file, which another machine of its kind uses in place of measuring.

The file has the outcomes of races (`records/outcomes.py`), whose keys name the device and the versions that they hold
for, and the ceilings and kernel times of its devices (`hardware/ceilings.py`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.hardware.ceilings import machine_dir
from tilewright.records import outcomes
from tilewright.records.atomic_file import write_atomically, write_document
from tilewright.records.errors import CacheError, UsageError
from tilewright.records.outcomes import Outcome

FORMAT = 1
KEY = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*\.json")
"""A file of ceilings: no path, no leading dot."""


@dataclass(frozen=True)
class Moved:
    """How many outcomes of races, and how many files of ceilings and kernel times, went into a file or came from it."""

    outcomes: int
    machines: int


def export_plan(path: Path) -> Moved:
    """Write what was measured here. Raises StoreError where the file cannot be written."""
    races = {key: dict(outcome.times_us) for key, outcome in outcomes.all_kept().items()}
    machines = {
        file.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(machine_dir().glob("*.json"))
    }
    text = json.dumps({"format": FORMAT, "outcomes": races, "machines": machines}, indent=1, ensure_ascii=False)
    write_document(path, text + "\n", "plan")
    return Moved(len(races), len(machines))


def import_plan(path: Path) -> Moved:
    """Take over what this machine has not measured itself; it follows the rest of the file from now on.

    Raises UsageError for a file that is no plan (nothing is taken over), CacheError where nothing can be kept.
    """
    races, machines = _read(path)
    missing = {key: outcome for key, outcome in races.items() if outcomes.lookup(key) is None}
    for key, outcome in missing.items():
        outcomes.keep(key, outcome)
    new = {name: content for name, content in machines.items() if not (machine_dir() / name).exists()}
    for name, content in new.items():
        _write(machine_dir() / name, json.dumps(content, indent=1))
    return Moved(len(missing), len(new))


def _read(path: Path) -> tuple[dict[str, Outcome], dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error
    try:
        found = json.loads(text)
        races = {str(key): {str(n): float(us) for n, us in times.items()} for key, times in found["outcomes"].items()}
        machines = dict(found["machines"])
        sound = found["format"] == FORMAT and all(times and min(times.values()) > 0 for times in races.values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is no plan that `tilewright plan export` wrote") from error
    if not sound or not all(map(KEY.fullmatch, races)) or not all(map(NAME.fullmatch, machines)):
        raise UsageError(f"{path} is no plan that this version of `tilewright plan export` wrote")
    return {key: Outcome(times) for key, times in races.items()}, machines


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + "\n")
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from error
