"""A program as a run stores it: operators with their cost, regions, decisions, memory, fallbacks.

A dataclass is a row of the run database, which `store/rows.py` makes of them; field names are column names.
Counts are elements unless the name says bytes; times are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GraphName = Literal["forward", "backward"]
Stage = Literal["before", "after"]
OperatorClass = Literal["compute", "pointwise", "reduction", "layout", "random", "library", "unknown"]
Provenance = Literal["formula", "unknown"]
Verdict = Literal["taken", "refused", "impossible", "tried and lost"]


@dataclass(frozen=True)
class Cost:
    """The elements that one kernel must read and write, and its operations.

    `reads` and `writes` count elements by the definition in the README (an element counts once
    per kernel; a broadcast operand counts its own elements); `*_symbolic` are the same in the
    case's named dimensions, `None` where no formula is known. `unused` counts values that are
    written and never read (the indices of `max`). A multiply-add is two FLOPs;
    exponentials and the like are counted apart, in `transcendentals`.
    """

    reads: int = 0
    writes: int = 0
    unused: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    transcendentals: int = 0
    reads_symbolic: str | None = None
    writes_symbolic: str | None = None
    unused_symbolic: str | None = None
    flops_symbolic: str | None = None
    provenance: Provenance = "formula"

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Operator:
    """One node of a captured graph (`stage="before"`) or one launch of the optimised one (`"after"`)."""

    graph: GraphName
    stage: Stage
    index: int
    name: str
    target: str
    operator_class: OperatorClass
    shape: tuple[int, ...]
    dtype: str
    cost: Cost
    floor_us: float | None = None
    bound: str | None = None
    """compute-, DRAM-, cache-, latency-, launch- or host-bound; None when the cost is unknown."""
    region: str | None = None
    source: str | None = None
    """`file.py:12: y = x + 1`, the user's line."""
    shape_symbolic: str | None = None
    inputs: tuple[str, ...] = ()
    """Names of the operators whose values this one reads."""
    predicted_us: float | None = None
    """By the model of times fitted to the device, which is above the floor; None where the cost is unknown."""
    measured_us: float | None = None

    @property
    def is_view(self) -> bool:
        """Whether it moves no elements."""
        return self.operator_class == "layout" and not self.cost.bytes


@dataclass(frozen=True)
class Region:
    """A set of operators that became one kernel."""

    graph: GraphName
    name: str
    members: tuple[str, ...]
    cost: Cost
    language: Literal["c++", "triton"]
    source_code: str
    floor_us: float | None = None
    bound: str | None = None
    predicted_us: float | None = None
    measured_us: float | None = None
    schedule: str = ""
    """How its rows and columns are divided, in words."""


@dataclass(frozen=True)
class Decision:
    """Whether a producer and its consumer were fused, and why."""

    graph: GraphName
    producer: str
    consumer: str
    verdict: Verdict
    reason: str
    bytes_saved: int = 0
    predicted_us: float | None = None
    """Predicted time of the kernel that computes both; None if there is none."""
    measured_us: float | None = None
    """Measured time of the kernel that computes both, or of what was offered, in a race; None if neither was timed."""
    source: str | None = None
    passed_by: str = "fusion"
    """The pass that decided: fusion, attention, sdpa (its calls, before autograd), dropout, simplify, layout."""


@dataclass(frozen=True)
class MemoryPoint:
    """Live bytes after one step of a program."""

    graph: GraphName
    stage: Stage
    index: int
    name: str
    live_bytes: int


@dataclass(frozen=True)
class Fallback:
    """A part of the program that PyTorch runs: what, where, why."""

    what: str
    where: str
    why: str


@dataclass
class Program:
    """The results of one compilation. Filled by the backend, stored by `store/`, shown by `report/`."""

    operators: list[Operator] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    folded: str = ""
    """Which equal iterations were not captured; they count like the captured ones. Empty if all were captured."""

    def peak_bytes(self, graph: GraphName, stage: Stage) -> int | None:
        """The peak of live memory of a graph; None where it is not known."""
        points = [p.live_bytes for p in self.memory if (p.graph, p.stage) == (graph, stage)]
        return max(points, default=None)
