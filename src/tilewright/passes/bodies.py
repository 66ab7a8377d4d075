"""The body of an operator's row as calls of ATen operators: each reduction, and what is computed from it, by itself.

y = _softmax(x, 1)      →   top = amax(x, 1); e = exp(x - top); y = e / sum(e, 1)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from tilewright.graph.calls import dtype_name, results
from tilewright.graph.insert import insert_formula
from tilewright.operators.axes import Group, size
from tilewright.operators.language import Trace, Unfusable, Value
from tilewright.operators.row import Call
from tilewright.operators.table import row_of

OPERATORS = {name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne")}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **OPERATORS, "div": operator.truediv, "and": operator.and_, "or": operator.or_, "not": torch.logical_not,
    "maximum": torch.clamp_min, "minimum": torch.clamp_max,
}  # fmt: skip
"""Operations of the loop language that are not functions of torch by the same name; Python's take numbers first."""
EXTREMES = {"max": "amax", "min": "amin"}


class _Computed(Trace):
    """A trace that computes each of its operations on tensors; each reduction of a value once."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self._known: dict[Any, Any] = {}
        self.device: torch.device | None = None

    def emit(self, name: str, args: Sequence[Value], dtype: str, dims: tuple[Group, ...], detail: Any = None) -> Value:
        key = name, *(arg.id for arg in args), detail
        found = self._known.get(key)
        if name == "index":
            places = torch.arange(size(detail), dtype=torch.int64, device=self.device)
            found = places.view([size(group) if group == detail else 1 for group in dims]).expand([*map(size, dims)])
        elif found is None:
            found = _result(name, args, [self.result(arg) for arg in args], dtype, detail)
        if name == "reduce":
            self._known[key] = found
        self.results.append(found)
        return super().emit(name, args, dtype, dims, detail)

    def result(self, value: Value) -> Any:
        found = self.results[value.id]
        if self.ops[value.id].name == "load":
            # For each reader: two kernels would share what is widened through memory.
            found = found.to(getattr(torch, value.dtype))
        return found.reshape(value.shape) if isinstance(found, Tensor) and found.shape != value.shape else found


def _result(name: str, args: Sequence[Value], given: list[Any], dtype: str, detail: Any) -> Any:
    """A tensor, or the number of a constant. Raises Unfusable for draws, scans and checked indices."""
    if name == "const":
        return detail
    if name == "reduce":
        kind, axes = detail
        dims = [dim for dim, group in enumerate(args[0].dims) if group and set(group) <= set(axes)]
        return getattr(torch, EXTREMES.get(kind, kind))(given[0], dims, keepdim=True)
    if name == "load":
        return detail.key
    if name == "cast":
        return given[0].to(getattr(torch, dtype))
    if name in ("round", "check", "scan", "draw"):
        raise Unfusable(f"{name} is not computed by itself")
    return (FUNCTIONS.get(name) or getattr(torch, name))(*given)


def write_body(node: fx.Node, *, in_cpp: bool = False) -> Any:
    """Insert what the body of the call's row computes in front of it; its results as nodes, None for one not wanted."""
    row, made = row_of(node.target), results(node)
    assert row is not None and row.body is not None
    dtype = dtype_name(made[0].dtype)

    def formula(*args: Any) -> Any:
        trace = _Computed()

        def loaded(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            trace.device = x.device
            return trace.load(x, dtype_name(x.dtype), x.shape, x.stride())

        call = Call(trace, dtype, tuple(made[0].shape), dtype, in_cpp, apart=True)
        found = row.body(call, *tree_map(loaded, args), **node.kwargs)  # type: ignore[misc]
        if isinstance(found, Value):
            return trace.result(found).to(made[0].dtype)
        return tuple(None if x is None else trace.result(x) for x in found)

    return insert_formula(node, formula, *node.args)
