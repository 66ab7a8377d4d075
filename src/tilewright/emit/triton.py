"""A nest as Triton: one kernel that a person can read, and where there are column sums a second that ends them.

Values are blocks: `[BLOCK_ROWS, BLOCK_COLS]` where they vary with both, with length 1 along what they
do not vary with. A row is held whole where it fits (`Form.whole_row`); a longer one is walked in
blocks of columns once a stage, and what a later stage needs is computed again. Column sums are
carried by each program over its strip of rows, and its share of the columns where no reduction needs
whole rows, left in a scratch buffer `[strips, columns]` and combined in their order: the result is
the same at every run. All sums are carried in double, because their terms may cancel.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.emit.triton_form import Form, carrier
from tilewright.emit.triton_printer import Printer
from tilewright.emit.triton_step import combine, identity, reduce, type_name
from tilewright.loops.nest import Level, Nest, Step, Store

HEAD = "import triton\nimport triton.language as tl\n\nfrom tilewright.emit import triton_math as tw\n"


def emit_triton(nest: Nest, comment: str = "") -> str:
    """The source of a module with the kernel `NAME` and, after column sums, `NAME_after`.

    Both take a pointer for every buffer of the nest in order, then one for the scratch of each column
    sum, then block sizes (`tilewright.runtime.gpu` chooses them).
    """
    form = Form(nest)
    text = f"# {comment}\n{HEAD}" if comment else HEAD
    text += "\n\n" + _Main(form).text()
    return text + "\n\n" + _After(form).text() if form.sums else text


class _Main(Printer):
    """The kernel that runs over the rows."""

    def text(self) -> str:
        self.stores = [s for s in self.nest.stores if not self.form.is_late(s.value)]
        roots = [s.value for s in self.stores] + list(self.form.scratch)
        self.needed = self.closure(roots)
        if self.form.kind == "flat":
            self._flat()
            return self.define(self.nest.name, ["BLOCK"])
        self.put(f'"""{self._extents()}."""')
        if self.form.kind == "tiles":
            self._tiles()
        else:
            self._rows()
        return self.define(
            self.nest.name, ["BLOCK_ROWS", "BLOCK_COLS"] + (["TILES", "AHEAD"] if self.form.sums else [])
        )

    def _extents(self) -> str:
        rows, cols = (" × ".join(map(str, extents)) for extents in (self.nest.rows, self.nest.cols))
        if not rows:
            return f"One row of {cols} columns"
        if self.form.kind == "tiles":
            return f"{rows} rows of {cols} columns"
        owned = "TILES × BLOCK_ROWS" if self.form.sums else "BLOCK_ROWS"
        part = " and BLOCK_COLS of the columns" if self.form.splits_columns else ""
        return f"{rows} rows of {cols} columns; a program owns {owned} of the rows{part}"

    # Elementwise

    def _flat(self) -> None:
        self.put(f"i = {self.program()} * BLOCK + tl.arange(0, BLOCK)")
        self.put(f"ok = i < {self.nest.col_count}")
        self.unravel("i", self.col_axes, self.nest.cols)
        self._compute_and_store()

    def _tiles(self) -> None:
        across = f"tl.cdiv({self.nest.col_count}, BLOCK_COLS)"
        self.put(f"program = {self.program()}")
        self._place_rows(f"(program // {across})")
        self._place_columns(f"(program % {across}) * BLOCK_COLS")
        self._compute_and_store()

    def _compute_and_store(self) -> None:
        for i in self.needed:
            self.declare(i)
        for store in self.stores:
            self.store(store)

    def _place_rows(self, tile: str) -> None:
        if self.nest.rows:
            self.put(f"row = {tile} * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]")
            self.put(f"row_ok = row < {self.nest.row_count}")
            self.unravel("row", self.row_axes, self.nest.rows)

    def _place_columns(self, begin: str) -> None:
        columns = "tl.arange(0, BLOCK_COLS)[None, :]"
        if self.form.wide_index and self.form.kind == "rows":
            columns += ".to(tl.int64)"
        self.put(f"col = {begin}{' + ' if begin else ''}{columns}")
        self.put(f"col_ok = col < {self.nest.col_count}")
        self.unravel("col", self.col_axes, self.nest.cols)
        if self.nest.rows and not (self.form.sums and self.form.whole_row):
            self.put("ok = row_ok & col_ok")

    # Rows with reductions

    def _rows(self) -> None:
        whole, columns = self.form.whole_row, self.form.uses_columns
        if self.form.splits_columns:
            self._place_strip()
        elif whole and columns and self.form.sums:
            self._place_columns("")
        before = self._independent_of_rows() if whole and self.form.sums else []
        for i in before:
            self._step(i)
        self._begin_sums()
        if self.form.sums:
            self.open("for tile in tl.range(TILES, num_stages=AHEAD):")
        self._place_rows(f"({self._strip()} * TILES + tile)" if self.form.sums else self.program())
        if whole:
            if columns and not self.form.sums:
                self._place_columns("")
            elif columns and self.nest.rows:
                self.put("ok = row_ok & col_ok")
            for i in self._loads_first(set(self.needed).difference(before)):
                self._step(i)
            for store in self.stores:
                self.store(store)
        else:
            for stage in range(self.nest.stages + 1):
                self._stage(stage)
            if self._sums_in_memory():
                self.put("tl.debug_barrier()")
        if self.form.sums:
            self.close()
        self._end_sums()

    def _place_strip(self) -> None:
        across = f"tl.cdiv({self.nest.col_count}, BLOCK_COLS)"
        self.put(f"program = {self.program()}")
        self.put(f"strip = program // {across}")
        self._place_columns(f"(program % {across}) * BLOCK_COLS")

    def _strip(self) -> str:
        return "strip" if self.form.splits_columns else self.program()

    def _independent_of_rows(self) -> list[int]:
        """What all rows of a strip share, loaded and computed once."""
        alike = (Level.COL, Level.SCALAR)
        return [i for i in self.needed if self.nest.steps[i].level in alike and i not in self.form.sums]

    def _loads_first(self, steps: Iterable[int]) -> list[int]:
        """In order, but no load waits for a reduction, at whose barriers compilers leave it."""
        return sorted(steps, key=lambda i: (self.nest.steps[i].name != "load", i))

    def _step(self, i: int) -> None:
        step = self.nest.steps[i]
        if step.name == "reduce_cols":
            self._finish(i, reduce(step.kind or "", carrier(step), self._bounded(step, 1), 1))
        elif step.name == "reduce_rows":
            self._add_to_sum(i, step)
        else:
            self.declare(i)

    def _finish(self, i: int, carried: str) -> None:
        step = self.nest.steps[i]
        convert = "" if carrier(step) == step.dtype else f".to({type_name(step.dtype)})"
        self.put(f"{self.values[i]} = {carried}{convert}")
        if i in self.form.carried:
            self.put(f"tl.store(part{i}_ptr + origin, {self.values[i]})")

    def _bounded(self, step: Step, axis: int) -> str:
        """The operand of a reduction as it is carried, lanes outside the nest set to what changes nothing."""
        source = self.nest.steps[step.args[0]]
        rows = axis == 0
        cols = source.level in (Level.FULL, Level.COL)
        # Rows outside take part only in a reduction over the rows, columns outside only in one over them.
        inside = self.bounds(rows, cols and axis == 1)
        text = f"tl.where({inside}, {self.operand(step.args[0])}, {identity(step.kind or '', step.dtype)})"
        return text if carrier(step) == step.dtype else f"{text}.to({type_name(carrier(step))})"

    # Long rows: one walk over blocks of columns a stage

    def _stage(self, stage: int) -> None:
        steps = self.nest.steps
        for i in self.needed:
            step = steps[i]
            if step.stage == stage and step.level in (Level.ROW, Level.SCALAR):
                if i in self.form.sums:
                    self._add_to_sum(i, step)
                elif step.name != "reduce_cols":
                    self.declare(i)
        for store in self.stores:
            if not self._covers_columns(store) and self._known_at(store.value) == stage:
                self.store(store)
        self._walk(stage)

    def _known_at(self, i: int) -> int:
        step = self.nest.steps[i]
        return step.stage + (step.name == "reduce_cols")

    def _covers_columns(self, store: Store) -> bool:
        return any(self.nest.split(store.access.strides)[1])

    def _walk(self, stage: int) -> None:
        steps = self.nest.steps
        ends = [i for i in self.needed if steps[i].name == "reduce_cols" and steps[i].stage == stage]
        sums = [i for i in self.form.sums if steps[i].level is Level.COL and steps[i].stage == stage]
        stores = [s for s in self.stores if self._covers_columns(s) and self._known_at(s.value) == stage]
        roots = [steps[i].args[0] for i in ends + sums] + [s.value for s in stores]
        if not roots:
            return
        for i in ends:
            step = steps[i]
            rows = "BLOCK_ROWS" if steps[step.args[0]].level is Level.FULL else "1"
            self.put(f"acc{i} = {self.blank(step, rows)}")
        self.open(f"for start in range(0, {self.nest.col_count}, BLOCK_COLS):")
        self._place_columns("start")
        for i in self._column_steps(roots):
            self.declare(i)
        for i in ends:
            self.put(f"acc{i} = {combine(steps[i].kind or '', steps[i].dtype, f'acc{i}', self._bounded(steps[i], 1))}")
        for i in sums:
            self._add_to_sum(i, steps[i])
        for store in stores:
            self.store(store)
        self.close()
        for i in ends:
            self._finish(i, reduce(steps[i].kind or "", carrier(steps[i]), f"acc{i}", 1))

    def _column_steps(self, roots: list[int]) -> list[int]:
        """What each block of columns computes for `roots`; row values are known by then."""
        needed: set[int] = set()
        todo = list(roots)
        while todo:
            i = todo.pop()
            if i not in needed and self.nest.steps[i].level in (Level.FULL, Level.COL):
                needed.add(i)
                todo.extend(self.nest.steps[i].args)
        return sorted(needed)

    # Column sums

    def _sums_in_memory(self) -> bool:
        return not self.form.whole_row and any(self.nest.steps[i].level is Level.COL for i in self.form.sums)

    def _in_memory(self, i: int) -> bool:
        return not self.form.whole_row and self.nest.steps[i].level is Level.COL

    def _partial(self, i: int) -> str:
        """Where this program leaves its part of sum `i`."""
        strip = "strip" if self.form.splits_columns else "tl.program_id(0)"
        if self.nest.steps[i].level is Level.COL:
            return f"part{i}_ptr + {strip}.to(tl.int64) * {self.nest.col_count} + col"
        return f"part{i}_ptr + {strip} + origin"

    def _begin_sums(self) -> None:
        for i in self.form.sums:
            step = self.nest.steps[i]
            if not self._in_memory(i):
                self.put(f"total{i} = {self.blank(step)}")
                continue
            self.open(f"for start in range(0, {self.nest.col_count}, BLOCK_COLS):")
            self.put("col = start + tl.arange(0, BLOCK_COLS)[None, :]")
            self.put(f"tl.store({self._partial(i)}, {self.blank(step)}, mask=col < {self.nest.col_count})")
            self.close()
        if self._sums_in_memory():
            self.put("tl.debug_barrier()")

    def _add_to_sum(self, i: int, step: Step) -> None:
        kind, dtype = step.kind or "", step.dtype
        part = reduce(kind, carrier(step), self._bounded(step, 0), 0)
        if dtype == "bool":
            part = f"({part})"
        if not self._in_memory(i):
            self.put(f"total{i} = {combine(kind, dtype, f'total{i}', part)}")
            return
        self.put(f"total{i} = tl.load({self._partial(i)}, mask=col_ok)")
        self.put(f"tl.store({self._partial(i)}, {combine(kind, dtype, f'total{i}', part)}, mask=col_ok)")

    def _end_sums(self) -> None:
        for i in self.form.sums:
            if not self._in_memory(i):
                mask = ", mask=col_ok" if self.nest.steps[i].level is Level.COL else ""
                self.put(f"tl.store({self._partial(i)}, total{i}{mask})")


class _After(Printer):
    """The kernel that combines the programs' column sums and computes what depends on them."""

    def text(self) -> str:
        late = [s for s in self.nest.stores if self.form.is_late(s.value)]
        sizes = ["PARTS", "BLOCK_PARTS"]
        if self.form.late_columns:
            sizes.append("BLOCK_COLS")
            self.put(f"col = {self.program()} * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]")
            self.put(f"col_ok = col < {self.nest.col_count}")
            self.unravel("col", self.col_axes, self.nest.cols)
        for i in self.closure((s.value for s in late), known=self.form.scratch):
            if i in self.form.sums:
                self._combine(i)
            elif i in self.form.carried:
                self.put(f"{self.values[i]} = tl.load(part{i}_ptr + origin)")
            else:
                self.declare(i)
        for store in late:
            self.store(store)
        return self.define(f"{self.nest.name}_after", sizes)

    def _combine(self, i: int) -> None:
        step = self.nest.steps[i]
        kind, carried = step.kind or "", carrier(step)
        wide = step.level is Level.COL
        start = identity(kind, step.dtype)
        self.put(f"total{i} = {self.blank(step)}")
        self.open("for start in range(0, PARTS, BLOCK_PARTS):")
        self.put("part = start + tl.arange(0, BLOCK_PARTS)[:, None]")
        self.put("part_ok = part < PARTS")
        place = f"part.to(tl.int64) * {self.nest.col_count} + col" if wide else "part"
        mask = "part_ok & col_ok" if wide else "part_ok"
        self.put(f"found = tl.load(part{i}_ptr + {place}, mask={mask}, other={start})")
        gathered = reduce(kind, carried, "found", 0)
        if step.dtype == "bool":
            gathered = f"({gathered})"
        self.put(f"total{i} = {combine(kind, step.dtype, f'total{i}', gathered)}")
        self.close()
        convert = f".to({type_name(step.dtype)})" if carried != step.dtype else ""
        self.put(f"{self.values[i]} = total{i}{convert}")
