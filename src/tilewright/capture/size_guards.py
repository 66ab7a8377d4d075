"""Conditions on symbolic sizes under which a program that was kept is valid (private modules of torch 2.11 to 2.13).

AOTAutograd writes them as an expression over the integers among a program's inputs: Dynamo's own guards, and the
comparisons of sizes that tracing and the passes made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from tilewright.graph.specialise import has_symbols
from tilewright.records.errors import CaptureError


def are_symbolic(inputs: Sequence[Any]) -> bool:
    return any(map(has_symbols, inputs))


class Symbols:
    """The symbols of a program's inputs, numbered by their first occurrence: names differ between processes.

    Raises CaptureError where a symbol is not itself an input, has no value, or is of another shape environment.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        integers = [x for x in inputs if isinstance(x, torch.SymInt)]
        if any(not x.node.has_hint() for x in integers):
            raise CaptureError("a size depends on data")
        if len({id(x.node.shape_env) for x in integers}) > 1:
            raise CaptureError("its symbols are of several shape environments")
        self.known = {x.node.expr for x in integers if isinstance(x.node.expr, sympy.Symbol)}
        self.numbers: dict[sympy.Symbol, sympy.Symbol] = {}

    def text(self, size: Any) -> str:
        """A size or stride: its expression over the numbered symbols; at a symbol's first occurrence, its range too."""
        if not isinstance(size, torch.SymInt):
            return str(size)
        expression, environment = size.node.expr, size.node.shape_env
        ranges = []
        for symbol in sorted(expression.free_symbols - self.numbers.keys(), key=str):
            # A nested tensor's ragged size has no range: it stands for that tensor's lengths.
            if symbol not in self.known or symbol not in environment.var_to_range:
                raise CaptureError(f"the size {expression} is of a symbol that is no input")
            self.numbers[symbol] = sympy.Symbol(f"n{len(self.numbers)}", integer=True)
            ranges.append(f"{self.numbers[symbol]} in {environment.var_to_range[symbol]}")
        return " ".join([str(expression.xreplace(self.numbers)), *ranges])


def on_floats() -> int:
    """How many conditions on floats Dynamo and the trace have made so far, as where one is specialised to its value.

    `hold` knows none of them: a program whose trace makes one is valid for that number alone.
    """
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    context = torch._guards.TracingContext.try_get()
    environment = context and context.fake_mode and context.fake_mode.shape_env
    guards = environment.guards if environment else ()
    return sum(any(symbol_is_type(symbol, SymT.FLOAT) for symbol in guard.expr.free_symbols) for guard in guards)


def hold(guards: str | None, inputs: Sequence[Any]) -> bool:
    """Whether the conditions hold for the sizes of the call that is being compiled. Adds no condition to Dynamo's."""
    return guards is None or _evaluated(guards, [x.node.hint for x in _integers(inputs)], inputs)


def require(guards: str | None, inputs: Sequence[Any]) -> None:
    """Add the conditions to Dynamo's guards, as a trace in this process would have done."""
    if guards is not None and not _evaluated(guards, _integers(inputs), inputs):
        raise CaptureError("the conditions on its sizes do not hold")


def _integers(inputs: Sequence[Any]) -> list[torch.SymInt]:
    return [x for x in inputs if isinstance(x, torch.SymInt)]


def _evaluated(guards: str, numbers: Sequence[Any], inputs: Sequence[Any]) -> bool:
    return bool(_integers(inputs)[0].node.shape_env.evaluate_guards_expression(guards, numbers))
