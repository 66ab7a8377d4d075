"""What the C++ of a nest follows from: the types of its sums, what a stage keeps, what a loop needs."""

from __future__ import annotations

from tilewright.emit.cpp_text import CHEAP, COMPUTED, WIDE
from tilewright.loops.nest import Access, Level, Nest, Step


class Form:
    """The choices that the emitter makes for one nest."""

    def __init__(self, nest: Nest) -> None:
        self.nest = nest
        self.stash = self._stashed()
        """Steps whose values one stage keeps in a row-sized scratch array for a later one."""

    def elementwise(self) -> bool:
        """Whether one loop over blocks of columns is all there is."""
        return not any(s.name.startswith("reduce") for s in self.nest.steps) and len(self.nest.cols) == 1

    def sum_type(self, step: Step) -> str:
        """The C++ type of a reduction's result before it is rounded."""
        return WIDE.get(step.dtype, COMPUTED[step.dtype]) if step.kind == "sum" else COMPUTED[step.dtype]

    def in_blocks(self, step: Step) -> bool:
        """Whether a column sum is carried in fp32 over a block of rows."""
        return step.kind == "sum" and step.dtype == "float32" and step.level is Level.COL

    def wide(self, access: Access) -> bool:
        """Whether a store covers the columns."""
        return any(self.nest.split(access.strides)[1])

    def store_stage(self, value: int) -> int:
        """The walk over the columns that can store a value; -1: none can."""
        step = self.nest.steps[value]
        return step.stage + (step.name == "reduce_cols") if step.where == "body" and step.name != "reduce_rows" else -1

    def kept_before(self, i: int, stage: int) -> bool:
        """Whether an earlier stage left the value in its scratch array."""
        return i in self.stash and self.nest.steps[i].stage < stage

    def carrier(self, step: Step) -> str:
        """The C++ type that a reduction over the columns is carried in inside the innermost loop."""
        if step.kind == "sum" and not self.one_sign(step.args[0]):
            return self.sum_type(step)
        return COMPUTED[step.dtype]

    def is_double_sum(self, i: int) -> bool:
        """Whether `total{i}` holds the value of a step more exactly than the step itself."""
        step = self.nest.steps[i]
        return step.name == "reduce_cols" and step.kind == "sum" and step.dtype == "float32"

    def one_sign(self, i: int) -> bool:
        """Whether a value is known to be positive or zero wherever it is computed."""
        step = self.nest.steps[i]
        if step.name == "const":
            return step.constant is not None and step.constant >= 0
        if step.name == "mul" and step.args[0] == step.args[1]:
            return True
        if step.name in ("add", "mul", "div", "maximum", "round", "sqrt"):
            return all(self.one_sign(a) for a in step.args)
        return step.name in ("exp", "exp2", "abs", "sigmoid")

    def watches_nan(self, step: Step) -> bool:
        return step.kind in ("max", "min") and step.dtype in ("float32", "float64")

    def _stashed(self) -> set[int]:
        """Column values of one stage that a later one needs and that cost more than a load to compute."""
        stashed: set[int] = set()
        if self.elementwise():
            return stashed
        for step in self.nest.steps:
            if step.where != "body":
                continue
            for arg in step.args:
                source = self.nest.steps[arg]
                column = source.level in (Level.FULL, Level.COL) and source.name not in (
                    "reduce_cols",
                    "reduce_rows",
                )
                if column and source.stage < step.stage and self._costly(arg, stashed):
                    stashed.add(arg)
        return stashed

    def _costly(self, i: int, stashed: set[int]) -> bool:
        step = self.nest.steps[i]
        if i in stashed or step.level not in (Level.FULL, Level.COL):
            return i in stashed
        return step.name not in CHEAP or step.name == "div" or any(self._costly(a, stashed) for a in step.args)

    def varies_by_row_only(self, i: int) -> bool:
        return self.nest.steps[i].level in (Level.ROW, Level.SCALAR)

    def closure(self, roots: list[int], stash_from: int | None) -> list[int]:
        """Steps to run at each column for `roots`, in order: those of the columns, and what they need.

        With `stash_from`, values kept from an earlier stage stand for themselves and row values
        are already declared.
        """
        needed: set[int] = set()
        todo = list(roots)
        while todo:
            i = todo.pop()
            step = self.nest.steps[i]
            if i in needed:
                continue
            if stash_from is not None and step.level in (Level.ROW, Level.SCALAR):
                continue
            needed.add(i)
            if step.name == "reduce_rows" or (stash_from is not None and i in self.stash and step.stage < stash_from):
                continue
            todo.extend(step.args)
        return sorted(needed)
