"""Emits a nest as a readable Triton kernel, with a second kernel that combines column sums if there are any.

Values are blocks `[BLOCK_ROWS, BLOCK_COLS]`, with length 1 along axes that they do not vary with. A program holds
a whole row if it fits (`schedule/places.py`), in several pieces (`x_0of3`) where its length is no power of two;
over a longer row each stage loops in blocks of columns (`triton_long_rows.py`). For
column sums each program accumulates over a strip of rows (and over a part of the columns, if no reduction needs whole
rows) and writes to a scratch buffer `[strips, columns]`; the second kernel combines the strips in order, so results
are reproducible. Where columns are many, a strip is all rows, and there is no second kernel. All sums accumulate in
double, because their terms may cancel, except column sums over a strip of whole rows, which has few tiles. If a tile's
rows are in different threads, each of its elements has its own accumulator, and threads combine them after the strip.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import prod

from tilewright.emit.scheduled_nest import ScheduledNest
from tilewright.emit.triton_combine import Combine
from tilewright.emit.triton_long_rows import LongRows
from tilewright.emit.triton_step import combine, reduce, scan
from tilewright.loops.nest import Level, Nest, Step
from tilewright.schedule.choose import schedule_of
from tilewright.schedule.facts import accumulator_dtype
from tilewright.schedule.schedule import Schedule
from tilewright.schedule.tiles import SHORT_ROW

HEAD = "import triton\nimport triton.language as tl\n"
LIBDEVICE = "from triton.language.extra import libdevice\n"
MATH = "\nfrom tilewright.emit import triton_math as tw\n"
DRAWS = "from tilewright.emit import triton_draw as draw\n"


def emit_triton(nest: Nest, comment: str = "", schedule: Schedule | None = None) -> str:
    """The source of a module with the kernel `NAME` and, if there are column sums, `NAME_after`; of the chosen schedule
    unless another is given.

    Both take a pointer for each buffer of the nest in order, then one for the scratch of each column sum, then the
    launch's numbers, then block sizes (`Schedule.sizes`).
    """
    scheduled = ScheduledNest(nest, schedule or schedule_of(nest))
    kernels = "\n\n" + _Main(scheduled).text()
    if scheduled.sums and not scheduled.one_strip:
        kernels += "\n\n" + Combine(scheduled).text()
    head = f"# {comment}\n{HEAD}" if comment else HEAD
    head += LIBDEVICE if "libdevice." in kernels else ""
    return head + MATH + (DRAWS if any(step.name == "draw" for step in nest.steps) else "") + kernels


class _Main(LongRows):
    """The kernel that runs over the rows."""

    def text(self) -> str:
        self.numbers_outer_columns = self.scheduled.cuts_columns
        self.divides_rows = self.scheduled.splits_columns and len(self.nest.rows) == 1
        self.last_stages = self.nest.last_stages()
        timed = zip(self.nest.stores, self.nest.store_stages(), strict=True)
        self.timed = [(store, stage) for store, stage in timed if not self.nest.steps[store.value].is_late]
        self.stores = [store for store, _ in self.timed]
        roots = [s.value for s in self.stores] + list(self.scheduled.sums + self.scheduled.late_scalars)
        self.needed = self.nest.behind(roots)
        if self.scheduled.kind == "flat":
            self._flat()
            return self.define(self.nest.name, ["BLOCK"])
        self.put(f'"""{self._extents()}."""')
        if self.scheduled.kind == "tiles":
            self._tiles()
        else:
            self.in_pieces = self.names_in_pieces()
            self._rows()
        sizes = ["BLOCK_ROWS", "BLOCK_COLS", *["MASKED_ROWS"][: len(self.nest.rows)]]
        return self.define(self.nest.name, sizes + (["TILES", "AHEAD"] if self.scheduled.sums else []))

    def _extents(self) -> str:
        cols = " × ".join(map(str, self.nest.cols))
        if not self.nest.rows:
            return f"One row of {cols} columns"
        rows = " × ".join(["Rows", *map(str, self.nest.rows[1:])])
        if self.scheduled.kind == "tiles":
            return f"{rows} of {cols} columns"
        owned = "TILES × BLOCK_ROWS" if self.scheduled.sums else "BLOCK_ROWS"
        part = " and BLOCK_COLS of the columns" if self.scheduled.splits_columns else ""
        return f"{rows} of {cols} columns; a program owns {owned} of the rows{part}"

    # Elementwise

    def _flat(self) -> None:
        self.put(f"i = {self.program()} * BLOCK + tl.arange(0, BLOCK)")
        self.put(f"ok = i < {self.scheduled.end}")
        self.unravel("i", self.col_axes, self.nest.cols)
        self.put_groups(f"{self.program()} * BLOCK", "BLOCK", "")
        self._compute_and_store()

    def _tiles(self) -> None:
        across = f"tl.cdiv({self.nest.col_count}, BLOCK_COLS)"
        self.put(f"program = {self.program()}")
        if self.scheduled.stores_down:
            # What programs that run together write is contiguous.
            self.put(f"down = tl.cdiv({self.scheduled.end}, BLOCK_ROWS)")
            self._place_rows("(program % down)")
            self._place_columns("(program // down) * BLOCK_COLS")
        else:
            self._place_rows(f"(program // {across})")
            self._place_columns(f"(program % {across}) * BLOCK_COLS")
        self._compute_and_store()

    def _compute_and_store(self) -> None:
        for i in self._in_order(self.needed):
            self.declare(i)
        for store in self.stores:
            self.store(store)

    # Rows with reductions

    def _rows(self) -> None:
        whole = self.scheduled.whole_row
        if self.scheduled.splits_columns:
            self._place_strip()
        elif whole and self.scheduled.uses_columns and self.scheduled.sums:
            self._place_columns("")
        before = self._independent_of_rows() if whole and self.scheduled.sums else []
        for i in before:
            self._step(i)
        self._begin_sums()
        if self.scheduled.sums:
            self.open("for tile in tl.range(TILES, num_stages=AHEAD):")
        self._place_rows(f"({self._strip()} * TILES + tile)" if self.scheduled.sums else self.program())
        if whole:
            self._whole_rows(before)
        else:
            for stage in range(self.nest.stages + 1):
                self._stage(stage)
            if self._sums_in_memory():
                self.put("tl.debug_barrier()")
        if self.scheduled.sums:
            self.close()
        self._end_sums(known=before)

    def _whole_rows(self, before: Sequence[int]) -> None:
        """All columns of some rows at once; the steps `before` do not vary with the rows, and are known."""
        if self.scheduled.uses_columns and not self.scheduled.sums:
            self._place_columns("")
        elif self.scheduled.uses_columns and self.nest.rows:
            self.put("ok = row_ok & col_ok")
        for i in self._in_order(set(self.needed).difference(before), loads_first=True):
            self._step(i)
        for store in self.stores:
            self.store(store)

    def _place_strip(self) -> None:
        self.put(f"program = {self.program()}")
        if self.scheduled.cuts_columns:
            *outer, inner = self.nest.cols
            blocks = f"tl.cdiv({inner}, BLOCK_COLS)"
            self.put(f"strip = {self._in_block(f'program // ({prod(outer)} * {blocks})')}")
            self.put(f"outer = program // {blocks} % {prod(outer)}")
        else:
            blocks = f"tl.cdiv({self.nest.col_count}, BLOCK_COLS)"
            self.put(f"strip = program // {blocks}")
        self._place_columns(f"(program % {blocks}) * BLOCK_COLS")

    def _independent_of_rows(self) -> list[int]:
        """Steps that do not vary with the rows: computed once per strip."""
        alike = (Level.COL, Level.SCALAR)
        return [i for i in self.needed if self.nest.steps[i].level in alike and i not in self.scheduled.sums]

    def _in_order(self, steps: Iterable[int], *, loads_first: bool = False) -> list[int]:
        """Steps in order, but first the loads in whose layout nothing should be computed.

        Triton computes a step in the layout of the last load before it. After a load of one value per column every
        thread would hold a whole row, and sums would go through shared memory. `loads_first`: put the other loads
        before the remaining steps too, since the compiler does not hoist a load over a reduction's barrier.
        """

        def rank(i: int) -> int:
            step = self.nest.steps[i]
            if step.name != "load" or step.args or step.access is None:
                return 3
            if step.level is not Level.FULL:
                return 0
            rows, cols = self.nest.split(step.access.strides)
            return 1 if 1 in rows and 1 not in cols else 2 if loads_first else 3

        ordered = sorted(steps, key=lambda i: (rank(i), i))
        if loads_first and self.scheduled.row_lanes > SHORT_ROW and not self.nest.transposes:
            # The one row of a program has the layout of column values: load these late, to save registers.
            for i in [i for i in ordered if self.nest.steps[i].level is Level.COL]:
                ordered.remove(i)
                readers = (place for place, j in enumerate(ordered) if i in self.nest.steps[j].args)
                ordered.insert(next(readers, len(ordered)), i)
        return ordered

    def _step(self, i: int) -> None:
        step = self.nest.steps[i]
        if step.name == "reduce_cols":
            self._finish(i, reduce(step.kind or "", accumulator_dtype(step), self._of_all_pieces(i, step), 1))
        elif step.name == "reduce_rows":
            self._add_to_sum(i, step)
        else:
            self.declare(i)

    def _of_all_pieces(self, i: int, step: Step) -> str:
        """The operand of a reduction along a whole row, with the pieces of the row combined."""
        terms = self._bounded(step, 1)
        if self.scheduled.pieces == 1 or self.nest.steps[step.args[0]].level not in (Level.FULL, Level.COL):
            return self._widened(step, terms)
        self.put(f"acc{i} = {terms}")
        parts = [self.of_piece(f"acc{i}", piece) for piece in range(self.scheduled.pieces)]
        if self.accumulator(step) != step.dtype:
            # Add pairs before converting: a GPU converts to double at an eighth of the rate at which it adds.
            pairs = [f"({a} + {b})" for a, b in zip(parts[:-1:2], parts[1::2], strict=True)]
            parts = [self._widened(step, f"({' + '.join(pairs)})"), self._widened(step, parts[-1])]
        return functools.reduce(lambda a, b: combine(step.kind or "", step.dtype, a, b), parts)

    def text_of(self, i: int, step: Step) -> str:
        if step.name != "scan":
            return super().text_of(i, step)
        here = scan(step.kind or "", self._scanned(i))
        return here if self.scheduled.whole_row else combine(step.kind or "", step.dtype, f"carry{i}", here)
