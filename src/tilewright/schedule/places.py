"""Where a GPU's programs have the columns of a nest: each some of them, or whole rows in registers or in a loop."""

from __future__ import annotations

from functools import cached_property
from math import prod

from tilewright.loops.nest import Level
from tilewright.schedule.facts import NARROW, Facts, accumulator_dtype, registers_of
from tilewright.schedule.schedule import Order, Place

WHOLE_ROW = 16384
"""The widest row, padded to its pieces, that one program holds at once."""
REGISTERS = 65536
"""Live 32-bit values that a program may have over a whole row."""
SPILLED = 3 * REGISTERS // 2
"""The same with column sums: some spilling is cheaper than column sums in memory. Layer norm's backward of 4096 rows
of 8192 columns with a residual, fp32, takes 184 us on an H200, and 411 in blocks of columns."""
MANY_COLUMNS = 2**17
"""Blocks of so many columns are a program for each multiprocessor, without a division of the rows among programs. T5's
bias of relative positions, 4 sums over 8 rows of 2,097,152 columns, took 177 + 80 us in two kernels on an H200."""
LEAST_CUT = 128
"""The shortest innermost column axis that blocks of columns end with."""
FEW_ROWS = 256
"""Up to this many rows are one or two tiles of a program: a second kernel to combine partial results does not pay."""


class Places(Facts):
    """The decisions that shape the source of a nest's kernel; they depend on the nest alone."""

    @cached_property
    def columns(self) -> Place:
        """Where the columns are."""
        if self.kind != "rows" or self.splits_columns:
            return "programs"
        most = SPILLED if self.sums else REGISTERS
        fits = self.row_lanes <= WHOLE_ROW and self.row_lanes * self.registers_per_column <= most
        return "registers" if fits else "loop"

    @cached_property
    def splits_columns(self) -> bool:
        """Whether several programs share the columns of a strip of rows: possible if no reduction needs whole rows."""
        early = [s for s in self.nest.stores if not self.nest.steps[s.value].is_late]
        whole = self.scans or any(step.name == "reduce_cols" for step in self.nest.steps)
        kept = all(self.nest.covers_columns(s.access) for s in early)
        return bool(self.sums) and kept and not whole and self.uses_columns

    @cached_property
    def cuts_columns(self) -> bool:
        """Whether a block of columns ends with the innermost column axis, so that the outer ones are numbers of the
        program or of its loop: no division for each element, and 32-bit places beside them. The minimum over the middle
        axis of [128, 4096, 4095] took 3,230 µs on an H200 in fp32 and 5,374 in bf16, so 2,216 and 1,587."""
        if len(self.nest.cols) == 1 or self.kind != "rows":
            return False
        if self.splits_columns:
            return self.nest.cols[-1] >= LEAST_CUT
        return self.columns == "loop" and not self.scans and bool(self.loop_widths)

    @cached_property
    def loop_widths(self) -> list[int]:
        """Widths of blocks, widest first, that leave at most a quarter of the lanes idle at the end of the innermost
        column axis."""
        inner = self.nest.cols[-1]
        return [w for w in (WHOLE_ROW, WHOLE_ROW // 2) if 4 * inner >= 3 * -(-inner // w) * w]

    def column_blocks(self, block: int) -> int:
        """Blocks of `block` columns."""
        outer, inner = (self.nest.cols[:-1], self.nest.cols[-1]) if self.cuts_columns else ((), self.nest.col_count)
        return prod(outer) * -(-inner // block)

    @property
    def order(self) -> Order:
        """Programs that run together go down the rows if a result is contiguous along them, else along the columns.

        Bias, clamps and factors of 128 x 126 x 126 x 128 in bf16 from channels-last to contiguous take 297 µs on an
        H200 along the columns, 383 down the rows; of 128 x 512 x 512 x 64 in fp32 1,051 and 1,169.
        """
        parts = [self.nest.split(s.access.strides) for s in self.nest.stores]
        down = self.kind == "tiles" and any(1 in rows and 1 not in cols for rows, cols in parts)
        return "rows" if down else "columns"

    @cached_property
    def one_strip(self) -> bool:
        """Whether a program walks all rows of its columns, so that no second kernel has anything to combine."""
        return self.splits_columns and (self.nest.col_count >= MANY_COLUMNS or self.has_few_rows)

    @property
    def has_few_rows(self) -> bool:
        """Whether a program takes all rows of few columns at once."""
        return self.nest.row_count <= FEW_ROWS and self.nest.col_count < MANY_COLUMNS

    @property
    def is_aligned(self) -> bool:
        """Whether all rows of tiles begin at vectors of four elements."""
        strides = (s.access.strides for s in self.nest.steps if s.access and s.level is Level.FULL)
        return all(stride == 1 or stride % 4 == 0 for each in strides for stride in each)

    @cached_property
    def loads_singly(self) -> bool:
        """Whether a tile of column sums is loaded element by element, of less than the four bytes that an asynchronous
        copy to shared memory takes at least."""
        narrow = any(self.nest.buffers[access.buffer].dtype in NARROW for access in self.tile_loads)
        return self.splits_columns and not self.is_aligned and not self.has_few_rows and narrow

    @property
    def loops_once(self) -> bool:
        """Whether a program that loops over its rows reads them once."""
        stages = {step.stage for _, step in self.nest.reductions("reduce_cols")}
        kept = zip(self.nest.stores, self.nest.store_stages(), strict=True)
        stages |= {stage for store, stage in kept if self.nest.covers_columns(store.access)}
        return len(stages) == 1

    @property
    def registers_per_looped_column(self) -> int:
        """Registers that a column of a block takes, with one for the terms of a sum in double."""
        outer = [s for s in self.nest.steps if s.name == "load" and s.access and not s.access.strides[-1]]
        wide = any(accumulator_dtype(step) == "float64" for _, step in self.nest.reductions("reduce_cols"))
        return self.registers_per_column - registers_of(outer) * self.cuts_columns + wide
