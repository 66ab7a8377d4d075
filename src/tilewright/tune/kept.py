"""Outcomes of races, kept on disk by a key that says what was raced and where."""

from __future__ import annotations

import json
from dataclasses import asdict

from tilewright.records import cache
from tilewright.records.errors import CacheError
from tilewright.tune.trial import Trial

SUFFIX = ".trial.json"
_unsaved: dict[str, Trial] = {}
"""Trials that could not be written: this process follows them, the next one will race again."""


def kept(key: str) -> Trial | None:
    """The outcome of an earlier race, in this process or another."""
    path = cache.entry(key, SUFFIX)
    try:
        found = json.loads(path.read_text())
        return Trial(float(found["fused_us"]), float(found["separate_us"]))
    except OSError:
        return _unsaved.get(key)
    except (ValueError, TypeError, KeyError):
        cache.discard(path)
        return None


def keep(key: str, trial: Trial) -> None:
    try:
        cache.build(key, SUFFIX, lambda path: path.write_text(json.dumps(asdict(trial))))
    except CacheError:
        _unsaved[key] = trial
