"""The schedule of a nest's Triton programs, on which the emitter and the launcher agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import frexp, gcd, prod
from typing import Literal

from tilewright.emit.accuracy import absolute_accuracy, feeds_discontinuous
from tilewright.loops.blocks import power_of_two, row_pieces
from tilewright.loops.nest import Level, Nest, Step

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
SHORT_ROW = 1024
"""Columns of a row that one warp may hold alone."""
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


@dataclass(frozen=True)
class TritonSchedule:
    """How one nest is divided into programs.

    `flat`: elementwise along one axis. `tiles`: elementwise over rows × columns. `rows`: with reductions or scans; a
    program computes whole rows, or with column sums a strip of rows, whose partial sums a second kernel combines.
    """

    nest: Nest

    @cached_property
    def kind(self) -> Kind:
        if self.scans or any(step.name.startswith("reduce") for step in self.nest.steps):
            return "rows"
        return "tiles" if self.nest.rows else "flat"

    @property
    def extent(self) -> int:
        """The rows, or the elements of a `flat` nest: `count` × `divisor`."""
        return self.nest.row_count if self.nest.rows else self.nest.col_count

    @cached_property
    def divisor(self) -> int:
        """The power of two that kernels may assume to divide the extent: a vector's length if vectors run along it."""
        along_rows = self.kind == "flat" or self.nest.transposes or self.splits_columns
        return gcd(self.extent, WIDEST_VECTOR) if along_rows else 1

    @property
    def count(self) -> int:
        """The argument of a launch that gives the extent in units of `divisor`: one kernel serves many extents."""
        return self.extent // self.divisor

    @property
    def end(self) -> str:
        """The extent as an expression in the kernel's source."""
        return "count" if self.divisor == 1 else f"count * {self.divisor}"

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
        steps, late = self.nest.steps, [s.value for s in self.nest.stores if self.is_late(s.value)]
        behind = self.nest.behind(late, passes=lambda i: steps[i].name != "reduce_cols" and i not in self.sums)
        return tuple(i for i in behind if steps[i].name == "reduce_cols")

    @property
    def scratch(self) -> tuple[int, ...]:
        """Positions of the steps whose results the first kernel passes to the second through memory."""
        return () if self.one_strip else self.sums + self.late_scalars

    @cached_property
    def splits_columns(self) -> bool:
        """Whether several programs share the columns of a strip of rows: possible if no reduction needs whole rows."""
        kept = all(any(self.nest.split(s.access.strides)[1]) for s in self.nest.stores if not self.is_late(s.value))
        whole = self.scans or any(step.name == "reduce_cols" for step in self.nest.steps)
        return bool(self.sums) and kept and not whole and self.uses_columns

    @cached_property
    def cuts_columns(self) -> bool:
        """Whether a block of columns ends with the innermost column axis, so that the outer ones are numbers of the
        program or of its loop: no division for each element, and 32-bit places beside them. The minimum over the middle
        axis of [128, 4096, 4095] took 3,230 µs on an H200 in fp32 and 5,374 in bf16, so 2,216 and 1,587."""
        if len(self.nest.cols) == 1:
            return False
        return self.nest.cols[-1] >= LEAST_CUT if self.splits_columns else bool(self.is_looped and self.loop_widths)

    @cached_property
    def is_looped(self) -> bool:
        """Whether a program loops over the columns of its rows."""
        return self.kind == "rows" and not self.whole_row and not self.scans

    @cached_property
    def loop_widths(self) -> list[int]:
        """Widths of blocks, widest first, that leave at most a quarter of the lanes idle at the end of the innermost
        column axis."""
        inner = self.nest.cols[-1]
        return [w for w in (WHOLE_ROW, WHOLE_ROW // 2) if 4 * inner >= 3 * -(-inner // w) * w]

    @property
    def column_blocks_text(self) -> str:
        """The blocks of a row whose columns are cut."""
        *outer, inner = self.nest.cols
        return f"{prod(outer)} * tl.cdiv({inner}, BLOCK_COLS)"

    @cached_property
    def vector(self) -> int:
        """Elements in 16 bytes of the widest that are loaded along the columns."""
        loads = [s.access for s in self.nest.steps if s.name == "load" and s.access and s.access.strides[-1]]
        sizes = [SIZES.get(self.nest.buffers[access.buffer].dtype, 1) for access in loads]
        return WIDEST_VECTOR // max(sizes, default=4)

    @property
    def lanes_of_vectors(self) -> bool:
        """Whether the elements of a lane of a long row's accumulators are neighbours. Blocks of cut columns may begin
        between vectors; then they are a lane's distance apart, so that a thread has them without an exchange: a group
        norm over 512 rows of 4 × 123,039 columns in fp32 takes 1,415 µs on an H200, with neighbours 1,896."""
        return not (self.cuts_columns and self.nest.cols[-1] % 4)

    @property
    def loops_once(self) -> bool:
        """Whether a program that loops over its rows reads them once."""
        stages = {step.stage for _, step in self.nest.reductions("reduce_cols")}
        kept = zip(self.nest.stores, self.nest.store_stages(), strict=True)
        stages |= {stage for store, stage in kept if any(self.nest.split(store.access.strides)[1])}
        return len(stages) == 1

    @cached_property
    def online_sums(self) -> dict[int, int]:
        """Sums of exponentials of differences from a row's maximum, with the position of the maximum, if both are found
        in one loop over the row."""
        steps = self.nest.steps
        found: dict[int, int] = {}
        for i, step in self.nest.reductions("reduce_cols"):
            term = steps[step.args[0]]
            difference = steps[term.args[0]] if term.name == "exp" else None
            if self.is_looped and step.kind == "sum" and term.dtype == "float32" and difference is not None:
                value, peak = (*difference.args, -1, -1)[:2]
                of_peak = difference.name == "sub" and steps[peak].name == "reduce_cols" and steps[peak].kind == "max"
                if of_peak and steps[peak].args[0] == value and peak not in found.values():
                    found[i] = peak
        return found

    def column_blocks(self, block: int) -> int:
        """Blocks of `block` columns."""
        if not self.cuts_columns:
            return -(-self.nest.col_count // block)
        *outer, inner = self.nest.cols
        return prod(outer) * -(-inner // block)

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all rows of tiles begin at vectors of four elements."""
        strides = (s.access.strides for s in self.nest.steps if s.access and s.level is Level.FULL)
        return all(stride == 1 or stride % 4 == 0 for each in strides for stride in each)

    @property
    def stores_down(self) -> bool:
        """Whether a result is contiguous along the rows.

        Programs that run together then go down the rows, else along the columns. Bias, clamps and factors of
        128 x 126 x 126 x 128 in bf16 from channels-last to contiguous take 297 µs on an H200 along the columns, 383
        down the rows; of 128 x 512 x 512 x 64 in fp32 1,051 and 1,169.
        """
        parts = [self.nest.split(s.access.strides) for s in self.nest.stores]
        return any(1 in rows and 1 not in cols for rows, cols in parts)

    @property
    def _reads_narrow(self) -> bool:
        loads = [s.access for s in self.nest.steps if s.name == "load" and s.access and s.level is Level.FULL]
        return any(self.nest.buffers[access.buffer].dtype in NARROW for access in loads)

    @property
    def loads_singly(self) -> bool:
        """Whether a tile of column sums is loaded element by element, of less than the four bytes that an asynchronous
        copy to shared memory takes at least."""
        return self.splits_columns and not self.is_aligned and not self.has_few_rows and self._reads_narrow

    @cached_property
    def sums_apart(self) -> bool:
        """Whether each element of a tile has an accumulator of its own for a sum over the rows."""
        is_short = self.whole_row and self.row_blocks[1] <= WARP_ROW and not self.nest.transposes
        return bool(self.sums) and (self.splits_columns or is_short)

    @cached_property
    def repeats_columns(self) -> bool:
        """Whether column values are loaded again for each row of a tile; only if nothing else than tiles reads them."""
        ends = [step.args[0] for _, step in self.nest.reductions("reduce_cols")]
        ends += [store.value for store in self.nest.stores if not self.is_late(store.value)]
        of_columns = any(self.nest.steps[i].level is Level.COL for i in ends)
        return self.sums_apart and not self.splits_columns and not of_columns

    @property
    def repeats_rows(self) -> bool:
        """Whether row values are loaded again for each column, as vectors: a thread of a tile that is read along its
        rows would else load each of its eight rows' values alone."""
        return self.kind == "tiles" and self.nest.transposes

    @cached_property
    def one_strip(self) -> bool:
        """Whether a program walks all rows of its columns, so that no second kernel has anything to combine."""
        return self.splits_columns and (self.nest.col_count >= MANY_COLUMNS or self.has_few_rows)

    @property
    def has_few_rows(self) -> bool:
        """Whether a program takes all rows of few columns at once."""
        return self.nest.row_count <= FEW_ROWS and self.nest.col_count < MANY_COLUMNS

    @cached_property
    def whole_row(self) -> bool:
        """Whether a program holds all columns of its rows (or of its part of them); else it loops over blocks."""
        if self.splits_columns:
            return True
        columns = self.row_lanes
        return columns <= WHOLE_ROW and columns * self.registers_per_column <= (SPILLED if self.sums else REGISTERS)

    @cached_property
    def pieces(self) -> int:
        """Blocks of columns that a whole row lies in."""
        in_pieces = self.kind == "rows" and self.whole_row and not self.splits_columns
        return self.row_blocks[0] if in_pieces else 1

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

    def accumulator(self, step: Step) -> str:
        """The dtype in which a program accumulates; never double beside whole rows, which need the registers."""
        beside_rows = step.name == "reduce_rows" and step.level is Level.COL and self.whole_row
        return step.dtype if beside_rows and not self.splits_columns else accumulator_dtype(step)

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
    def registers_per_looped_column(self) -> int:
        """Registers that a column of a block takes, with one for the terms of a sum in double."""
        outer = [s for s in self.nest.steps if s.name == "load" and s.access and not s.access.strides[-1]]
        wide = any(accumulator_dtype(step) == "float64" for _, step in self.nest.reductions("reduce_cols"))
        return self.registers_per_column - self._registers_of(outer) * self.cuts_columns + wide

    @cached_property
    def registers_per_column(self) -> int:
        """Registers that a column takes while a program computes a row."""
        return self._registers_of(self.nest.steps)

    @staticmethod
    def _registers_of(steps: Iterable[Step]) -> int:
        count = 0
        for step in steps:
            if step.name == "load" and step.level in (Level.FULL, Level.COL):
                count += 2 if step.dtype in ("float64", "int64") else 1
            elif step.name == "reduce_rows" and step.level is Level.COL:
                # The sum is live across rows, with its next value.
                count += 4 if step.dtype == "float64" else 2
        return count

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
        if self.feeds_discontinuous and self.nest.stages and not self.whole_row:
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

    @cached_property
    def uses_columns(self) -> bool:
        """Whether any access varies with the columns (a nest without columns has a column axis of length 1)."""
        strides = [s.access.strides for s in self.nest.steps if s.access]
        strides += [s.strides for s in self.nest.steps if s.strides is not None]
        strides += [s.access.strides for s in self.nest.stores]
        return any(any(self.nest.split(s)[1]) for s in strides)

    @property
    def passed(self) -> tuple[str, ...]:
        """The sizes of blocks that a launch passes as numbers, so that a kernel with sizes as arguments serves all."""
        return ("TILES", "PARTS") if self.nest.argument_dtypes and self.sums else ()

    def is_late(self, value: int) -> bool:
        """Whether a step's value is available only after all rows."""
        return self.nest.steps[value].is_late

    @cached_property
    def late_columns(self) -> bool:
        """Whether a value stored after all rows varies with the columns."""
        late = [s for s in self.nest.stores if self.is_late(s.value)]
        return any(any(self.nest.split(s.access.strides)[1]) for s in late)

    def scratch_size(self, value: int, programs: int) -> tuple[int, str]:
        """Elements and dtype of the scratch buffer of step `value`."""
        step = self.nest.steps[value]
        if value in self.late_scalars:
            return 1, step.dtype
        return programs * (self.nest.col_count if step.level is Level.COL else 1), self.accumulator(step)
