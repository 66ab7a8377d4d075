"""A nest as Triton: one kernel that a person can read, and where there are column sums a second that ends them.

Values are blocks: `[BLOCK_ROWS, BLOCK_COLS]` where they vary with both, with length 1 along what they
do not vary with. A row is held whole where it fits (`Form.whole_row`); a longer one is walked in
blocks of columns once a stage, and what a later stage needs is computed again. Column sums are
carried by each program over its strip of rows, left in a scratch buffer `[programs, columns]` and
combined in program order: the result is the same at every run. All sums are carried in double,
because their terms may cancel.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from tilewright.emit.triton_form import Form, carrier
from tilewright.emit.triton_step import combine, expression, identity, literal, reduce, to_storage, type_name
from tilewright.loops.nest import Level, Nest, Step, Store

HEAD = "import triton\nimport triton.language as tl\n\nfrom tilewright.emit import triton_math as tw\n"
RESERVED = frozenset(
    [
        "row",
        "col",
        "i",
        "row_ok",
        "col_ok",
        "ok",
        "origin",
        "program",
        "tile",
        "start",
        "part",
        "part_ok",
        "found",
        "tl",
        "tw",
    ]
)
"""Names that the kernels use themselves."""
LINE = 110


def emit_triton(nest: Nest, comment: str = "") -> str:
    """The source of a module with the kernel `NAME` and, after column sums, `NAME_after`.

    Both take a pointer for every buffer of the nest in order, then one for the scratch of each column
    sum, then block sizes (`tilewright.runtime.gpu` chooses them).
    """
    form = Form(nest)
    text = f"# {comment}\n{HEAD}" if comment else HEAD
    text += "\n\n" + _Main(form).text()
    return text + "\n\n" + _After(form).text() if form.sums else text


class _Printer:
    """What both kernels share: names, indices, masks, and the text of a step."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.nest = form.nest
        self.lines: list[str] = []
        self.depth = 1
        self.names = _names(self.nest)
        taken = set(self.names) | RESERVED
        loads = [s.access.buffer for s in self.nest.steps if s.access]
        self.values = [_value_name(i, s, self.names, loads, taken) for i, s in enumerate(self.nest.steps)]
        self.row_axes = _axes("row", len(self.nest.rows))
        self.col_axes = _axes("i" if form.kind == "flat" else "col", len(self.nest.cols))

    def put(self, line: str = "") -> None:
        self.lines.append("    " * self.depth + line if line else "")

    def open(self, line: str) -> None:
        self.put(line)
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1

    def define(self, name: str, sizes: Iterable[str]) -> str:
        scratch = [f"part{i}_ptr" for i in self.form.scratch]
        arguments = [f"{n}_ptr" for n in self.names] + scratch + [f"{size}: tl.constexpr" for size in sizes]
        signature = f"def {name}({', '.join(arguments)}):"
        if len(signature) > LINE:
            inside = textwrap.wrap(", ".join(arguments), LINE - 4, break_long_words=False)
            signature = "\n    ".join([f"def {name}(", *inside]) + "\n):"
        return f"@triton.jit\n{signature}\n" + "\n".join(self._with_origin()) + "\n"

    def _with_origin(self) -> list[str]:
        """Single elements are blocks too: the interpreter does not broadcast bare scalars faithfully."""
        if not any("origin" in line for line in self.lines):
            return self.lines
        first = next(k for k, line in enumerate(self.lines) if not line.strip().startswith('"""'))
        shape = "(1,)" if self.form.kind == "flat" else "(1, 1)"
        return [*self.lines[:first], f"    origin = tl.full({shape}, 0, tl.int32)", *self.lines[first:]]

    def program(self) -> str:
        return "tl.program_id(0).to(tl.int64)" if self.form.wide_index else "tl.program_id(0)"

    def unravel(self, name: str, axes: list[str], extents: tuple[int, ...]) -> None:
        """Declare the index of each axis from the linear index `name`."""
        if len(axes) < 2:
            return
        inner = 1
        for number in reversed(range(len(axes))):
            text = name if inner == 1 else f"{name} // {inner}"
            self.put(f"{axes[number]} = {text}" + (f" % {extents[number]}" if number else ""))
            inner *= extents[number]

    def index(self, strides: tuple[int, ...]) -> str:
        axes = self.row_axes + self.col_axes
        terms = [a if s == 1 else f"{a} * {s}" for a, s in zip(axes, strides, strict=True) if s]
        return " + ".join(terms) or "origin"

    def mask(self, strides: tuple[int, ...]) -> str:
        """`, mask=…`, or nothing for a single element."""
        rows, cols = (any(part) for part in self.nest.split(strides))
        if not rows and not cols:
            return ""
        return f", mask={self.bounds(rows, cols)}"

    def bounds(self, rows: bool, cols: bool) -> str:
        if self.form.kind == "flat" or (rows and cols):
            return "ok"
        return "row_ok" if rows else "col_ok"

    def declare(self, i: int) -> None:
        step = self.nest.steps[i]
        if step.name != "const":
            self.put(f"{self.values[i]} = {self.text_of(i, step)}")

    def text_of(self, i: int, step: Step) -> str:
        if step.name == "load":
            assert step.access
            buffer = self.nest.buffers[step.access.buffer]
            strides = step.access.strides
            loaded = f"tl.load({self.names[step.access.buffer]}_ptr + {self.index(strides)}{self.mask(strides)})"
            return loaded if buffer.dtype == step.dtype else f"{loaded}.to({type_name(step.dtype)})"
        if step.name == "index":
            assert step.strides is not None
            return f"({self.index(step.strides)}).to(tl.int64)"
        operands = [a for a in step.args if self.nest.steps[a].dtype == self.nest.steps[step.args[-1]].dtype]
        varying = any(self.nest.steps[a].name != "const" for a in operands)
        last = self.nest.steps[step.args[-1]].dtype
        return expression(step, lambda a, literals: self.operand(a, literals and varying), last)

    def operand(self, i: int, as_literal: bool = False) -> str:
        step = self.nest.steps[i]
        if step.name != "const":
            return self.values[i]
        assert step.constant is not None
        number = literal(step.constant, step.dtype)
        shape = "(1,)" if self.form.kind == "flat" else "(1, 1)"
        return number if as_literal else f"tl.full({shape}, {number}, {type_name(step.dtype)})"

    def store(self, store: Store) -> None:
        buffer = self.nest.buffers[store.access.buffer]
        strides = store.access.strides
        pointer = f"{self.names[store.access.buffer]}_ptr + {self.index(strides)}"
        self.put(f"tl.store({pointer}, {to_storage(buffer.dtype, self.operand(store.value))}{self.mask(strides)})")

    def blank(self, step: Step, rows: str = "1") -> str:
        """A block that leaves the reduction `step` as it is: `rows` × the columns it keeps or walks."""
        columns = "BLOCK_COLS" if step.name == "reduce_cols" or step.level is Level.COL else "1"
        return f"tl.full(({rows}, {columns}), {identity(step.kind or '', step.dtype)}, {type_name(carrier(step))})"

    def closure(self, roots: Iterable[int]) -> list[int]:
        """`roots` and all they are computed from, in order."""
        needed: set[int] = set()
        todo = list(roots)
        while todo:
            i = todo.pop()
            if i not in needed:
                needed.add(i)
                if not (isinstance(self, _After) and i in self.form.scratch):
                    todo.extend(self.nest.steps[i].args)
        return sorted(needed)


class _Main(_Printer):
    """The kernel that runs over the rows."""

    def text(self) -> str:
        self.stores = [s for s in self.nest.stores if not self.form.is_late(s.value)]
        roots = [s.value for s in self.stores] + list(self.form.scratch)
        self.needed = self.closure(roots)
        rows, cols = (" × ".join(map(str, extents)) or "1" for extents in (self.nest.rows, self.nest.cols))
        if self.form.kind == "flat":
            self._flat()
            return self.define(self.nest.name, ["BLOCK"])
        self.put(f'"""Rows {rows}, columns {cols}{"" if self.form.kind == "tiles" else self._ownership()}."""')
        if self.form.kind == "tiles":
            self._tiles()
            return self.define(self.nest.name, ["BLOCK_ROWS", "BLOCK_COLS"])
        self._rows()
        return self.define(self.nest.name, ["BLOCK_ROWS", "BLOCK_COLS"] + (["TILES"] if self.form.sums else []))

    def _ownership(self) -> str:
        return "; a program owns TILES × BLOCK_ROWS rows" if self.form.sums else "; a program owns BLOCK_ROWS rows"

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
        if whole and columns and self.form.sums:
            self._place_columns("")
        before = self._independent_of_rows() if whole and self.form.sums else []
        for i in before:
            self._step(i)
        self._begin_sums()
        if self.form.sums:
            self.open("for tile in range(TILES):")
        self._place_rows(f"({self.program()} * TILES + tile)" if self.form.sums else self.program())
        if whole:
            if columns and not self.form.sums:
                self._place_columns("")
            elif columns and self.nest.rows:
                self.put("ok = row_ok & col_ok")
            for i in self.needed:
                if i not in before:
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

    def _independent_of_rows(self) -> list[int]:
        """What all rows of a strip share, loaded and computed once."""
        alike = (Level.COL, Level.SCALAR)
        return [i for i in self.needed if self.nest.steps[i].level in alike and i not in self.form.sums]

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
        if self.nest.steps[i].level is Level.COL:
            return f"part{i}_ptr + tl.program_id(0).to(tl.int64) * {self.nest.col_count} + col"
        return f"part{i}_ptr + tl.program_id(0) + origin"

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


class _After(_Printer):
    """The kernel that combines the programs' column sums and computes what depends on them."""

    def text(self) -> str:
        late = [s for s in self.nest.stores if self.form.is_late(s.value)]
        sizes = ["PARTS", "BLOCK_PARTS"]
        if self.form.late_columns:
            sizes.append("BLOCK_COLS")
            self.put(f"col = {self.program()} * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]")
            self.put(f"col_ok = col < {self.nest.col_count}")
            self.unravel("col", self.col_axes, self.nest.cols)
        for i in self.closure(s.value for s in late):
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


def _axes(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}{number}" for number in range(count)]


def _names(nest: Nest) -> list[str]:
    """One distinct identifier a buffer, from its graph name."""
    names: list[str] = []
    for number, buffer in enumerate(nest.buffers):
        names.append(f"{buffer.name}_{number}" if buffer.name in names else buffer.name)
    return names


def _value_name(i: int, step: Step, names: list[str], loads: list[int], taken: set[str]) -> str:
    """A buffer loaded in one place lends its name; other values are named after what they are."""
    if step.access and loads.count(step.access.buffer) == 1 and names[step.access.buffer] not in RESERVED:
        return names[step.access.buffer]
    name = f"{step.kind or step.name}{i}"
    return name + "_" if name in taken else name
