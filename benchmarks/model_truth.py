"""Results of a model's entrants beside float64, and what a row says where they could not be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tilewright.measure.truth.contract import compare
from tilewright.records.measurement import Verified

NO_DROPOUT = "compared with float64 without dropout"


@dataclass(frozen=True)
class Compared:
    """The tensor of a result that is worst beside float64, and what is to be said of the comparison."""

    worst: Verified | None
    note: str = ""

    @property
    def said(self) -> str:
        outside = f"{self.worst.tensor} is outside the numbers contract" if self.worst and not self.worst.ok else ""
        return "; ".join(filter(None, (self.note, outside)))


def compared(
    results: Callable[[], Mapping[str, Tensor]], eager: Mapping[str, Tensor], truth: Mapping[str, Tensor]
) -> Compared:
    """The results of an entrant beside eager's and those of float64."""
    try:
        rows = [compare(result, eager[name], truth[name], tensor=name) for name, result in results().items()]
    # One entrant that fails here leaves the others their errors.
    except Exception as error:
        return Compared(None, not_compared(error))
    if not rows:
        return Compared(None, "not compared with float64: no result is of a floating-point dtype")
    return Compared(max(rows, key=lambda row: (not row.ok, row.error / (row.bound or 1.0))))


def not_compared(error: Exception) -> str:
    """What the row of a result says that float64 was not there to compare with."""
    lines = str(error).strip().splitlines()
    return f"not compared with float64: {type(error).__name__}: {lines[0][:150] if lines else ''}"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """In this block every probability of dropout that `model` or a configuration of it holds is 0."""
    holders: dict[int, Any] = {id(part): part for part in model.modules()}
    holders |= {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    before = [
        (vars(holder), name, value)
        for holder in holders.values()
        for name, value in vars(holder).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(holder).__name__))
    ]
    try:
        for fields, name, _ in before:
            fields[name] = 0.0
        yield
    finally:
        for fields, name, value in before:
            fields[name] = value
