"""Emits a nest as a readable Triton kernel, with a second kernel that combines column sums if there are any.

Values are blocks `[BLOCK_ROWS, BLOCK_COLS]`, with length 1 along axes that they do not vary with. A program holds
a whole row if it fits (`TritonSchedule.whole_row`), in several pieces (`x_0of3`) where its length is no power of two;
over a longer row each stage loops in blocks of columns and recomputes the values that it needs of earlier stages. For
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

from tilewright.emit.triton_combine import Combine
from tilewright.emit.triton_printer import Printer
from tilewright.emit.triton_schedule import SHORT_ROW, TritonSchedule, accumulator_dtype
from tilewright.emit.triton_step import combine, identity, reduce, scan, type_name
from tilewright.loops.nest import Level, Nest, Step, Store

HEAD = "import triton\nimport triton.language as tl\n"
LIBDEVICE = "from triton.language.extra import libdevice\n"
MATH = "\nfrom tilewright.emit import triton_math as tw\n"
DRAWS = "from tilewright.emit import triton_draw as draw\n"


def emit_triton(nest: Nest, comment: str = "") -> str:
    """The source of a module with the kernel `NAME` and, if there are column sums, `NAME_after`.

    Both take a pointer for each buffer of the nest in order, then one for the scratch of each column sum, then the
    launch's numbers, then block sizes (`tilewright.launch.blocking` chooses them).
    """
    schedule = TritonSchedule(nest)
    kernels = "\n\n" + _Main(schedule).text()
    if schedule.sums and not schedule.one_strip:
        kernels += "\n\n" + Combine(schedule).text()
    head = f"# {comment}\n{HEAD}" if comment else HEAD
    head += LIBDEVICE if "libdevice." in kernels else ""
    return head + MATH + (DRAWS if any(step.name == "draw" for step in nest.steps) else "") + kernels


class _Main(Printer):
    """The kernel that runs over the rows."""

    def text(self) -> str:
        timed = zip(self.nest.stores, self.nest.store_stages(), strict=True)
        self.timed = [(store, stage) for store, stage in timed if not self.schedule.is_late(store.value)]
        self.stores = [store for store, _ in self.timed]
        roots = [s.value for s in self.stores] + list(self.schedule.sums + self.schedule.late_scalars)
        self.needed = self.nest.behind(roots)
        if self.schedule.kind == "flat":
            self._flat()
            return self.define(self.nest.name, ["BLOCK"])
        self.put(f'"""{self._extents()}."""')
        if self.schedule.kind == "tiles":
            self._tiles()
        else:
            self.in_pieces = self.names_in_pieces()
            self._rows()
        return self.define(
            self.nest.name, ["BLOCK_ROWS", "BLOCK_COLS"] + (["TILES", "AHEAD"] if self.schedule.sums else [])
        )

    def accumulator(self, step: Step) -> str:
        return self.schedule.accumulator(step)

    def _extents(self) -> str:
        cols = " × ".join(map(str, self.nest.cols))
        if not self.nest.rows:
            return f"One row of {cols} columns"
        rows = " × ".join(["Rows", *map(str, self.nest.rows[1:])])
        if self.schedule.kind == "tiles":
            return f"{rows} of {cols} columns"
        owned = "TILES × BLOCK_ROWS" if self.schedule.sums else "BLOCK_ROWS"
        part = " and BLOCK_COLS of the columns" if self.schedule.splits_columns else ""
        return f"{rows} of {cols} columns; a program owns {owned} of the rows{part}"

    # Elementwise

    def _flat(self) -> None:
        self.put(f"i = {self.program()} * BLOCK + tl.arange(0, BLOCK)")
        self.put(f"ok = i < {self.schedule.end}")
        self.unravel("i", self.col_axes, self.nest.cols)
        self.put_groups(f"{self.program()} * BLOCK", "BLOCK", "")
        self._compute_and_store()

    def _tiles(self) -> None:
        across = f"tl.cdiv({self.nest.col_count}, BLOCK_COLS)"
        self.put(f"program = {self.program()}")
        self._place_rows(f"(program // {across})")
        self._place_columns(f"(program % {across}) * BLOCK_COLS")
        self._compute_and_store()

    def _compute_and_store(self) -> None:
        for i in self._in_order(self.needed):
            self.declare(i)
        for store in self.stores:
            self.store(store)

    def _place_rows(self, tile: str) -> None:
        if self.nest.rows:
            self.put(f"row = {tile} * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]")
            self.put(f"row_ok = row < {self.schedule.end}")
            self.unravel("row", self.row_axes, self.nest.rows)

    def _in_block(self, place: str) -> str:
        """A number of the program, in 32 bits if indices of its block fit them and its own do not."""
        narrow = self.schedule.wide_index and not self.schedule.wide_in_block
        return f"({place}).to(tl.int32)" if narrow else place

    def _place_columns(self, begin: str) -> None:
        columns = "tl.arange(0, BLOCK_COLS)[None, :]"
        if self.schedule.wide_in_block and self.schedule.kind == "rows":
            columns += ".to(tl.int64)"
        begin = "piece * BLOCK_COLS" if self.schedule.pieces > 1 else begin
        columns = f"{self._in_block(begin) if begin else ''}{' + ' if begin else ''}{columns}"
        if self.schedule.cuts_columns:
            *outer, inner = self.nest.cols
            self.put(f"{self.col_axes[-1]} = {columns}")
            self.put(f"col_ok = {self.col_axes[-1]} < {inner}")
            if len(outer) > 1:
                self.unravel("outer", self.col_axes[:-1], tuple(outer))
            else:
                self.put(f"{self.col_axes[0]} = outer")
            begin = f"outer * {inner} + {begin}"
            self.put(f"col = outer * {inner} + {self.col_axes[-1]}")
        else:
            self.put(f"col = {columns}")
            self.put(f"col_ok = col < {self.nest.col_count}")
            self.unravel("col", self.col_axes, self.nest.cols)
        self.put_groups(begin, "BLOCK_COLS", "[None, :]")
        if self.nest.rows and not (self.schedule.sums and self.schedule.whole_row):
            self.put("ok = row_ok & col_ok")

    # Rows with reductions

    def _rows(self) -> None:
        whole, columns = self.schedule.whole_row, self.schedule.uses_columns
        if self.schedule.splits_columns:
            self._place_strip()
        elif whole and columns and self.schedule.sums:
            self._place_columns("")
        before = self._independent_of_rows() if whole and self.schedule.sums else []
        for i in before:
            self._step(i)
        self._begin_sums()
        if self.schedule.sums:
            self.open("for tile in tl.range(TILES, num_stages=AHEAD):")
        self._place_rows(f"({self._strip()} * TILES + tile)" if self.schedule.sums else self.program())
        if whole:
            if columns and not self.schedule.sums:
                self._place_columns("")
            elif columns and self.nest.rows:
                self.put("ok = row_ok & col_ok")
            for i in self._in_order(set(self.needed).difference(before), loads_first=True):
                self._step(i)
            for store in self.stores:
                self.store(store)
        else:
            for stage in range(self.nest.stages + 1):
                self._stage(stage)
            if self._sums_in_memory():
                self.put("tl.debug_barrier()")
        if self.schedule.sums:
            self.close()
        self._end_sums(known=before)

    def _place_strip(self) -> None:
        self.put(f"program = {self.program()}")
        if self.schedule.cuts_columns:
            *outer, inner = self.nest.cols
            blocks = f"tl.cdiv({inner}, BLOCK_COLS)"
            self.put(f"strip = {self._in_block(f'program // ({prod(outer)} * {blocks})')}")
            self.put(f"outer = program // {blocks} % {prod(outer)}")
        else:
            blocks = f"tl.cdiv({self.nest.col_count}, BLOCK_COLS)"
            self.put(f"strip = program // {blocks}")
        self._place_columns(f"(program % {blocks}) * BLOCK_COLS")

    def _strip(self) -> str:
        return "strip" if self.schedule.splits_columns else self.program()

    def _independent_of_rows(self) -> list[int]:
        """Steps that do not vary with the rows: computed once per strip."""
        alike = (Level.COL, Level.SCALAR)
        return [i for i in self.needed if self.nest.steps[i].level in alike and i not in self.schedule.sums]

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
        if loads_first and self.schedule.row_lanes > SHORT_ROW and not self.nest.transposes:
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
        if self.schedule.pieces == 1 or self.nest.steps[step.args[0]].level not in (Level.FULL, Level.COL):
            return self._widened(step, terms)
        self.put(f"acc{i} = {terms}")
        parts = [self.of_piece(f"acc{i}", piece) for piece in range(self.schedule.pieces)]
        if self.accumulator(step) != step.dtype:
            # Add pairs before converting: a GPU converts to double at an eighth of the rate at which it adds.
            pairs = [f"({a} + {b})" for a, b in zip(parts[:-1:2], parts[1::2], strict=True)]
            parts = [self._widened(step, f"({' + '.join(pairs)})"), self._widened(step, parts[-1])]
        return functools.reduce(lambda a, b: combine(step.kind or "", step.dtype, a, b), parts)

    def text_of(self, i: int, step: Step) -> str:
        if step.name != "scan":
            return super().text_of(i, step)
        here = scan(step.kind or "", self._scanned(i))
        return here if self.schedule.whole_row else combine(step.kind or "", step.dtype, f"carry{i}", here)

    def _scanned(self, i: int) -> str:
        """The operand of a scan, with the identity beyond the last column."""
        step = self.nest.steps[i]
        return f"tl.where(col_ok, {self.operand(step.args[0])}, {identity(step.kind or '', step.dtype)})"

    def _finish(self, i: int, accumulated: str) -> None:
        step = self.nest.steps[i]
        if i in self.schedule.divided_sums:
            self.put(f"total{i} = {accumulated}")
            accumulated = f"total{i}"
        convert = "" if accumulator_dtype(step) == step.dtype else f".to({type_name(step.dtype)})"
        self.put(f"{self.values[i]} = {accumulated}{convert}")
        if i in self.schedule.late_scalars:
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

    # Long rows: each stage loops over blocks of columns

    def _stage(self, stage: int) -> None:
        steps = self.nest.steps
        for i in self.needed:
            step = steps[i]
            if step.stage == stage and step.level in (Level.ROW, Level.SCALAR):
                if i in self.schedule.sums:
                    self._add_to_sum(i, step)
                elif step.name != "reduce_cols":
                    self.declare(i)
        for store, known in self.timed:
            if known == stage and not self._covers_columns(store):
                self.store(store)
        self._loop_over_columns(stage)

    def _covers_columns(self, store: Store) -> bool:
        return any(self.nest.split(store.access.strides)[1])

    def _loop_over_columns(self, stage: int) -> None:
        steps = self.nest.steps
        ends = [i for i in self.needed if steps[i].name == "reduce_cols" and steps[i].stage == stage]
        sums = [i for i in self.schedule.sums if steps[i].level is Level.COL and steps[i].stage == stage]
        stores = [s for s, known in self.timed if known == stage and self._covers_columns(s)]
        roots = [steps[i].args[0] for i in ends + sums] + [s.value for s in stores]
        if not roots:
            return
        for i in ends:
            step = steps[i]
            rows = "BLOCK_ROWS" if steps[step.args[0]].level is Level.FULL else "1"
            self.put(f"acc{i} = {self.blank(step, rows)}")
        # Row values are declared already.
        inside = self.nest.behind(roots, includes=lambda i: steps[i].level in (Level.FULL, Level.COL))
        scans = [i for i in self.schedule.scans if i in inside]
        for i in scans:
            rows = "BLOCK_ROWS" if steps[i].level is Level.FULL else "1"
            start = identity(steps[i].kind or "", steps[i].dtype)
            self.put(f"carry{i} = tl.full(({rows}, 1), {start}, {type_name(steps[i].dtype)})")
        self.open(f"for start in range(0, {self.nest.col_count}, BLOCK_COLS):")
        self._place_columns("start")
        for i in self._in_order(inside):
            self.declare(i)
        for i in scans:
            kind, dtype = steps[i].kind or "", steps[i].dtype
            self.put(f"carry{i} = {combine(kind, dtype, f'carry{i}', reduce(kind, dtype, self._scanned(i), 1))}")
        for i in ends:
            terms = self._widened(steps[i], self._bounded(steps[i], 1))
            self.put(f"acc{i} = {combine(steps[i].kind or '', steps[i].dtype, f'acc{i}', terms)}")
        for i in sums:
            self._add_to_sum(i, steps[i])
        for store in stores:
            self.store(store)
        self.close()
        for i in ends:
            self._finish(i, reduce(steps[i].kind or "", accumulator_dtype(steps[i]), f"acc{i}", 1))

    # Column sums

    def _sums_in_memory(self) -> bool:
        return not self.schedule.whole_row and any(self.nest.steps[i].level is Level.COL for i in self.schedule.sums)

    def _in_memory(self, i: int) -> bool:
        return not self.schedule.whole_row and self.nest.steps[i].level is Level.COL

    def _partial(self, i: int) -> str:
        """The address of this program's partial sum `i`."""
        strip = "strip" if self.schedule.splits_columns else "tl.program_id(0)"
        if self.nest.steps[i].level is Level.COL:
            return f"part{i}_ptr + {strip}.to(tl.int64) * {self.nest.col_count} + col"
        return f"part{i}_ptr + {strip} + origin"

    def _begin_sums(self) -> None:
        for i in self.schedule.sums:
            step = self.nest.steps[i]
            if not self._in_memory(i):
                self.put(f"total{i} = {self.blank(step, 'BLOCK_ROWS' if self.schedule.sums_apart else '1')}")
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
        if not self.schedule.sums_apart:
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
        if self.schedule.one_strip:
            self._finish_sums(known)
            return
        for i in self.schedule.sums:
            if not self._in_memory(i):
                step = self.nest.steps[i]
                if self.schedule.sums_apart:
                    self.put(f"total{i} = {reduce(step.kind or '', self.accumulator(step), f'total{i}', 0)}")
                mask = ", mask=col_ok" if self.nest.steps[i].level is Level.COL else ""
                self.put(f"tl.store({self._partial(i)}, total{i}{mask})")

    def _finish_sums(self, known: Sequence[int]) -> None:
        sums = self.schedule.sums
        for i in sums:
            step = self.nest.steps[i]
            self._finish(i, reduce(step.kind or "", accumulator_dtype(step), f"total{i}", 0))
        late = [s for s in self.nest.stores if self.schedule.is_late(s.value)]
        for i in self.nest.behind((s.value for s in late), passes=lambda i: i not in sums):
            if i not in sums and i not in known:
                self.declare(i)
        for store in late:
            self.store(store)
