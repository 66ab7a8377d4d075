"""What a schedule depends on in a nest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Literal

from tilewright.loops.nest import Access, Level, Nest, Step
from tilewright.schedule.blocks import power_of_two, row_pieces
from tilewright.schedule.schedule import Axis

WARP = 32
"""Threads of a warp."""
WARP_ROW = 128
"""The widest piece of a row that only a part of a warp holds, so that the rows of a tile are in different threads."""
LONG_STRIP = 4096
"""Columns above which rows beside column sums are in pieces; shorter ones share barriers in tiles of several rows.
Layer norm's backward in bf16 takes 28 us on an H200 for 768 columns, 40 in pieces; for 5120 columns 99, then 75."""
WIDE = {"float32": "float64", "float64": "float64"}
"""Accumulator dtypes of sums; integers, and sums whose results are rounded to 16 bits, accumulate in their own."""
NARROW = ("bfloat16", "float16", "int16", "uint8", "int8", "bool")
"""Dtypes of less than four bytes an element."""
WIDEST_VECTOR = 16
"""Elements of the narrowest dtype in 16 bytes."""
SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
"""Bytes of an element, 1 unless named."""

Kind = Literal["flat", "tiles", "rows"]


def accumulator_dtype(step: Step) -> str:
    """The dtype that a reduction accumulates in."""
    return WIDE.get(step.dtype, step.dtype) if step.kind == "sum" and not step.approximate else step.dtype


def accumulator_beside(step: Step, cols: Axis) -> str:
    """The same in a program's strip; never double beside whole rows, which need the registers."""
    beside_rows = step.name == "reduce_rows" and step.level is Level.COL and cols.place == "registers"
    return step.dtype if beside_rows else accumulator_dtype(step)


@dataclass(frozen=True)
class Facts:
    """A nest and what its schedule depends on."""

    nest: Nest

    @cached_property
    def kind(self) -> Kind:
        """`flat`: elementwise along one axis. `tiles`: elementwise over rows × columns. `rows`: with reductions or
        scans; a program computes whole rows, or with column sums a strip of rows."""
        if self.scans or any(step.name.startswith("reduce") for step in self.nest.steps):
            return "rows"
        return "tiles" if self.nest.rows else "flat"

    @cached_property
    def scans(self) -> tuple[int, ...]:
        """Positions of the scans."""
        return tuple(i for i, step in enumerate(self.nest.steps) if step.name == "scan")

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """Positions of the reductions over the rows."""
        return tuple(i for i, _ in self.nest.reductions("reduce_rows"))

    @cached_property
    def late_scalars(self) -> tuple[int, ...]:
        """Positions of scalars reduced over the columns that steps after all rows use."""
        steps, late = self.nest.steps, self.nest.late_stores
        ends = {i for i, _ in self.nest.reductions("reduce_cols")}.union(self.sums)
        behind = self.nest.behind((s.value for s in late), passes=lambda i: i not in ends)
        return tuple(i for i in behind if steps[i].name == "reduce_cols")

    @cached_property
    def late_columns(self) -> bool:
        """Whether a value stored after all rows varies with the columns."""
        return any(self.nest.covers_columns(s.access) for s in self.nest.late_stores)

    @cached_property
    def uses_columns(self) -> bool:
        """Whether any access varies with the columns (a nest without columns has a column axis of length 1)."""
        strides = [s.access.strides for s in self.nest.steps if s.access]
        strides += [s.strides for s in self.nest.steps if s.strides is not None]
        strides += [s.access.strides for s in self.nest.stores]
        return any(any(self.nest.split(s)[1]) for s in strides)

    @property
    def tile_loads(self) -> list[Access]:
        """The accesses of loads that vary with rows and columns."""
        loads = [step for step in self.nest.steps if step.name == "load" and step.level is Level.FULL]
        return [step.access for step in loads if step.access]

    def itemsize(self, access: Access) -> int:
        return SIZES.get(self.nest.buffers[access.buffer].dtype, 1)

    @cached_property
    def row_blocks(self) -> tuple[int, int]:
        """In how many blocks of which width a whole row lies."""
        count, width = row_pieces(self.nest.col_count)
        whole = self.sums and width > WARP_ROW and self.nest.col_count <= LONG_STRIP
        return (1, power_of_two(self.nest.col_count)) if whole or self.scans else (count, width)

    @property
    def row_lanes(self) -> int:
        """Columns of a whole row, padded to its pieces."""
        return prod(self.row_blocks)

    def divisor(self, *, splits_columns: bool) -> int:
        """The power of two that kernels may assume to divide the extent: a vector's length if vectors run along it."""
        along_rows = self.kind == "flat" or self.nest.transposes or splits_columns
        return gcd(self.nest.row_count if self.nest.rows else self.nest.col_count, WIDEST_VECTOR) if along_rows else 1

    @cached_property
    def registers_per_column(self) -> int:
        """Registers that a column takes while a program computes a row."""
        return registers_of(self.nest.steps)


def registers_of(steps: Iterable[Step]) -> int:
    count = 0
    for step in steps:
        if step.name == "load" and step.level in (Level.FULL, Level.COL):
            count += 2 if step.dtype in ("float64", "int64") else 1
        elif step.name == "reduce_rows" and step.level is Level.COL:
            # The sum is live across rows, with its next value.
            count += 4 if step.dtype == "float64" else 2
    return count
