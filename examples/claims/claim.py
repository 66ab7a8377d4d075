"""A claim, how it is checked, and the few rules by which a verdict follows from computed values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from tilewright.report.quantity import duration

if TYPE_CHECKING:
    from tilewright.measure.timing.benchmark import Timing

    from .lab import Lab

Verdict = Literal[
    "reproduced", "refuted", "direction holds", "direction does not hold", "undecided", "not here", "failed"
]
TOLERANCE = 0.2
"""Figures closer than this, relative to the document's, agree."""


@dataclass(frozen=True)
class Finding:
    """The computed or measured result, in words, and the verdict that follows."""

    ours: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """One claim of a document, in our words."""

    id: str
    text: str
    theirs: str
    """The document's figure; "–" where it gives none."""
    check: Callable[[Lab], Finding]
    why: str
    """The deciding argument, true whatever the verdict."""
    needs: Literal["", "cpu", "cuda"] = ""
    """The device without which it cannot be checked."""


@dataclass(frozen=True)
class Document:
    """A document and its claims."""

    title: str
    machine: str
    claims: Sequence[Claim]


def holds(truth: bool, ours: str) -> Finding:
    """A statement about values computed in this run: reproduced if true."""
    return Finding(ours, "reproduced" if truth else "refuted")


def equal(ours: object, theirs: object) -> Finding:
    """A count, name or shape: reproduced if equal."""
    return holds(ours == theirs, _written(ours))


def close(ours: float, theirs: float, unit: str = "", within: float = TOLERANCE) -> Finding:
    """A ratio, share or derived figure: reproduced within 20 % of the document's."""
    return holds(abs(ours - theirs) <= within * abs(theirs), f"{ours:.4g}{unit}")


def elsewhere(direction: bool, ours: str) -> Finding:
    """A figure of another machine: only its direction, an order or a sign, can hold here."""
    return Finding(ours, "direction holds" if direction else "direction does not hold")


def slower(times: dict[str, Timing], *names: str) -> Finding:
    """Each of `names` takes longer than the next; undecided where neighbours' 20th to 80th percentiles overlap."""
    ours = ", ".join(f"{name} {duration(times[name].median_us)}" for name in names)
    pairs = [(times[one], times[other]) for one, other in pairwise(names)]
    if any(one.p80_us < other.p20_us for one, other in pairs):
        return Finding(ours, "refuted")
    apart = all(one.p20_us > other.p80_us for one, other in pairs)
    return Finding(ours, "reproduced" if apart else "undecided")


def percent(share: float) -> str:
    """
    >>> percent(0.2955029)
    '29.6 %'
    """
    return f"{100 * share:.3g} %"


def _written(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_written(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_written, value)) or "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
