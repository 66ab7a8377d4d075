"""A loop nest as plain data.

A nest runs over `rows` (outer, independent, run in parallel) and `cols` (inner). Each row may loop over its
columns several times: the result of a reduction over the columns in *stage* k is available from stage k + 1 on
(the row maximum for the exponentials of a softmax). The result of a reduction over the rows (a column sum) is
available only *after* all rows.

    for row in rows:                       # parallel
        stage 0: for col in cols: …        # may reduce to row values
        stage 1: for col in cols: …
    after:   for col in cols: …            # column sums are available here

Steps are in SSA form; a step refers to its operands by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Literal

from tilewright.operators.axes import Unfusable
from tilewright.operators.language import Philox

Where = Literal["body", "after"]


class Level(Enum):
    """The axes that a step's value varies with: none, rows, columns, or both."""

    SCALAR = "scalar"
    ROW = "row"
    COL = "col"
    FULL = "full"

    @staticmethod
    def of(with_rows: bool, with_cols: bool) -> Level:
        """
        >>> Level.of(True, False)
        <Level.ROW: 'row'>
        """
        if with_rows:
            return Level.FULL if with_cols else Level.ROW
        return Level.COL if with_cols else Level.SCALAR


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory; `elements` is how many distinct ones the nest accesses."""

    name: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Access:
    """Element `offset + sum(stride * index)` of a buffer; one stride per axis, rows before columns."""

    buffer: int
    strides: tuple[int, ...]
    offset: int = 0
    by: tuple[int, ...] = ()
    """Strides of the computed indices of a load (a gather), which are the step's first operands."""


@dataclass(frozen=True)
class Step:
    """One scalar operation.

    `dtype` is the dtype of the computation. `name` is a scalar function, or one of these:

        load          the element at `access`; where the operand after the indices is false, 0
        check         an index that must be in [0, `constant`) wherever the second operand is true
        const         `constant`
        index         the element's position by `strides`, one per axis
        draw          a random number: state in `access`, position in the stream by `strides`, threshold `constant`; on
                      a GPU the generator `philox`, whose offset the launch's argument `number` advances
        reduce_cols   a reduction of this `kind` over the columns of a row; `reduce_rows` over all rows
        scan          for each column, the reduction of this `kind` over the columns up to it
        round, cast   conversion `to` a dtype
    """

    name: str
    args: tuple[int, ...]
    dtype: str
    level: Level
    where: Where
    stage: int
    access: Access | None = None
    constant: bool | int | float | None = None
    strides: tuple[int, ...] | None = None
    kind: str | None = None
    to: str | None = None
    philox: Philox | None = None
    number: int | None = None
    approximate: bool = False
    """For a function of `lower.APPROXIMABLE`: 16 correct bits are enough, since the result is at most scaled before it
    is rounded to 16 bits. For a sum: a GPU accumulates in fp32."""
    exact: bool = False
    """A discontinuous operator depends on it, in this nest or another."""

    @property
    def is_late(self) -> bool:
        """Whether its value is available only after all rows."""
        return self.where == "after" or self.name == "reduce_rows"


@dataclass(frozen=True)
class Store:
    """Step `value`, converted to the buffer's dtype, written to memory."""

    value: int
    access: Access


@dataclass(frozen=True)
class Nest:
    """A loop nest. Buffers: the inputs, then the outputs."""

    name: str
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    stores: tuple[Store, ...]
    argument_dtypes: tuple[str, ...] = ()
    """The dtypes of its numbers that are arguments of its kernel (`loops/sizes.py`)."""

    @property
    def row_count(self) -> int:
        return prod(self.rows)

    @property
    def col_count(self) -> int:
        return prod(self.cols)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.inputs + self.outputs

    @property
    def stages(self) -> int:
        """How many times each row loops over its columns."""
        return 1 + max((s.stage for s in self.steps if s.where == "body"), default=0)

    def behind(
        self,
        roots: Iterable[int],
        *,
        includes: Callable[[int], bool] = lambda _: True,
        passes: Callable[[int], bool] = lambda _: True,
    ) -> list[int]:
        """`roots` and their transitive operands, sorted: only steps that `includes`, and operands of steps `passes`."""
        found: set[int] = set()
        todo = list(roots)
        while todo:
            i = todo.pop()
            if i not in found and includes(i):
                found.add(i)
                if passes(i):
                    todo.extend(self.steps[i].args)
        return sorted(found)

    def last_stages(self, *, in_rows: bool = False) -> list[int]:
        """For each step, the last stage that computes it (`in_rows`: in a row); `stages + 1` means after all rows.

        Row values are computed once. Each pass over the columns recomputes the values that its sums and stores need.
        """
        last = [step.stage for step in self.steps]

        def needs(stage: int, found: Iterable[int]) -> None:
            for i in found:
                last[i] = max(last[i], stage)

        for step in self.steps:
            if step.name.startswith("reduce"):
                needs(step.stage, self._in_columns(step.args[0]))
        for store in self.stores:
            if not self.steps[store.value].is_late:
                needs(self._known_at(store.value), self._in_columns(store.value))
            elif not in_rows:
                behind = self.behind([store.value], passes=lambda i: self.steps[i].name != "reduce_rows")
                needs(self.stages + 1, behind)
        return last

    def store_stages(self) -> list[int]:
        """The stage that performs each store. A store over the columns waits for the last stage that computes its value
        in its row anyway, so that it may overwrite operands of earlier stages."""
        last = self.last_stages(in_rows=True)
        return [
            max(self._known_at(s.value), last[s.value] if self.covers_columns(s.access) else 0) for s in self.stores
        ]

    def _in_columns(self, root: int) -> list[int]:
        """The steps that a pass over the columns computes for this value."""
        return self.behind([root], includes=lambda i: self.steps[i].level in (Level.FULL, Level.COL))

    def _known_at(self, i: int) -> int:
        """The first stage that can read a step's value."""
        return self.steps[i].stage + (self.steps[i].name == "reduce_cols")

    def reductions(self, name: Literal["reduce_cols", "reduce_rows"]) -> Iterator[tuple[int, Step]]:
        return ((i, step) for i, step in enumerate(self.steps) if step.name == name)

    @property
    def numbers(self) -> int:
        """How many numbers a launch takes beside its buffers; they differ between nests that share a kernel."""
        return 1 + max((step.number for step in self.steps if step.number is not None), default=-1)

    def condition(self, step: Step) -> int | None:
        """The operand of a load that is false where nothing is read, if there is one."""
        assert step.access
        return step.args[-1] if len(step.args) > len(step.access.by) else None

    def split(self, strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The strides of the rows and those of the columns."""
        return strides[: len(self.rows)], strides[len(self.rows) :]

    @property
    def late_stores(self) -> list[Store]:
        """The stores after all rows."""
        return [store for store in self.stores if self.steps[store.value].is_late]

    def covers_columns(self, access: Access) -> bool:
        """Whether an access varies with the columns."""
        return any(self.split(access.strides)[1])

    @property
    def transposes(self) -> bool:
        """Whether an access that varies with rows and columns is contiguous along the rows."""
        loads = [s.access for s in self.steps if s.access and s.level is Level.FULL]
        parts = [self.split(access.strides) for access in (*loads, *(s.access for s in self.stores))]
        return any(1 in rows and 1 not in cols and any(cols) for rows, cols in parts)

    @property
    def gathers(self) -> bool:
        """Whether a load has computed indices or a condition."""
        return any(step.name == "load" and step.args for step in self.steps)

    @property
    def checks(self) -> tuple[int, ...]:
        """The extents that checked indices must stay below."""
        return tuple(sorted({int(step.constant or 0) for step in self.steps if step.name == "check"}))


def nameless(nest: Nest) -> Nest:
    """The nest without names; equal for nests that can share a kernel."""
    inputs, outputs = ([replace(buffer, name="") for buffer in part] for part in (nest.inputs, nest.outputs))
    return replace(nest, name="", inputs=tuple(inputs), outputs=tuple(outputs))


def named_as(nest: Nest, other: Nest) -> Nest:
    """The nest with the names of `other`, which has as many buffers."""
    inputs, outputs = (
        tuple(replace(buffer, name=named.name) for buffer, named in zip(mine, theirs, strict=True))
        for mine, theirs in ((nest.inputs, other.inputs), (nest.outputs, other.outputs))
    )
    return replace(nest, name=other.name, inputs=inputs, outputs=outputs)


def describe(nest: Nest) -> str:
    """The nest as readable text, which golden tests compare: one line per step."""
    lines = [f"{nest.name}: rows {list(nest.rows)} × cols {list(nest.cols)}"]
    for number, buffer in enumerate(nest.buffers):
        role = "in" if number < len(nest.inputs) else "out"
        lines.append(f"  {role:>3} b{number}: {buffer.dtype}[{buffer.elements}] {buffer.name}")
    for number, step in enumerate(nest.steps):
        extra = [f"%{a}" for a in step.args]
        if step.access:
            shift = f"+{step.access.offset}" if step.access.offset else ""
            shift += "".join(f"+%{a}*{stride}" for a, stride in zip(step.args, step.access.by, strict=False))
            extra.append(f"b{step.access.buffer}{list(step.access.strides)}{shift}")
        extra += [str(x) for x in (step.constant, step.strides, step.kind, step.to, step.philox) if x is not None]
        extra += [] if step.number is None else [f"number {step.number}"]
        place = f"stage {step.stage}" if step.where == "body" else "after"
        lines.append(f"  %{number} = {step.name} {', '.join(extra)} : {step.dtype}, {step.level.value}, {place}")
    for store in nest.stores:
        lines.append(f"  store %{store.value} → b{store.access.buffer}{list(store.access.strides)}")
    return "\n".join(lines)


def refuse_mixed_sums(steps: Sequence[Step]) -> None:
    """Raise Unfusable if a step after all rows uses a sum over the columns of one row."""
    of_columns: set[int] = set()
    for position, step in enumerate(steps):
        if step.name == "reduce_cols" or (step.name != "reduce_rows" and of_columns & set(step.args)):
            if step.where == "after":
                raise Unfusable(
                    "it combines a sum over all rows with a sum along one row; the loop has left that row by then"
                )
            of_columns.add(position)
