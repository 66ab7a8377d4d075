"""The Triton text shared by the kernels of a nest: names, indices, masks, single steps."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from tilewright.emit.narrow_integers import far_loads, narrow_steps
from tilewright.emit.scheduled_nest import ScheduledNest
from tilewright.emit.triton_step import expression, from_storage, identity, literal, to_storage, type_name
from tilewright.loops.nest import Level, Nest, Step, Store
from tilewright.schedule.facts import accumulator_dtype

RESERVED = frozenset(
    ["row", "col", "outer", "i", "row_ok", "col_ok", "ok", "origin", "program", "strip", "tile", "start", "part",
     "part_ok", "count", "found", "draw", "piece", "block", "step", "down", "begin", "lane", "tl", "tw", "libdevice",
     "float", "range", "BLOCK", "BLOCK_ROWS", "BLOCK_COLS", "MASKED_ROWS", "TILES", "AHEAD", "PARTS", "BLOCK_PARTS"]
)  # fmt: skip
"""Names that the emitted code uses, besides those that start with one of `NUMBERED` or end with `POINTER`."""
POINTER = "_ptr"
NUMBERED = ("row", "col", "size", "first", "total", "acc", "part", "skip", "carry", "terms", "next", "shift")
BYTES = ("bool", "int8", "uint8")
GROUPS = (8, 4)
"""Elements that are drawn together, with two calls of Philox or one."""
WORD = re.compile(r"(?<![.\w])\w+")
"""A name, not an attribute: `tw.mean` is no buffer named `mean`."""
PIECE = re.compile(r"_\d+of\d+$")
"""The end of a name that is one piece of a row."""
LINE = 110
"""Longer signatures are wrapped."""


class Printer:
    """Base of both kernels: names, indices, masks, and the text of a step."""

    numbers_outer_columns = False
    """Whether the outer columns are numbers, which are never out of bounds."""

    has_tiles = True
    """Whether values have rows and columns in tiles, in whose layout others are loaded."""

    divides_rows = False
    """Whether `row` is the first of a tile, `begin`, and the number in the tile, `lane`."""

    def __init__(self, scheduled: ScheduledNest) -> None:
        self.scheduled = scheduled
        self.nest = scheduled.nest
        self.lines: list[str] = []
        self.depth = 1
        self.names = _names(self.nest)
        taken = set(self.names) | RESERVED
        loads = [s.access.buffer for s in self.nest.steps if s.access]
        self.values = [_value_name(i, s, self.names, loads, taken) for i, s in enumerate(self.nest.steps)]
        self.narrow = frozenset() if scheduled.wide_index else narrow_steps(self.nest)
        self.far = far_loads(self.nest)
        self.row_axes = _axes("row", len(self.nest.rows))
        self.col_axes = _axes("i" if scheduled.kind == "flat" else "col", len(self.nest.cols))
        self.in_pieces: frozenset[str] = frozenset()
        """Names that stand for one value of each piece of a row."""

    def names_in_pieces(self) -> frozenset[str]:
        """The names of indices, bounds, values and accumulators of columns, if a row is in several pieces."""
        if self.scheduled.pieces == 1:
            return frozenset()
        of_columns = [i for i, step in enumerate(self.nest.steps) if step.level in (Level.FULL, Level.COL)]
        drawn = [name for group in GROUPS for name in (f"first{group}", *_axes(f"first{group}", len(self.nest.cols)))]
        names = ["col", "col_ok", "ok", *self.col_axes, *drawn]
        names += [f"acc{i}" for i, _ in self.nest.reductions("reduce_cols")]
        return frozenset([*names, *(name for i in of_columns for name in (self.values[i], f"total{i}"))])

    def put(self, line: str = "") -> None:
        """Add a line; one that names values in pieces is written for each piece."""
        pieces = self.scheduled.pieces if self.in_pieces.intersection(WORD.findall(line)) else 1
        lines = [self.of_piece(line, piece) for piece in range(pieces)] if pieces > 1 else [line]
        self.lines += ["    " * self.depth + line if line else "" for line in lines]

    def of_piece(self, text: str, piece: int) -> str:
        """`text` about one piece of a row: its names in pieces end as `PIECE` says, and `piece` is its number."""

        def renamed(word: re.Match[str]) -> str:
            name = f"{word[0]}_{piece}of{self.scheduled.pieces}" if word[0] in self.in_pieces else word[0]
            return str(piece) if name == "piece" else name

        return WORD.sub(renamed, text)

    def open(self, line: str) -> None:
        self.put(line)
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1

    def define(self, name: str, sizes: Iterable[str]) -> str:
        pointers = [f"{n}{POINTER}" for n in self.names] + [f"part{i}{POINTER}" for i in self.scheduled.scratch]
        numbers = {"count": f"int{64 if self.scheduled.wide_in_block else 32}"}
        numbers |= {f"skip{number}": "int64" for number in range(self.nest.numbers)}
        numbers |= {f"size{n}": kind for n, kind in enumerate(self.nest.argument_dtypes)}
        numbers |= dict.fromkeys(self.scheduled.passed, "int32")
        pointers += [f"{name}: tl.{dtype}" for name, dtype in numbers.items()]
        constants = [f"{size}: tl.constexpr" for size in sizes if size not in numbers]
        signature = f"def {name}({', '.join(pointers + constants)}):"
        if len(signature) > LINE:
            lines = [*textwrap.wrap(", ".join(pointers) + ",", LINE - 4), ", ".join(constants) + ","]
            signature = "\n    ".join([f"def {name}(", *lines]) + "\n):"
        # Compile one kernel for all values of the numbers.
        quoted = json.dumps(list(numbers))
        jit = f"triton.jit(do_not_specialize={quoted}, do_not_specialize_on_alignment={quoted})"
        return f"@{jit}\n{signature}\n" + "\n".join(self._with_origin(self._without_unused_axes())) + "\n"

    def _without_unused_axes(self) -> list[str]:
        """The lines without the index of an axis that no access reads alone."""
        words = Counter(word for line in self.lines for word in WORD.findall(line))
        unused = {axis for axis in (*self.row_axes, *self.col_axes) if words[axis] == 1 and axis[-1].isdigit()}
        return [line for line in self.lines if line.partition(" = ")[0].strip() not in unused]

    def _with_origin(self, lines: list[str]) -> list[str]:
        """Declare `origin`, the index of single elements as a block: the interpreter mishandles scalar pointers."""
        if not any("origin" in line for line in lines):
            return lines
        first = next(k for k, line in enumerate(lines) if not line.strip().startswith('"""'))
        shape = "(1,)" if self.scheduled.kind == "flat" else "(1, 1)"
        return [*lines[:first], f"    origin = tl.full({shape}, 0, tl.int32)", *lines[first:]]

    def program(self) -> str:
        return "tl.program_id(0).to(tl.int64)" if self.scheduled.wide_index else "tl.program_id(0)"

    def unravel(self, name: str, axes: list[str], extents: tuple[int, ...]) -> None:
        """Declare the index of each axis from the linear index `name`."""
        if len(axes) < 2:
            return
        inner = 1
        for number in reversed(range(len(axes))):
            text = name if inner == 1 else f"{name} // {inner}"
            self.put(f"{axes[number]} = {text}" + (f" % {extents[number]}" if number else ""))
            inner *= extents[number]

    def index(self, strides: tuple[int, ...], axes: Sequence[str] | None = None) -> str:
        """The sum of stride × index over the axes, which are the rows' and the columns' unless named."""
        if axes is None:
            rows, cols = self.nest.split(strides)
            places = [*self._places("row", self.row_axes, self.nest.rows, rows)]
            across = [*self._places(self.col_axes[0].removesuffix("0"), self.col_axes, self.nest.cols, cols)]
            # Numbers of the program and of its loop first: they are added to the pointer once.
            if self.scheduled.cuts_columns:
                places = [*across[:-1], *places, *across[-1:]]
            else:
                places += across
            if self.divides_rows and rows[0]:
                # The last term is known when the kernel is compiled: all loads of a tile share an address.
                others = [place for place in places if place[0] != "row"]
                places = [("begin", rows[0]), *others, ("lane", rows[0])]
        else:
            places = list(zip(axes, strides, strict=True))
        terms = [place if stride == 1 else f"{place} * {stride}" for place, stride in places if stride]
        return " + ".join(terms) or "origin"

    @staticmethod
    def _places(
        name: str, axes: Sequence[str], extents: Sequence[int], strides: Sequence[int]
    ) -> Iterator[tuple[str, int]]:
        """The axes of the linear index `name` with their strides; those contiguous with each other as one, which shows
        the compiler that neighbouring indices are neighbours in memory."""
        first = 0
        while first < len(axes):
            last = first
            while last + 1 < len(axes) and strides[last] and strides[last] == strides[last + 1] * extents[last + 1]:
                last += 1
            place, inner = axes[first], prod(extents[last + 1 :])
            if first < last:
                place = name if inner == 1 else f"({name} // {inner})"
                place = f"({place} % {prod(extents[first : last + 1])})" if first else place
            yield place, strides[last]
            first = last + 1

    def mask(self, strides: tuple[int, ...]) -> str:
        """`, mask=…`, or nothing for a single element."""
        rows, cols = (any(part) for part in self.nest.split(strides))
        if self.numbers_outer_columns:
            cols = strides[-1] != 0
        if not rows and not cols:
            return ""
        return f", mask={self.bounds(rows, cols)}"

    def mask_of(self, load: Step) -> str:
        """As `mask`, over all axes that a load varies with: computed indices are invalid in lanes outside the nest."""
        assert load.access
        if not load.access.by or load.level is Level.SCALAR:
            return self.mask(load.access.strides)
        rows, cols = load.level in (Level.ROW, Level.FULL), load.level in (Level.COL, Level.FULL)
        return f", mask={self.bounds(rows, cols)}"

    def bounds(self, rows: bool, cols: bool) -> str:
        if self.scheduled.kind == "flat" or (rows and cols):
            return "ok"
        return "row_ok" if rows else "col_ok"

    def declare(self, i: int) -> None:
        step = self.nest.steps[i]
        if step.name == "check":
            self._check(step)
        if step.name != "const":
            self.put(f"{self.values[i]} = {self.text_of(i, step)}")

    def _check(self, step: Step) -> None:
        """Stop the device where an index is outside, as eager's kernels do; `TritonKernel` compiles assertions in."""
        index = self.operand(step.args[0])
        inside = f"({index} >= 0) & ({index} < {step.constant})"
        if len(step.args) > 1:
            inside = f"{inside} | ~{self.operand(step.args[1])}"
        rows, cols = step.level in (Level.ROW, Level.FULL), step.level in (Level.COL, Level.FULL)
        mask = f", mask={self.bounds(rows, cols)}" if rows or cols else ""
        self.put(f'tl.device_assert({inside}, "index out of bounds for a dimension of size {step.constant}"{mask})')

    def text_of(self, i: int, step: Step) -> str:
        if step.name == "load":
            return self._load(i, step)
        if step.name == "index":
            assert step.strides is not None
            return f"({self.index(step.strides)})" + ("" if i in self.narrow else ".to(tl.int64)")
        if step.name == "check":
            return self.operand(step.args[0], wide=True)
        if step.name == "draw":
            return self._draw(step)
        if self.scheduled.is_mean(step):
            return f"tw.mean(total{step.args[0]}, {self.operand(step.args[1], as_literal=True)})"
        operands = [a for a in step.args if self.nest.steps[a].dtype == self.nest.steps[step.args[-1]].dtype]
        if i in self.scheduled.absolute_accuracy:
            return f"tw.{step.name}_absolute({self.operand(step.args[0])})"
        varying = any(self.nest.steps[a].name != "const" for a in operands)
        last = self.nest.steps[step.args[-1]].dtype
        wide = step.dtype == "int64" and i not in self.narrow
        if step.name == "cast" and i in self.narrow:
            return f"{self.operand(step.args[0])}.to(tl.int32)"
        exact = i in self.scheduled.feeds_discontinuous
        return expression(step, lambda a, literals: self.operand(a, literals and varying, wide), last, exact)

    def _load(self, i: int, step: Step) -> str:
        assert step.access
        buffer = self.nest.buffers[step.access.buffer]
        strides = step.access.strides
        place = self.index(strides)
        if self.scheduled.sums and self.nest.split(strides)[1] == (1,) and buffer.dtype in BYTES:
            # By default Triton gives a thread 16 neighbouring bytes, which spreads a tile's rows over warps.
            place = f"tl.max_contiguous({place}, (1, 8))"
        if step.access.offset:
            place = f"{place} + {step.access.offset}"
        for a, stride in zip(step.args, step.access.by, strict=False):
            place += f" + {self.operand(a, wide=i in self.far)}" + (f" * {stride}" if stride != 1 else "")
        mask = self.mask_of(step)
        if (condition := self.nest.condition(step)) is not None:
            inside = self.values[condition]
            mask = f"{mask} & {inside}, other=0" if mask else f", mask={inside}, other=0"
        place = f"{self.names[step.access.buffer]}_ptr + {place}"
        along_rows = step.level is Level.ROW and self.scheduled.repeats_rows and strides[len(self.nest.rows) - 1] == 1
        along_rows = along_rows and i not in self.scheduled.once_for_each_row
        if self.has_tiles and (along_rows or (step.level is Level.COL and self.scheduled.repeats_columns)):
            # Load it in the layout of the tiles that it is combined with.
            place = f"tl.broadcast_to({place}, (BLOCK_ROWS, BLOCK_COLS))"
        return from_storage(buffer.dtype, step.dtype, f"tl.load({place}{mask}{self.eviction(i)})")

    def _draw(self, step: Step) -> str:
        """Whether each element's random number is below the threshold."""
        assert step.access and step.philox and step.strides is not None
        state, threshold, drawn = f"{self.names[step.access.buffer]}_ptr", int(step.constant or 0), step.philox
        numbering = f"skip{step.number}, {threshold}, {drawn.vector}, {drawn.threads}"
        group = self._drawn_together(step)
        if group == 1:
            return f"draw.one_by_one({state}, {self.index(step.strides)}, {numbering})"
        axes = self.row_axes + _axes(f"first{group}", len(self.nest.cols))
        return f"draw.in_groups({state}, {self.index(step.strides, axes)}, {numbering}, {group})"

    def _drawn_together(self, step: Step) -> int:
        """How many neighbouring columns, the first at a multiple of it, one thread of PyTorch's kernel draws."""
        if step.philox is None or step.strides is None or step.strides[-1] != 1:
            return 1
        sizes = (step.philox.vector, self.nest.cols[-1], *step.strides[:-1])
        return next((group for group in GROUPS if all(size % group == 0 for size in sizes)), 1)

    def put_groups(self, begin: str, block: str, lanes: str) -> None:
        """Declare the index of the first column of each group that a step draws together, from `begin` on."""
        for group in sorted({self._drawn_together(step) for step in self.nest.steps} - {1}):
            name = f"first{group}"
            self.put(f"{name} = {begin}{' + ' if begin else ''}tl.arange(0, {block} // {group}){lanes} * {group}")
            self.unravel(name, _axes(name, len(self.nest.cols)), self.nest.cols)

    def operand(self, i: int, as_literal: bool = False, wide: bool = False) -> str:
        """The value of step `i`, or `as_literal` the number itself; `wide`: widened to 64 bits if computed in 32."""
        step = self.nest.steps[i]
        if step.name != "const":
            return self.values[i] + (".to(tl.int64)" if wide and i in self.narrow else "")
        assert step.constant is not None
        number = literal(step.constant, step.dtype)
        shape = "(1,)" if self.scheduled.kind == "flat" else "(1, 1)"
        dtype = "int32" if i in self.narrow and not wide else step.dtype
        return number if as_literal else f"tl.full({shape}, {number}, {type_name(dtype)})"

    def store(self, store: Store) -> None:
        buffer = self.nest.buffers[store.access.buffer]
        strides = store.access.strides
        pointer = f"{self.names[store.access.buffer]}_ptr + {self.index(strides)}"
        value = to_storage(buffer.dtype, self.operand(store.value))
        self.put(f"tl.store({pointer}, {value}{self.mask(strides)}{self.eviction(None)})")

    def eviction(self, i: int | None) -> str:
        """The argument of load `i`, or of a store, that says how long the caches should hold it."""
        return ""

    def accumulator(self, step: Step) -> str:
        """The dtype that this kernel accumulates a reduction in."""
        return accumulator_dtype(step)

    def blank(self, step: Step, rows: str = "1") -> str:
        """A block of the identity of the reduction `step`: `rows` × its columns."""
        columns = "BLOCK_COLS" if step.name == "reduce_cols" or step.level is Level.COL else "1"
        dtype = type_name(self.accumulator(step))
        return f"tl.full(({rows}, {columns}), {identity(step.kind or '', step.dtype)}, {dtype})"


def _axes(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}{number}" for number in range(count)]


def _names(nest: Nest) -> list[str]:
    """A distinct identifier for each buffer, from its graph name."""
    names: list[str] = []
    for number, buffer in enumerate(nest.buffers):
        names.append(f"{buffer.name}_{number}" if buffer.name in names else buffer.name)
    return names


def _value_name(i: int, step: Step, names: list[str], loads: list[int], taken: set[str]) -> str:
    """The buffer's name for a load, if the buffer is loaded once; else the step's name and number."""
    if step.access and loads.count(step.access.buffer) == 1:
        name = names[step.access.buffer]
        is_of_the_kernel = name in RESERVED or name.startswith(NUMBERED) or name.endswith(POINTER)
        if not is_of_the_kernel and not PIECE.search(name):
            return name
    name = f"{step.kind or step.name}{i}"
    return name + "_" if name in taken else name
