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
SPILLED = 3 * REGISTERS // 2
"""The same beside column sums, which in memory cost more than what spills: layer norm's backward of 4096 rows of 8192
columns, bf16, takes 133 us on an H200, by blocks of columns 266."""
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
    def splits_columns(self) -> bool:
        """Whether programs share the columns of a strip of rows out: no reduction needs whole rows."""
        kept = all(any(self.nest.split(s.access.strides)[1]) for s in self.nest.stores if not self.is_late(s.value))
        whole = any(step.name == "reduce_cols" for step in self.nest.steps)
        return bool(self.sums) and kept and not whole and self.uses_columns

    @cached_property
    def whole_row(self) -> bool:
        """Whether a program holds all columns of its rows, or all of its share of them, or walks them in blocks."""
        if self.splits_columns:
            return True
        columns = power_of_two(self.nest.col_count)
        return columns <= WHOLE_ROW and columns * self.held <= (SPILLED if self.sums else REGISTERS)

    @cached_property
    def held(self) -> int:
        """Registers that a column takes while a program is at a row."""
        held = 0
        for step in self.nest.steps:
            if step.name == "load" and step.level in (Level.FULL, Level.COL):
                held += 2 if step.dtype in ("float64", "int64") else 1
            elif step.name == "reduce_rows" and step.level is Level.COL:
                held += 4  # a double that lives across rows and its next value
        return held

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
        if any(step.name == "pow" for step in steps):
            return False
        sums = (steps[i] for i in self._decided_by if steps[i].name in ("add", "sub"))
        return not any(steps[a].name == "mul" for step in sums for a in step.args)

    @cached_property
    def _decided_by(self) -> set[int]:
        """Positions of what a discontinuous operator sees, at once or through others."""
        steps = self.nest.steps
        seen: set[int] = set()
        todo = [i for i, step in enumerate(steps) if _is_decisive(step)]
        while todo:
            for i in steps[todo.pop()].args:
                if i not in seen:
                    seen.add(i)
                    todo.append(i)
        return seen

    @cached_property
    def beside_one(self) -> frozenset[int]:
        """Positions of `erf` and `tanh` in fp32 that end in sums with 1 alone, which hide a small one's last digits."""
        steps = self.nest.steps
        stored = {store.value for store in self.nest.stores} | self._decided_by
        users: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            for a in step.args:
                users.setdefault(a, []).append(place)

        def is_hidden(i: int) -> bool:
            return i in users and i not in stored and all(hides(place, i) for place in users[i])

        def hides(user: int, i: int) -> bool:
            step = steps[user]
            ones = (steps[a].name == "const" and steps[a].constant == 1 for a in step.args)
            return any(ones) if step.name in ("add", "sub") else step.args == (i, i) and is_hidden(user)

        found = (i for i, step in enumerate(steps) if step.name in ("erf", "tanh") and step.dtype == "float32")
        return frozenset(i for i in found if is_hidden(i))

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
