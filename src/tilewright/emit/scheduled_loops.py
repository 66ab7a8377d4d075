"""A nest with its schedule on a CPU: accumulator types, values kept between stages, and the steps of each loop."""

from __future__ import annotations

from tilewright.emit.accuracy import absolute_accuracy
from tilewright.emit.cpp_text import CHEAP, COMPUTED
from tilewright.loops.nest import Level, Nest, Step
from tilewright.schedule.facts import WIDE
from tilewright.schedule.schedule import Schedule


class ScheduledLoops:
    """What the printer reads of both."""

    def __init__(self, nest: Nest, schedule: Schedule) -> None:
        self.nest = nest
        self.schedule = schedule
        self.elementwise = schedule.cols.place == "programs"
        """Whether threads share blocks of an elementwise nest."""
        self.tiled = schedule.rows.tile > 1
        self.kept = self._values_to_keep()
        """Steps whose values one stage keeps in a row-sized scratch array for a later one."""
        self.absolute = absolute_accuracy(nest, "erf")
        """Positions of the `erf` that need only absolute accuracy."""

    def sum_type(self, step: Step) -> str:
        """The C++ type of a reduction's total, before rounding."""
        return COMPUTED[WIDE.get(step.dtype, step.dtype) if step.kind == "sum" else step.dtype]

    def sums_in_row_blocks(self, step: Step) -> bool:
        """Whether a column sum accumulates in fp32 over a block of rows."""
        return step.kind == "sum" and step.dtype == "float32" and step.level is Level.COL

    def kept_before(self, i: int, stage: int) -> bool:
        """Whether an earlier stage kept the value in its scratch array."""
        return i in self.kept and self.nest.steps[i].stage < stage

    def accumulator_type(self, step: Step) -> str:
        """The C++ type in which the innermost loop accumulates a reduction over the columns."""
        if step.kind == "sum" and not self.is_nonnegative(step.args[0]):
            return self.sum_type(step)
        return COMPUTED[step.dtype]

    def is_double_sum(self, i: int) -> bool:
        """Whether `total{i}` holds the value of step `i` in double."""
        step = self.nest.steps[i]
        return step.name == "reduce_cols" and step.kind == "sum" and step.dtype == "float32"

    def is_nonnegative(self, i: int) -> bool:
        """Whether a value is known to be nonnegative."""
        step = self.nest.steps[i]
        if step.name == "const":
            return step.constant is not None and step.constant >= 0
        if step.name == "mul" and step.args[0] == step.args[1]:
            return True
        if step.name in ("add", "mul", "div", "maximum", "round", "sqrt"):
            return all(self.is_nonnegative(a) for a in step.args)
        return step.name in ("exp", "exp2", "abs", "sigmoid")

    def tracks_nan(self, step: Step) -> bool:
        return step.kind in ("max", "min") and step.dtype in ("float32", "float64")

    def _values_to_keep(self) -> set[int]:
        """Column values of one stage that a later one reads and that are more expensive to compute than a load."""
        kept: set[int] = set()
        if self.elementwise:
            return kept
        for step in self.nest.steps:
            if step.where != "body":
                continue
            for arg in step.args:
                source = self.nest.steps[arg]
                column = source.level in (Level.FULL, Level.COL) and source.name not in (
                    "reduce_cols",
                    "reduce_rows",
                )
                if column and source.stage < step.stage and self._costly(arg, kept):
                    kept.add(arg)
        return kept

    def _costly(self, i: int, kept: set[int]) -> bool:
        step = self.nest.steps[i]
        if i in kept or step.level not in (Level.FULL, Level.COL):
            return i in kept
        # Elements of 16 bits at computed places are loaded one by one, and no loop that loads them is vectorised.
        scattered = step.access is not None and bool(step.access.by)
        return (
            scattered or step.name not in CHEAP or step.name == "div" or any(self._costly(a, kept) for a in step.args)
        )

    def varies_by_row_only(self, i: int) -> bool:
        return self.nest.steps[i].level in (Level.ROW, Level.SCALAR)

    def closure(self, roots: list[int], stage: int | None) -> list[int]:
        """The steps to compute at each column for `roots`, in order.

        If `stage` is given, it reads the values that earlier stages kept, and row values are already declared.
        """
        steps, rows = self.nest.steps, (Level.ROW, Level.SCALAR)
        return self.nest.behind(
            roots,
            includes=lambda i: stage is None or steps[i].level not in rows,
            passes=lambda i: steps[i].name != "reduce_rows" and not (stage is not None and self.kept_before(i, stage)),
        )
