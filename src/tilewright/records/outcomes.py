"""Outcomes of races, kept on disk under a key of what was raced and where; every choice by measurement is here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tilewright.records import cache, eviction
from tilewright.records.errors import CacheError
from tilewright.records.home import cache_dir

SUFFIX = ".race.json"
CLEAR = 0.98
"""Another implementation wins if its time is below this share of the first's, so that noise decides nothing."""
_unsaved: dict[str, Outcome] = {}
"""Outcomes that could not be written: this process follows them, the next one will race again."""


_looked_up: ContextVar[dict[str, Outcome | None] | None] = ContextVar("tilewright_outcomes_looked_up", default=None)


@dataclass(frozen=True)
class Outcome:
    """Microseconds by implementation, the preferred one first. One that is missing gave wrong results."""

    times_us: Mapping[str, float]

    @property
    def fastest(self) -> str:
        """The first implementation, unless another clearly wins.

        >>> Outcome({"fused": 10.0, "apart": 9.9}).fastest, Outcome({"fused": 10.0, "apart": 9.0}).fastest
        ('fused', 'apart')
        """
        first, best = next(iter(self.times_us)), min(self.times_us, key=self.times_us.__getitem__)
        return best if self.times_us[best] < CLEAR * self.times_us[first] else first

    def us(self, name: str) -> float:
        """Microseconds of the implementation whose name begins so; infinite if its results were wrong."""
        return next((us for known, us in self.times_us.items() if known.startswith(name)), math.inf)


def all_kept() -> dict[str, Outcome]:
    """All outcomes on disk, by key."""
    keys = sorted(path.name.removesuffix(SUFFIX) for path in cache_dir().glob(f"??/*{SUFFIX}"))
    return {key: outcome for key in keys if (outcome := _read(key)) is not None}


@contextmanager
def recording() -> Iterator[dict[str, Outcome | None]]:
    """Collect, by key, the outcomes looked up in this block: decisions made there are valid as long as these are."""
    found: dict[str, Outcome | None] = {}
    token = _looked_up.set(found)
    try:
        yield found
    finally:
        _looked_up.reset(token)


def lookup(key: str) -> Outcome | None:
    """The outcome of an earlier race, in this process or another; None where there was none, or its file is damaged."""
    outcome = _read(key)
    eviction.touch(cache.entry(key, SUFFIX))
    if (found := _looked_up.get()) is not None:
        found[key] = outcome
    return outcome


def _read(key: str) -> Outcome | None:
    path = cache.entry(key, SUFFIX)
    try:
        times = {str(name): float(us) for name, us in json.loads(path.read_text()).items()}
        if not times or not all(math.isfinite(us) and us > 0 for us in times.values()):
            raise ValueError(times)
    except OSError:
        return _unsaved.get(key)
    except (ValueError, TypeError, AttributeError):
        cache.discard(path)
        return None
    return Outcome(times)


def keep(key: str, outcome: Outcome) -> None:
    try:
        cache.build(key, SUFFIX, lambda path: path.write_text(json.dumps(dict(outcome.times_us))))
    except CacheError:
        _unsaved[key] = outcome
