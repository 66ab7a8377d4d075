"""FLOPs and transcendentals of an operator by its body in the loop language: what it does for one element."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, signature

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements
from tilewright.operators.language import Op, Trace, Value
from tilewright.operators.redundant import eliminate_redundant
from tilewright.operators.row import Call, Row

FREE = {
    *("load", "draw", "const", "index", "check", "cast", "round", "reduce", "scan", "where"),
    *("and", "or", "xor", "not", "bitnot"),
}
FLOP = {
    *("add", "sub", "mul", "div", "idiv", "neg", "abs", "minimum", "maximum", "sign"),
    *("floor", "ceil", "trunc", "round_even", "lt", "le", "gt", "ge", "eq", "ne", "isnan", "isinf", "ordered"),
}
SEVERAL = {"sigmoid": (3, 1)}
"""1 / (1 + exp(-x))."""


def cost_of(op: Op) -> tuple[int, int]:
    """FLOPs and transcendentals of one scalar operation; functions without a line above are transcendentals.

    >>> cost_of(Op("add", (), "float32")), cost_of(Op("exp", (), "float32"))
    ((1, 0), (0, 1))
    """
    if op.name in SEVERAL:
        return SEVERAL[op.name]
    return (0, 0) if op.name in FREE else (1, 0) if op.name in FLOP else (0, 1)


def _accepted(row: Row) -> list[Parameter]:
    """The body's parameters after the call."""
    assert row.body is not None
    parameters = list(signature(row.body).parameters.values())[1:]
    return [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]


def count_element(row: Row, given: Sequence[object]) -> tuple[int, int]:
    """FLOPs and transcendentals for one element of the results.

    `given`: for each argument of the row `Ellipsis` where it is a tensor, else its value, None where that is not known.
    What depends on constants alone counts nothing.
    """
    assert row.body is not None
    trace = Trace()
    arguments: list[object] = []
    for place, (parameter, value) in enumerate(zip(_accepted(row), given, strict=False)):
        if value is ...:
            arguments.append(trace.load(place, "float32", (), ()))
        else:
            arguments.append(parameter.default if value is None and parameter.default is not Parameter.empty else value)
    results = row.body(Call(trace, "float32", (), "float32"), *arguments)
    values = results if isinstance(results, tuple) else (results,)
    ops, _ = eliminate_redundant(trace.ops, [value.id for value in values if isinstance(value, Value)])
    flops = special = 0
    varies: list[bool] = []
    for op in ops:
        varies.append(op.name in ("load", "index", "draw") or any(varies[a] for a in op.args))
        if varies[-1]:
            flops, special = flops + cost_of(op)[0], special + cost_of(op)[1]
    return flops, special


def arithmetic_of(row: Row) -> Arithmetic | None:
    """The row's own arithmetic, else that of a pointwise body; None if neither is known."""
    if row.arithmetic is not None:
        return row.arithmetic
    if row.body is None or row.operator_class != "pointwise":
        return None

    def count(sizes: CallSizes, which: int) -> Count:
        given = [... if sizes.shape(name) is not None else sizes.argument(name) for name in row.arguments]
        return count_element(row, given)[which] * elements(sizes.result())

    return Arithmetic(lambda sizes: count(sizes, 0), lambda sizes: count(sizes, 1))
