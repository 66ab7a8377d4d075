"""Places, bounds and reductions of a tile of rows; sums over the rows of a strip."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.emit.triton_printer import Printer
from tilewright.emit.triton_step import combine, identity, reduce, type_name
from tilewright.loops.nest import Level, Step
from tilewright.loops.sizes import Size
from tilewright.schedule.facts import accumulator_dtype


class Rows(Printer):
    """What the schedules of rows share: where a tile is, and how its values are reduced."""

    def accumulator(self, step: Step) -> str:
        return self.scheduled.accumulator(step)

    def _place_rows(self, tile: str) -> None:
        if self.nest.rows:
            lanes = "tl.arange(0, BLOCK_ROWS)[:, None]"
            if self.divides_rows:
                self.put(f"begin = {tile} * BLOCK_ROWS")
                self.put(f"lane = {lanes}")
                self.put("row = begin + lane")
            else:
                self.put(f"row = {tile} * BLOCK_ROWS + {lanes}")
            self.put(f"row_ok = {self._inside(f'row < {self.scheduled.end}', 'MASKED_ROWS', '(BLOCK_ROWS, 1)')}")
            self.unravel("row", self.row_axes, self.nest.rows)

    @staticmethod
    def _inside(bound: str, condition: str, shape: str) -> str:
        """`bound` where the constant `condition` holds, else true: the compiler drops such masks."""
        return f"{bound} if {condition} else tl.full({shape}, True, tl.int1)"

    def _inside_columns(self, place: str, extent: int) -> str:
        if isinstance(extent, Size):
            return f"{place} < {extent}"
        return self._inside(f"{place} < {extent}", f"{extent} % BLOCK_COLS != 0", "(1, BLOCK_COLS)")

    def _in_block(self, place: str) -> str:
        """A number of the program, in 32 bits if indices of its block fit them and its own do not."""
        narrow = self.scheduled.wide_index and not self.scheduled.wide_in_block
        return f"({place}).to(tl.int32)" if narrow else place

    def _place_columns(self, begin: str) -> None:
        columns = "tl.arange(0, BLOCK_COLS)[None, :]"
        if self.scheduled.wide_in_block and self.scheduled.kind == "rows":
            columns += ".to(tl.int64)"
        begin = "piece * BLOCK_COLS" if self.scheduled.pieces > 1 else begin
        columns = f"{self._in_block(begin) if begin else ''}{' + ' if begin else ''}{columns}"
        if self.scheduled.cuts_columns:
            *outer, inner = self.nest.cols
            self.put(f"{self.col_axes[-1]} = {columns}")
            self.put(f"col_ok = {self._inside_columns(self.col_axes[-1], inner)}")
            if len(outer) > 1:
                self.unravel("outer", self.col_axes[:-1], tuple(outer))
            else:
                self.put(f"{self.col_axes[0]} = outer")
            begin = f"outer * {inner} + {begin}"
            self.put(f"col = outer * {inner} + {self.col_axes[-1]}")
        else:
            self.put(f"col = {columns}")
            self.put(f"col_ok = {self._inside_columns('col', self.nest.col_count)}")
            self.unravel("col", self.col_axes, self.nest.cols)
        self.put_groups(begin, "BLOCK_COLS", "[None, :]")
        if self.nest.rows and not (self.scheduled.sums and self.scheduled.whole_row):
            self.put("ok = row_ok & col_ok")

    def _strip(self) -> str:
        return "strip" if self.scheduled.splits_columns else self.program()

    def _scanned(self, i: int) -> str:
        """The operand of a scan, with the identity beyond the last column."""
        step = self.nest.steps[i]
        return f"tl.where(col_ok, {self.operand(step.args[0])}, {identity(step.kind or '', step.dtype)})"

    def _finish(self, i: int, accumulated: str) -> None:
        step = self.nest.steps[i]
        if i in self.scheduled.divided_sums:
            self.put(f"total{i} = {accumulated}")
            accumulated = f"total{i}"
        convert = "" if accumulator_dtype(step) == step.dtype else f".to({type_name(step.dtype)})"
        self.put(f"{self.values[i]} = {accumulated}{convert}")
        if i in self.scheduled.late_scalars:
            self.put(f"tl.store(part{i}_ptr + origin, {self.values[i]})")

    def _bounded(self, step: Step, axis: int) -> str:
        """The operand of a reduction, with the identity in lanes outside the nest."""
        source = self.nest.steps[step.args[0]]
        rows = axis == 0
        cols = source.level in (Level.FULL, Level.COL)
        # Only the lanes outside the reduced axis must be masked.
        inside = self.bounds(rows, cols and axis == 1)
        return f"tl.where({inside}, {self.operand(step.args[0], wide=True)}, {identity(step.kind or '', step.dtype)})"

    def _widened(self, step: Step, text: str) -> str:
        """Operands of a reduction in the dtype of its accumulator."""
        return text if self.accumulator(step) == step.dtype else f"{text}.to({type_name(self.accumulator(step))})"

    # Column sums

    def _sums_in_memory(self) -> bool:
        return not self.scheduled.whole_row and any(self.nest.steps[i].level is Level.COL for i in self.scheduled.sums)

    def _in_memory(self, i: int) -> bool:
        return not self.scheduled.whole_row and self.nest.steps[i].level is Level.COL

    def _partial(self, i: int) -> str:
        """The address of this program's partial sum `i`."""
        strip = "strip" if self.scheduled.splits_columns else "tl.program_id(0)"
        if self.nest.steps[i].level is Level.COL:
            return f"part{i}_ptr + {strip}.to(tl.int64) * {self.nest.col_count} + col"
        return f"part{i}_ptr + {strip} + origin"

    def _begin_sums(self) -> None:
        for i in self.scheduled.sums:
            step = self.nest.steps[i]
            if not self._in_memory(i):
                self.put(f"total{i} = {self.blank(step, 'BLOCK_ROWS' if self.scheduled.sums_apart else '1')}")
                continue
            self.open(f"for start in range(0, {self.nest.col_count}, BLOCK_COLS):")
            self.put("col = start + tl.arange(0, BLOCK_COLS)[None, :]")
            self.put(f"tl.store({self._partial(i)}, {self.blank(step)}, mask=col < {self.nest.col_count})")
            self.close()
        if self._sums_in_memory():
            self.put("tl.debug_barrier()")

    def _add_to_sum(self, i: int, step: Step) -> None:
        kind, dtype = step.kind or "", step.dtype
        part = self._widened(step, self._bounded(step, 0))
        if not self.scheduled.sums_apart:
            part = reduce(kind, self.accumulator(step), part, 0)
        if dtype == "bool":
            part = f"({part})"
        if not self._in_memory(i):
            self.put(f"total{i} = {combine(kind, dtype, f'total{i}', part)}")
            return
        self.put(f"total{i} = tl.load({self._partial(i)}, mask=col_ok)")
        self.put(f"tl.store({self._partial(i)}, {combine(kind, dtype, f'total{i}', part)}, mask=col_ok)")

    def _end_sums(self, known: Sequence[int]) -> None:
        """Store the sums for the second kernel; if there is only one strip, compute the steps that depend on them."""
        if self.scheduled.one_strip:
            self._finish_sums(known)
            return
        for i in self.scheduled.sums:
            if not self._in_memory(i):
                step = self.nest.steps[i]
                if self.scheduled.sums_apart:
                    self.put(f"total{i} = {reduce(step.kind or '', self.accumulator(step), f'total{i}', 0)}")
                mask = ", mask=col_ok" if self.nest.steps[i].level is Level.COL else ""
                self.put(f"tl.store({self._partial(i)}, total{i}{mask})")

    def _finish_sums(self, known: Sequence[int]) -> None:
        sums = self.scheduled.sums
        for i in sums:
            step = self.nest.steps[i]
            self._finish(i, reduce(step.kind or "", accumulator_dtype(step), f"total{i}", 0))
        late = self.nest.late_stores
        for i in self.nest.behind((s.value for s in late), passes=lambda i: i not in sums):
            if i not in sums and i not in known:
                self.declare(i)
        for store in late:
            self.store(store)
