"""A nest with its schedule: what the kernels' printers read of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import frexp, prod

from tilewright.emit.accuracy import absolute_accuracy, feeds_discontinuous
from tilewright.loops.nest import Level, Step
from tilewright.schedule.facts import WARP, WIDEST_VECTOR, Facts, accumulator_beside, accumulator_dtype
from tilewright.schedule.schedule import Schedule

WARPS = 4
"""The warps of most programs, which hold a row together if it has a vector for each thread."""


@dataclass(frozen=True)
class ScheduledNest(Facts):
    """What is printed follows from the nest and the schedule's places; block sizes are parameters of the kernel."""

    schedule: Schedule

    @property
    def splits_columns(self) -> bool:
        """Whether several programs share the columns of a strip of rows."""
        return bool(self.sums) and self.schedule.cols.place == "programs"

    @property
    def cuts_columns(self) -> bool:
        """Whether a block of columns ends with the innermost column axis."""
        return self.schedule.cuts_columns

    @property
    def whole_row(self) -> bool:
        """Whether a program holds all columns of its rows (or of its part of them); else it loops over blocks."""
        return self.schedule.cols.place != "loop"

    @property
    def pieces(self) -> int:
        """Blocks of columns that a whole row lies in."""
        return self.schedule.cols.blocks if self.schedule.cols.place == "registers" else 1

    @property
    def one_strip(self) -> bool:
        """Whether no second kernel combines sums."""
        return self.schedule.combination is None

    @property
    def stores_down(self) -> bool:
        """Whether programs that run together go down the rows."""
        return self.schedule.order == "rows"

    @property
    def count(self) -> int:
        """The argument of a launch that gives the extent in units of a divisor: one kernel serves many extents."""
        extent = self.nest.row_count if self.nest.rows else self.nest.col_count
        return extent // self.divisor(splits_columns=self.splits_columns)

    @property
    def end(self) -> str:
        """The extent as an expression in the kernel's source."""
        divisor = self.divisor(splits_columns=self.splits_columns)
        return "count" if divisor == 1 else f"count * {divisor}"

    @property
    def passed(self) -> tuple[str, ...]:
        """The sizes of blocks that a launch passes as numbers, so that a kernel with sizes as arguments serves all."""
        return ("TILES", "PARTS") if self.nest.argument_dtypes and self.sums else ()

    @property
    def scratch(self) -> tuple[int, ...]:
        """Positions of the steps whose results the first kernel passes to the second through memory."""
        return () if self.one_strip else self.sums + self.late_scalars

    @cached_property
    def sums_apart(self) -> bool:
        """Whether each element of a tile has an accumulator of its own for a sum over the rows.

        Where a program's warps hold several rows beside one another, the sum of a tile would pass between them through
        shared memory, and a value of each column, loaded as one row of all warps, would spread every row over them. The
        gradient of 1,048,576 layer norms of 256 bf16 took 1,646 µs so on an H200, where Inductor's takes 460.
        """
        cols = self.schedule.cols
        widest = max(map(self.itemsize, self.tile_loads), default=4)
        is_short = cols.tile < WARPS * WARP * WIDEST_VECTOR // widest and not self.nest.transposes
        is_short &= cols.place == "registers"
        return bool(self.sums) and (self.splits_columns or is_short)

    @cached_property
    def repeats_columns(self) -> bool:
        """Whether column values are loaded again for each row of a tile; only if nothing else than tiles reads them."""
        ends = [step.args[0] for _, step in self.nest.reductions("reduce_cols")]
        ends += [store.value for store in self.nest.stores if not self.nest.steps[store.value].is_late]
        of_columns = any(self.nest.steps[i].level is Level.COL for i in ends)
        return self.sums_apart and not self.splits_columns and not of_columns

    @property
    def repeats_rows(self) -> bool:
        """Whether row values are loaded again for each column, as vectors: a thread of a tile that is read along its
        rows would else load each of its eight rows' values alone."""
        return self.kind == "tiles" and self.nest.transposes

    @cached_property
    def once_for_each_row(self) -> frozenset[int]:
        """Row values that are stored or summed as such, and those they are computed from: none has a tile's columns."""
        ends = [step.args[0] for _, step in self.nest.reductions("reduce_rows")]
        ends += [store.value for store in self.nest.stores]
        return frozenset(self.nest.behind(ends, includes=lambda i: self.nest.steps[i].level is Level.ROW))

    @property
    def column_blocks_text(self) -> str:
        """The blocks of a row whose columns are cut."""
        *outer, inner = self.nest.cols
        return f"{prod(outer)} * tl.cdiv({inner}, BLOCK_COLS)"

    @cached_property
    def vector(self) -> int:
        """Elements in 16 bytes of the widest that are loaded along the columns."""
        loads = [s.access for s in self.nest.steps if s.name == "load" and s.access and s.access.strides[-1]]
        return WIDEST_VECTOR // max(map(self.itemsize, loads), default=4)

    @property
    def lanes_of_vectors(self) -> bool:
        """Whether the elements of a lane of a long row's accumulators are neighbours. Blocks of cut columns may begin
        between vectors; then they are a lane's distance apart, so that a thread has them without an exchange: a group
        norm over 512 rows of 4 × 123,039 columns in fp32 takes 1,415 µs on an H200, with neighbours 1,896."""
        return not (self.cuts_columns and self.nest.cols[-1] % 4)

    @cached_property
    def online_sums(self) -> dict[int, int]:
        """Sums of exponentials of differences from a row's maximum, with the position of the maximum, if both are found
        in one loop over the row."""
        steps = self.nest.steps
        found: dict[int, int] = {}
        is_looped = not self.whole_row and not self.scans
        for i, step in self.nest.reductions("reduce_cols"):
            term = steps[step.args[0]]
            difference = steps[term.args[0]] if term.name == "exp" else None
            if is_looped and step.kind == "sum" and term.dtype == "float32" and difference is not None:
                value, peak = (*difference.args, -1, -1)[:2]
                of_peak = difference.name == "sub" and steps[peak].name == "reduce_cols" and steps[peak].kind == "max"
                if of_peak and steps[peak].args[0] == value and peak not in found.values():
                    found[i] = peak
        return found

    def accumulator(self, step: Step) -> str:
        """The dtype in which a program accumulates."""
        return accumulator_beside(step, self.schedule.cols)

    @cached_property
    def divided_sums(self) -> frozenset[int]:
        """Sums along a row that accumulate in double and that a step divides by a number (`is_mean`)."""
        return frozenset(step.args[0] for step in self.nest.steps if self.is_mean(step))

    def is_mean(self, step: Step) -> bool:
        """Whether a step divides a sum along a row, accumulated in double, by a number other than a power of two."""
        if step.name != "div" or step.dtype != "float32":
            return False
        total, divisor = (self.nest.steps[a] for a in step.args)
        wide = total.name == "reduce_cols" and accumulator_dtype(total) == "float64"
        exact = divisor.constant is None or abs(frexp(divisor.constant)[0]) == 0.5
        return wide and not exact and step.args[0] not in self.late_scalars

    @cached_property
    def wide_index(self) -> bool:
        """Whether an element's index, or the padded number of rows or columns, needs 64 bits."""
        extents = self.nest.rows + self.nest.cols
        return self._exceeds_32_bits(extents, max(self.nest.row_count, self.nest.col_count))

    @cached_property
    def wide_in_block(self) -> bool:
        """The same beside the indices that are numbers of the program."""
        if not (self.cuts_columns and self.splits_columns):
            return self.wide_index
        *outer, inner = self.nest.cols
        extents = (*self.nest.rows, *[1] * len(outer), inner)
        return self._exceeds_32_bits(extents, max(self.nest.row_count, inner))

    def _exceeds_32_bits(self, extents: tuple[int, ...], padded: int) -> bool:
        accesses = [s.access for s in self.nest.steps if s.access] + [s.access for s in self.nest.stores]
        ends = (
            access.offset + sum((n - 1) * max(stride, 0) for n, stride in zip(extents, access.strides, strict=True))
            for access in accesses
        )
        return max(max(ends, default=0), padded) >= 2**31 - 2**20

    @cached_property
    def allows_fma(self) -> bool:
        """Whether the compiler may contract a product and a sum to an FMA, as eager's kernels do inside one operator.

        Not if a discontinuous operator reads the result, in this nest or another: its operands must equal eager's, and
        a value recomputed in a later stage must be bitwise the same. Nor if the product is rounded to 16 bits before it
        is added: LLVM computes both in 16 bits then, and the contracted product is not rounded.
        """
        steps = self.nest.steps
        if self.feeds_discontinuous and not self.whole_row:
            return False
        sums = ((i, a) for i, step in enumerate(steps) if step.name in ("add", "sub") for a in step.args)
        return not any(self._is_product(a, rounded=i not in self.feeds_discontinuous) for i, a in sums)

    def _is_product(self, i: int, rounded: bool) -> bool:
        """Whether step `i` is a product, perhaps negated; with `rounded` only one that is rounded to 16 bits."""
        step = self.nest.steps[i]
        if step.name in ("round", "neg"):
            return self._is_product(step.args[0], rounded and step.name != "round")
        return step.name == "mul" and not rounded

    @cached_property
    def feeds_discontinuous(self) -> set[int]:
        """Positions of the steps on which a discontinuous operator depends."""
        return feeds_discontinuous(self.nest)

    @cached_property
    def absolute_accuracy(self) -> frozenset[int]:
        """Positions of the `erf` and `tanh` that need only absolute accuracy."""
        return absolute_accuracy(self.nest, "erf", "tanh")
