"""Lowers a trace to a nest: divides its axes into rows and columns, and assigns each step a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any

from torch import fx

from tilewright.graph.calls import dtype_name
from tilewright.hardware.target import Language
from tilewright.loops.align import align, contiguous_end, memory_order, rows_and_columns
from tilewright.loops.collapse import AxisCollapser
from tilewright.loops.nest import Access, Buffer, Level, Nest, Step, Store, Where, refuse_mixed_sums
from tilewright.loops.trace import Rounding, Traced, trace_nodes
from tilewright.operators.axes import Axis, AxisUsedTwice, Unfusable, leaves, refuse_diagonal, split, strides_of
from tilewright.operators.language import Drawn, Op, Source, Value
from tilewright.operators.redundant import eliminate_redundant
from tilewright.records.recipe import is_expanded

APPROXIMABLE = frozenset({"exp", "expm1", "log1p", "sigmoid", "div"})
"""Functions whose accurate form takes several times the instructions of the hardware's own."""
INDEXED = ("draw", "index")
FEW_COLUMNS = 1024
"""A reduction over all axes is cut into rows of at least this many elements, if it has several axes left."""
LEAST_COLUMNS = 64
"""The same when only one axis is left for the rows."""
FEW_ROWS = 128
"""This many programs or fewer leave multiprocessors idle, or with too few loads in flight."""
LONG_ROW = 65536
"""With `FEW_ROWS` or fewer rows of at least this many elements, the reduction runs over the rows instead, in strips."""
MOST_REPEATS = 4
"""A nest computes one reduction at most this many times: each copy of a broadcast result reduces again."""

Nodes = Sequence[fx.Node]
Strides = dict[Axis, int]


@dataclass(frozen=True)
class Lowered:
    """A nest and the graph nodes of its buffers, in buffer order."""

    nest: Nest
    language: Language
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    numbers: tuple[int, ...] = ()
    """Arguments of a launch beside the buffers: for each draw of a GPU, by how much its generator offset advances."""


def lower(members: Nodes, outputs: Nodes, name: str, language: Language, rounding: Rounding | None = None) -> Lowered:
    """One nest that computes `outputs` from the inputs of `members`, to be printed in `language`.

    `members` are in topological order; outputs keep the strides of their metadata. Raises `Unfusable` with the
    reason if the members cannot share a nest.
    """
    rounding = rounding or Rounding.of(members, outputs, language)
    try:
        traced = trace_nodes(members, outputs, language, share_loads=True, rounding=rounding)
        return _nest_of(traced, members, outputs, name, language)
    except AxisUsedTwice:
        traced = trace_nodes(members, outputs, language, share_loads=False, rounding=rounding)
        return _nest_of(traced, members, outputs, name, language)


def _nest_of(traced: Traced, members: Nodes, outputs: Nodes, name: str, language: Language) -> Lowered:
    for node in outputs:
        if node not in traced.values:
            raise Unfusable(f"{node.name} has several results")
        # PyTorch 2.11 gives the scatter of a slice into an expanded tensor the strides of that tensor.
        if is_expanded(node.meta["val"].shape, node.meta["val"].stride()):
            raise Unfusable(f"elements of {node.name} share memory")
    found = [(n, traced.values[n]) for n in outputs]
    operators = [node for node in members if node.target is not getitem]
    for dims in traced.trace.dims:
        refuse_diagonal(dims)
    return _Lowering(traced.trace.ops, found, name, language, divisible=len(operators) > 1).build()


@dataclass
class _Reduction:
    position: int
    kind: str
    axes: frozenset[Axis]


class _Lowering:
    def __init__(
        self, ops: list[Op], outputs: list[tuple[fx.Node, Value]], name: str, language: Language, *, divisible: bool
    ) -> None:
        self.name = name
        self.language = language
        self.divisible = divisible
        self.outputs = outputs
        self.ops, self.ids = eliminate_redundant(ops, [value.id for _, value in outputs])

    def build(self) -> Lowered:
        self._recompute()
        self._align()
        rows, cols = self._choose_axes()
        return self._assemble(rows, cols)

    def _dependencies(self) -> None:
        """Find the axes that each op's value varies with; a reduction runs only over axes its operand varies with."""
        self.deps: list[frozenset[Axis]] = []
        self.reductions: list[_Reduction] = []
        self.scans: set[tuple[Axis, ...]] = set()
        for position, op in enumerate(self.ops):
            if op.name == "load":
                source: Source = op.detail
                deps = frozenset(a for a, s in strides_of(source.dims, source.strides).items() if s)
                deps = deps.union(*(self.deps[a] for a in op.args))
            elif op.name == "index":
                deps = frozenset(leaves(op.detail))
            elif op.name == "draw":
                deps = frozenset(leaves(op.detail.axes))
            else:
                deps = frozenset().union(*(self.deps[a] for a in op.args))
            if op.name == "scan":
                scanned = tuple(axis for axis in leaves(op.detail[1]) if axis.extent > 1)
                self.scans.add(scanned)
                deps = deps | frozenset(scanned)
            if op.name == "reduce":
                kind, axes = op.detail
                axes = frozenset(leaves(axes))
                if axes - deps and kind in ("sum", "prod"):
                    raise Unfusable("it adds up equal values: its operand is the same along the summed axis")
                self.reductions.append(_Reduction(position, kind, axes & deps))
                deps = deps - axes
            self.deps.append(deps)
        self.domain = frozenset().union(*self.deps, *(r.axes for r in self.reductions), *self.output_strides)

    def _align(self) -> None:
        together = [
            deps | frozenset().union(*(self.deps[a] for a in op.args))
            for deps, op in zip(self.deps, self.ops, strict=True)
        ]
        together += [frozenset(strides) for strides in self.output_strides]
        align(self.domain, together, [*self.output_strides, *self._load_strides()])
        self._recompute()

    def _load_strides(self) -> list[dict[Axis, int]]:
        return [strides_of(op.detail.dims, op.detail.strides) for op in self.ops if op.name == "load"]

    # Rows and columns

    def _choose_axes(self) -> tuple[list[Axis], list[Axis]]:
        order = memory_order(self.domain, self.output_strides, self._load_strides())
        if scanned := {axes for axes in self.scans if axes}:
            return self._along(order, scanned)
        over = {r.axes for r in self.reductions if r.axes}
        if not over:
            places = [op.detail.axes if op.name == "draw" else op.detail for op in self.ops if op.name in INDEXED]
            accesses = [*self.output_strides, *self._load_strides(), *(strides_of([place], [1]) for place in places)]
            return self._split_by(order, contiguous_end(order, accesses))
        again = {r.axes for r in self.reductions if r.axes and self._used_again(r)}
        if len(again) > 1:
            raise Unfusable("its elements use two reductions over different axes, and one loop cannot wait for both")
        if again:
            return self._split_by(order, next(iter(again)))
        if over == {self.domain}:
            return self._cut(order)
        partial = sorted(
            (axes for axes in over if axes != self.domain), key=lambda axes: sorted(a.serial for a in axes)
        )
        candidates = partial + [self.domain - axes for axes in partial]
        candidates.sort(key=lambda cols: (cols in over and self._starves(cols), order[-1] not in cols))
        for cols in candidates:
            if all(r in (cols, self.domain - cols, self.domain) for r in over):
                return self._split_by(order, cols)
        raise Unfusable("its reductions run over different axes, which one loop cannot do")

    def _along(self, order: list[Axis], scanned: set[tuple[Axis, ...]]) -> tuple[list[Axis], list[Axis]]:
        """The scanned axes as columns: in their own order, the last one contiguous."""
        cols, *others = scanned
        if others:
            raise Unfusable("its running sums go along different axes, which one loop cannot do")
        rows, found = self._split_by(order, frozenset(cols))
        if tuple(found) != cols or order[-1] is not cols[-1]:
            raise Unfusable("its running sum does not go in the order of memory")
        return rows, found

    def _starves(self, cols: frozenset[Axis]) -> bool:
        """Whether a GPU would run few programs, each over a long row."""
        row_count = prod(axis.extent for axis in self.domain - cols)
        return self.language == "triton" and row_count <= FEW_ROWS and prod(a.extent for a in cols) >= LONG_ROW

    def _split_by(self, order: list[Axis], cols: frozenset[Axis]) -> tuple[list[Axis], list[Axis]]:
        """Rows and columns in memory order; on a GPU, tiles have whole sectors of what is contiguous along the rows."""
        full = [strides for strides in (*self.output_strides, *self._load_strides()) if set(strides) >= self.domain]
        return rows_and_columns(order, cols, full if self.language == "triton" else [])

    def _cut(self, order: list[Axis]) -> tuple[list[Axis], list[Axis]]:
        """Rows and columns of a reduction over all axes: enough inner axes as columns, the others as parallel rows.

        If that leaves few rows (4 of 4 × 65536 × 3 elements: 255 µs on an H200), split the outermost column axis.
        """
        cols: list[Axis] = []
        rows = list(order)
        while rows and prod(a.extent for a in cols) < (FEW_COLUMNS if len(rows) > 1 else LEAST_COLUMNS):
            cols.insert(0, rows.pop())
        inner = prod(a.extent for a in cols[1:])
        if (not rows and len(cols) == 1) or self._starves(frozenset(cols)):
            whole, least = cols[0], -(-FEW_COLUMNS // inner)
            width = next((w for w in range(least, 8 * least) if whole.extent % w == 0), None)
            if width and whole.extent >= 8 * least:
                high, low = split(whole, width)
                self._recompute()
                return [*rows, high], [low, *cols[1:]]
        return rows, cols

    def _recompute(self) -> None:
        """Find strides and dependencies again after axes were unified or split."""
        self.output_strides = [
            strides_of(value.dims, [int(s) for s in node.meta["val"].stride()]) for node, value in self.outputs
        ]
        self._dependencies()

    def _used_again(self, reduction: _Reduction) -> bool:
        """Whether a value that depends on this reduction varies with the reduced axes."""
        dependent = {reduction.position}
        for position, op in enumerate(self.ops):
            if dependent & set(op.args):
                dependent.add(position)
                if self.deps[position] & reduction.axes:
                    return True
        ids = {self.ids[value.id] for _, value in self.outputs}
        return any(
            self.ids[value.id] in dependent & ids and set(strides) & reduction.axes
            for (_, value), strides in zip(self.outputs, self.output_strides, strict=True)
        )

    # Steps

    def _assemble(self, rows: list[Axis], cols: list[Axis]) -> Lowered:
        self._check(frozenset(rows), frozenset(cols))
        keys: list[Any] = []
        steps: list[Step] = []
        place: dict[int, int] = {}
        maps: list[Strides] = []
        numbers: list[int] = []
        reduced = {r.position: r for r in self.reductions}
        for position, op in enumerate(self.ops):
            args = tuple(place[a] for a in op.args)
            if op.name == "reduce":
                place[position] = self._reduce(reduced[position], op, args, steps, set(rows), set(cols))
                continue
            stage = max((steps[a].stage + (steps[a].name == "reduce_cols") for a in args), default=0)
            after: Where = "after" if any(steps[a].is_late for a in args) else "body"
            level = _level(self.deps[position], rows, cols)
            more: dict[str, Any] = {}
            if op.name in ("load", "draw") and op.detail.key not in keys:
                keys.append(op.detail.key)
            if op.name == "load":
                maps.append(strides_of(op.detail.dims, op.detail.strides))
                axes = rows + cols
                strides = tuple(maps[-1].get(a, 0) for a in axes)
                access = Access(keys.index(op.detail.key), strides, op.detail.offset, op.detail.by)
                more["access"] = access
            elif op.name == "draw":
                drawn: Drawn = op.detail
                places = strides_of([drawn.axes], [1])
                if drawn.philox is not None and drawn.skip not in numbers:
                    numbers.append(drawn.skip)
                more = dict(
                    access=Access(keys.index(drawn.key), (0,) * len(rows + cols)),
                    strides=tuple(places.get(a, 0) for a in rows + cols),
                    constant=drawn.below,
                    philox=drawn.philox,
                    number=None if drawn.philox is None else numbers.index(drawn.skip),
                )
            elif op.name in ("const", "check"):
                more["constant"] = op.detail
            elif op.name == "index":
                index = strides_of([op.detail], [1])
                more["strides"] = tuple(index.get(a, 0) for a in rows + cols)
            elif op.name == "scan":
                more["kind"] = op.detail[0]
            elif op.name in ("cast", "round"):
                more["to"] = op.detail or op.dtype
            elif op.name in APPROXIMABLE:
                more["approximate"] = op.approximate
            steps.append(Step(op.name, args, op.dtype, level, after, stage, exact=op.exact, **more))
            place[position] = len(steps) - 1
        refuse_mixed_sums(steps)
        stores = [
            Store(place[self.ids[value.id]], Access(len(keys) + i, tuple(s.get(a, 0) for a in rows + cols)))
            for i, ((_, value), s) in enumerate(zip(self.outputs, self.output_strides, strict=True))
        ]
        return replace(self._finish(rows, cols, keys, steps, stores), numbers=tuple(numbers))

    def _reduce(
        self, r: _Reduction, op: Op, args: tuple[int, ...], steps: list[Step], rows: set[Axis], cols: set[Axis]
    ) -> int:
        """Append the one or two steps of a reduction; returns the position of its result."""
        value, deps = args[0], self.deps[op.args[0]]
        for name, axes in (("reduce_cols", r.axes & cols), ("reduce_rows", r.axes & rows)):
            if not axes:
                continue
            deps = deps - axes
            source = steps[value]
            if source.is_late:
                raise Unfusable("a sum over all rows is reduced again, which takes a second kernel")
            stage = source.stage + (source.name == "reduce_cols")
            level, approximate = _level(deps, rows, cols), op.approximate
            steps.append(Step(name, (value,), op.dtype, level, "body", stage, kind=r.kind, approximate=approximate))
            value = len(steps) - 1
        return value

    def _check(self, rows: frozenset[Axis], cols: frozenset[Axis]) -> None:
        """Raise Unfusable if a reduction or an output does not fit these rows and columns."""
        late: set[int] = set()
        by_position = {r.position: r for r in self.reductions}
        for position, op in enumerate(self.ops):
            if r := by_position.get(position):
                if self.divisible:
                    self._refuse_repeats(r, op, rows, cols)
                for axes, what in ((rows, "rows"), (cols, "columns")):
                    if r.axes & axes and axes - r.axes:
                        raise Unfusable(
                            f"a reduction adds up some of the {what} and keeps the others apart, "
                            "which one loop cannot do"
                        )
                if r.axes & rows:
                    late.add(position)
            elif late & set(op.args):
                late.add(position)
                if self.deps[position] & rows:
                    raise Unfusable("every row needs the sum over all rows, which is known only after the last row")
        self._check_outputs(late, rows, cols)

    def _check_outputs(self, late: set[int], rows: frozenset[Axis], cols: frozenset[Axis]) -> None:
        """Raise Unfusable if an output does not fit; the positions `late` are known only after the last row."""
        for (node, value), strides in zip(self.outputs, self.output_strides, strict=True):
            axes = frozenset(strides)
            position = self.ids[value.id]
            if position in late:
                if axes & rows:
                    raise Unfusable(
                        "a sum over all rows goes back to each of them, and is known only after the last row"
                    )
            elif rows - axes:
                raise Unfusable(f"{node.name} has fewer rows than the rest of the kernel, so they cannot share a loop")
            if axes & cols and cols - axes:
                raise Unfusable(
                    f"{node.name} has fewer columns than the rest of the kernel, so they cannot share a loop"
                )
            if self.deps[position] - axes:
                raise Unfusable(f"{node.name} would get several values for one element")

    def _refuse_repeats(self, r: _Reduction, op: Op, rows: frozenset[Axis], cols: frozenset[Axis]) -> None:
        """Refuse a reduction that many rows (or columns) would each repeat, since its operand does not vary there."""
        outside = (rows if r.axes & cols else frozenset()) | (cols if r.axes & rows else frozenset())
        repeats = prod(axis.extent for axis in outside - r.axes - self.deps[op.args[0]])
        if repeats > MOST_REPEATS:
            raise Unfusable(f"each reduction would be computed {repeats} times, once for each copy of its result")

    def _finish(
        self, rows: list[Axis], cols: list[Axis], keys: list[Any], steps: list[Step], stores: list[Store]
    ) -> Lowered:
        nodes = [node for node, _ in self.outputs]
        inputs = tuple(Buffer(key.name, dtype_name(key.meta["val"].dtype), self._touched(key)) for key in keys)
        outputs = tuple(Buffer(n.name, dtype_name(n.meta["val"].dtype), n.meta["val"].numel()) for n in nodes)
        row_extents, col_extents = [a.extent for a in rows], [a.extent for a in cols]
        collapser = AxisCollapser(row_extents, col_extents, steps, stores)
        collapser.collapse()
        collapser.check_draw_order()
        nest = Nest(
            self.name,
            tuple(collapser.rows),
            tuple(collapser.cols),
            inputs,
            outputs,
            tuple(collapser.steps),
            tuple(collapser.stores),
        )
        return Lowered(nest, self.language, tuple(keys), tuple(nodes))

    def _touched(self, key: Any) -> int:
        """Distinct elements that the nest reads of a tensor; expanded axes (stride 0) count once.

        A tensor that is only gathered from counts one element per index, at most all its elements: which indices
        repeat is not known before the program runs.
        """
        val = key.meta["val"]
        every = prod((int(n) for n, s in zip(val.shape, val.stride(), strict=True) if s != 0), start=1)
        loads = [(p, op) for p, op in enumerate(self.ops) if op.name in ("load", "draw") and op.detail.key is key]
        if all(op.name == "load" and op.detail.by for _, op in loads):
            return min(every, sum(prod(axis.extent for axis in self.deps[position]) for position, _ in loads))
        return every


def _level(deps: frozenset[Axis], rows: Any, cols: Any) -> Level:
    return Level.of(bool(deps & set(rows)), bool(deps & set(cols)))
