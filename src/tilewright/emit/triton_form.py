"""How a nest is cut into Triton programs: what the emitter prints and the launcher must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tilewright.loops.nest import Access, Level, Nest, Step

WHOLE_ROW = 16384
"""The widest row, padded to a power of two, that one program holds at once."""
REGISTERS = 65536
"""Elements, counted in fp32, that a program may keep alive over a whole row."""
WIDE = {"float32": "float64", "float64": "float64"}
"""What sums are carried in; integers carry themselves."""

DECISIVE = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "floor", "ceil", "trunc", "round_even", "sign", "pow"})
"""What a last bit can change by a lot; and `pow`, whose error terms are exact products."""

Kind = Literal["flat", "tiles", "rows"]


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`.

    >>> [power_of_two(n) for n in (1, 5, 64)]
    [1, 8, 64]
    """
    return 1 << max(count - 1, 0).bit_length()


def carrier(step: Step) -> str:
    """The dtype that a reduction accumulates in."""
    return WIDE.get(step.dtype, step.dtype) if step.kind == "sum" else step.dtype


def _is_decisive(step: Step) -> bool:
    return step.name in DECISIVE or (step.name == "cast" and step.dtype not in WIDE)


@dataclass(frozen=True)
class Form:
    """The shape of the programs of one nest.

    `flat`: elementwise along one axis. `tiles`: elementwise over rows × columns. `rows`: with
    reductions; a program owns whole rows, and where there are column sums a strip of them, whose
    partial sums a second kernel combines.
    """

    nest: Nest

    @cached_property
    def kind(self) -> Kind:
        if any(step.name.startswith("reduce") for step in self.nest.steps):
            return "rows"
        return "tiles" if self.nest.rows else "flat"

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """Positions of the reductions over the rows."""
        return tuple(i for i, _ in self.nest.reductions("reduce_rows"))

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """Positions of single values, reduced from the columns alone, that are needed again after all rows."""
        late = [s.value for s in self.nest.stores if self.is_late(s.value)]
        found: set[int] = set()
        while late:
            i = late.pop()
            if self.nest.steps[i].name == "reduce_cols":
                found.add(i)
            elif i not in self.sums:
                late.extend(self.nest.steps[i].args)
        return tuple(sorted(found))

    @property
    def scratch(self) -> tuple[int, ...]:
        """Positions of the steps whose results go from the first kernel to the second through memory."""
        return self.sums + self.carried

    @cached_property
    def whole_row(self) -> bool:
        """Whether a program holds all columns of its rows at once, or walks them in blocks."""
        columns = power_of_two(self.nest.col_count)
        held = 0
        for step in self.nest.steps:
            if step.name == "load" and step.level in (Level.FULL, Level.COL):
                held += 2 if step.dtype in ("float64", "int64") else 1
            elif step.name == "reduce_rows" and step.level is Level.COL:
                held += 4  # a double that lives across rows and its next value
        return columns <= WHOLE_ROW and columns * held <= REGISTERS

    @cached_property
    def wide_index(self) -> bool:
        """Whether an element's position, or the count of padded rows or columns, needs 64 bits."""
        accesses = [s.access for s in self.nest.steps if s.access] + [s.access for s in self.nest.stores]
        farthest = max((self._last(access) for access in accesses), default=0)
        return max(farthest, self.nest.row_count, self.nest.col_count) >= 2**31 - 2**20

    def _last(self, access: Access) -> int:
        extents = self.nest.rows + self.nest.cols
        return sum((n - 1) * stride for n, stride in zip(extents, access.strides, strict=True))

    @cached_property
    def contracts(self) -> bool:
        """Whether a product may be added without being rounded first, as eager's kernels do inside one operator.

        Not where a discontinuous operator would see it: its operands must be eager's, and a value that
        is computed again for a later stage must be the same value.
        """
        steps = self.nest.steps
        seen: set[int] = set()
        todo = [i for i, step in enumerate(steps) if _is_decisive(step)]
        if any(steps[i].name == "pow" for i in todo):
            return False
        while todo:
            for i in steps[todo.pop()].args:
                if i not in seen:
                    seen.add(i)
                    todo.append(i)
        sums = (steps[i] for i in seen if steps[i].name in ("add", "sub"))
        return not any(steps[a].name == "mul" for step in sums for a in step.args)

    @cached_property
    def uses_columns(self) -> bool:
        """Whether anything varies with the columns (a nest of single rows has a column axis of one)."""
        strides = [s.access.strides for s in self.nest.steps if s.access]
        strides += [s.strides for s in self.nest.steps if s.strides is not None]
        strides += [s.access.strides for s in self.nest.stores]
        return any(any(self.nest.split(s)[1]) for s in strides)

    def is_late(self, value: int) -> bool:
        """Whether a step is known only after all rows."""
        return self.nest.steps[value].where == "after" or value in self.sums

    @cached_property
    def late_columns(self) -> bool:
        """Whether what is computed after all rows varies with the columns."""
        late = [s for s in self.nest.stores if self.is_late(s.value)]
        return any(any(self.nest.split(s.access.strides)[1]) for s in late)

    def scratch_size(self, value: int, programs: int) -> tuple[int, str]:
        """Elements and dtype of the scratch buffer of step `value`."""
        step = self.nest.steps[value]
        if value in self.carried:
            return 1, step.dtype
        return programs * (self.nest.col_count if step.level is Level.COL else 1), carrier(step)
