"""Merges the axes of a nest as far as its accesses allow, so that the innermost loops are long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from tilewright.loops.nest import Access, Step, Store
from tilewright.operators.axes import Unfusable


@dataclass
class AxisCollapser:
    """Merges neighbouring axes whose strides are contiguous with each other in every access."""

    rows: list[int]
    cols: list[int]
    steps: list[Step]
    stores: list[Store]

    def collapse(self) -> None:
        if not any(s.name in ("reduce_cols", "reduce_rows", "scan") for s in self.steps):
            everything = self.rows + self.cols
            while len(everything) > 1 and self._mergeable(everything, len(everything) - 2):
                self._merge(everything, len(everything) - 2)
            self.rows, self.cols = everything[:-1], everything[-1:]
        self._collapse_part(0, self.rows)
        self._collapse_part(len(self.rows), self.cols)
        if not self.cols:
            self.cols.append(1)
            self._change(lambda strides: (*strides, 0))

    def check_draw_order(self) -> None:
        """Raise Unfusable unless numbers of the CPU's generator are read in order; seeking costs more than a mask."""
        extents = self.rows + self.cols
        in_order = tuple(prod(extents[at + 1 :]) for at in range(len(extents)))
        for step in self.steps:
            if step.name == "draw" and step.philox is None and step.strides != in_order:
                raise Unfusable("random numbers are drawn in the order of memory, which this loop does not follow")

    def _collapse_part(self, start: int, extents: list[int]) -> None:
        everything = self.rows + self.cols
        for local in reversed(range(len(extents) - 1)):
            if self._mergeable(everything, start + local):
                self._merge(everything, start + local)
                extents[local] *= extents.pop(local + 1)

    def _all_strides(self) -> list[tuple[int, ...]]:
        return [
            *(s.access.strides for s in self.steps if s.access),
            *(s.strides for s in self.steps if s.strides is not None),
            *(s.access.strides for s in self.stores),
        ]

    def _mergeable(self, extents: list[int], at: int) -> bool:
        inner = extents[at + 1]
        return all(strides[at] == strides[at + 1] * inner for strides in self._all_strides())

    def _merge(self, extents: list[int], at: int) -> None:
        extents[at : at + 2] = [extents[at] * extents[at + 1]]
        self._change(lambda strides: strides[:at] + strides[at + 1 :])

    def _change(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        def changed(access: Access) -> Access:
            return replace(access, strides=change(access.strides))

        self.steps[:] = [
            replace(
                s,
                access=changed(s.access) if s.access else None,
                strides=None if s.strides is None else change(s.strides),
            )
            if s.access or s.strides is not None
            else s
            for s in self.steps
        ]
        self.stores[:] = [Store(s.value, changed(s.access)) for s in self.stores]
