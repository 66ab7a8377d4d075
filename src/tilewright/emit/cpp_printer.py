"""The C++ text shared by the loops of a nest: lines, indices, single steps, checks of indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from tilewright.emit.cpp_text import COMPUTED, STORED, from_storage, identifiers, scalar, to_storage
from tilewright.emit.narrow_integers import far_loads, narrow_steps
from tilewright.emit.scheduled_loops import ScheduledLoops
from tilewright.loops.nest import Access, Level, Step
from tilewright.operators.language import COMPUTE_DTYPE


class Printer:
    """Base of the kernel's printer: the lines so far, and the text of a step."""

    def __init__(self, scheduled: ScheduledLoops) -> None:
        self.scheduled = scheduled
        self.nest = nest = scheduled.nest
        self.lines: list[str] = []
        self.depth = 1
        self.pointers = identifiers(nest)
        self.narrow = narrow_steps(nest)
        self.far = far_loads(nest)
        self.begin = "0"
        """The first index of the innermost loop."""

    def put(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def open(self, line: str) -> None:
        self.put(line + " {")
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.put("}")

    # Indices that must be inside

    def begin_checks(self) -> None:
        if self.nest.checks:
            self.put("int64_t outside = 0;")

    def checked_in(self, steps: Sequence[int]) -> str:
        """The clause of an innermost loop whose steps check indices."""
        return " reduction(|:outside)" if any(self.nest.steps[i].name == "check" for i in steps) else ""

    def end_checks(self) -> None:
        if self.nest.checks:
            self.open("if (outside)")
            self.put("#pragma omp atomic write")
            self.put("failed = 1;")
            self.close()

    # Steps

    def column(self) -> str:
        terms: list[str] = []
        scale = 1
        for axis in reversed(range(len(self.nest.cols))):
            terms.insert(0, f"c{axis}" if scale == 1 else f"c{axis} * {scale}")
            scale *= self.nest.cols[axis]
        return " + ".join(terms) or "0"

    def index(self, strides: tuple[int, ...], innermost: str | None = None) -> str:
        """The index expression of an access; `innermost` replaces the index of the innermost axis."""
        rows, cols = self.nest.split(strides)
        named = [(f"r{i}", s) for i, s in enumerate(rows)] + [(f"c{i}", s) for i, s in enumerate(cols)]
        if innermost is not None:
            named[-1] = (innermost, named[-1][1])
        terms = [name if stride == 1 else f"{name} * {stride}" for name, stride in named if stride]
        return " + ".join(terms) or "0"

    def declare(self, i: int, kept: bool = False) -> None:
        step = self.nest.steps[i]
        if kept:
            value = f"kept{i}[{self.column()}]"
        elif step.name == "draw":
            value = f"drawn{i}[c{len(self.nest.cols) - 1} - {self.begin}] != 0"
        else:
            value = self._expression(i, step)
        self.put(f"const {'int32_t' if i in self.narrow else COMPUTED[step.dtype]} v{i} = {value};")
        if step.name == "check" and not kept:
            counts = "".join(f" & v{a}" for a in step.args[1:])
            self.put(f"outside |= (v{i} != v{step.args[0]}){counts};")

    def _operand(self, i: int, a: int) -> str:
        """The value of step `a` as step `i` reads it: with 64 bits where that one needs them."""
        step = self.nest.steps[i]
        wide = i in self.far if step.name == "load" else step.dtype == "int64" and i not in self.narrow
        return f"(int64_t)v{a}" if wide and a in self.narrow else f"v{a}"

    def _expression(self, i: int, step: Step) -> str:
        args = [self._operand(i, a) for a in step.args]
        if i in self.scheduled.absolute:
            return f"tw_{step.name}_absolute({args[0]})"
        if step.access:
            element = self._element(step.access, self._indices(i, step))
            loaded = from_storage(element, self.nest.buffers[step.access.buffer].dtype)
            condition = self.nest.condition(step)
            if condition is None:
                return loaded
            return f"v{condition} ? ({COMPUTED[step.dtype]})({loaded}) : ({COMPUTED[step.dtype]})0"
        if step.strides is not None:
            return f"({'int32_t' if i in self.narrow else 'int64_t'})({self.index(step.strides)})"
        if step.name == "check":
            return f"tw_inside({args[0]}, {step.constant})"
        if (
            step.name == "div"
            and step.level in (Level.ROW, Level.SCALAR)
            and self.scheduled.is_double_sum(step.args[0])
        ):
            # Divide the double before rounding, so that the mean of equal values is that value; keep overflow.
            total = step.args[0]
            return f"tw_isinf(v{total}) ? v{total} : ({COMPUTED[step.dtype]})(total{total} / {args[1]})"
        if step.name == "cast" and self.nest.steps[step.args[0]].dtype == "bool":
            # g++ 12 vectorises no loop that converts a bool: gradients of 124 × 2000 logits took 950 µs so, 120 now.
            return f"{args[0]} ? 1 : 0"
        return scalar(replace(step, dtype="int32") if i in self.narrow else step, args)

    @cached_property
    def compared(self) -> Sequence[bool]:
        """For each step whether it is computed of comparisons in this kernel."""
        found: list[bool] = []
        for step in self.nest.steps:
            found.append(step.dtype == "bool" or (step.access is None and any(found[a] for a in step.args)))
        return found

    @property
    def hides_zero(self) -> bool:
        """Whether a load's index is computed of comparisons."""
        loads = [(step.access, step.args) for step in self.nest.steps if step.access]
        return any(self.compared[a] for access, args in loads for a in args[: len(access.by)])

    def _indices(self, i: int, step: Step) -> list[str]:
        """The operands of a load. In a vector, g++ 12 takes an index that is a comparison for 0 or -1, unless it is
        computed with a number that g++ does not know (`zero`)."""
        assert step.access
        named = [(a, self._operand(i, a)) for a in step.args[: len(step.access.by)]]
        return [f"({name} ^ zero)" if self.compared[a] else name for a, name in named]

    def _element(self, access: Access, args: Sequence[str] = ()) -> str:
        shift = f" + {access.offset}" if access.offset else ""
        shift += "".join(f" + {index} * {stride}" for index, stride in zip(args, access.by, strict=False))
        return f"{self.pointers[access.buffer]}[{self.index(access.strides)}{shift}]"

    def store(self, value: int, access: Access) -> None:
        dtype = self.nest.buffers[access.buffer].dtype
        stored = self._copied(value, dtype) or to_storage(f"v{value}", dtype)
        self.put(f"{self._element(access)} = {stored};")

    def _copied(self, i: int, dtype: str) -> str | None:
        """The text of an element that is stored as it was loaded, not by way of fp32; None for other values."""
        step = self.nest.steps[i]
        if step.name != "load" or i in self.scheduled.kept or dtype not in COMPUTE_DTYPE:
            return None
        assert step.access
        if self.nest.buffers[step.access.buffer].dtype != dtype:
            return None
        condition = self.nest.condition(step)
        element = self._element(step.access, self._indices(i, step))
        return element if condition is None else f"v{condition} ? {element} : ({STORED[dtype]})0"
