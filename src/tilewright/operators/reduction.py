"""Reductions: sums, means, extremes and where they are, moments, norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from math import prod
from typing import Any, Literal

from tilewright.operators.arithmetic import NOTHING, per_operand
from tilewright.operators.language import FLOATS, ReduceKind, Scalar, Unfusable, Value, call, ordered, predicate, where
from tilewright.operators.row import Call, RowFields, body
from tilewright.operators.shapes import reduction, same

Dims = Sequence[int] | int | None
FARTHEST = 2**62
ONE, VARIANCE = per_operand(1), per_operand(4)
EXTREME: RowFields = {"arithmetic": ONE, "shapes": reduction, "discontinuous": True}
WITH_PLACE: RowFields = {**EXTREME, "promotion": "none", "dtypes": ("self", "int64")}
PLACE: RowFields = {**WITH_PLACE, "dtypes": ("int64",)}
TRUTH: RowFields = {**PLACE, "arithmetic": NOTHING, "dtypes": ("bool",)}
BOTH_EXTREMES: RowFields = {**WITH_PLACE, "arithmetic": per_operand(2), "dtypes": ("self", "self")}

reduced = functools.partial(body, operator_class="reduction")


@reduced("cumsum.default(self, dim, dtype)", arithmetic=ONE, shapes=same)
def cumsum(c: Call, x: Value, dim: int, dtype: object = None) -> Value:
    return _scan(c, x, "sum", dim)


@reduced("cumprod.default(self, dim, dtype)", arithmetic=ONE, shapes=same)
def cumprod(c: Call, x: Value, dim: int, dtype: object = None) -> Value:
    return _scan(c, x, "prod", dim)


def _scan(c: Call, x: Value, kind: ReduceKind, dim: int) -> Value:
    if c.in_cpp:
        raise Unfusable("on a CPU, PyTorch's own scan is used")
    return x.to_compute(c.dtype).scan(kind, dim)


def _all_if_empty(dims: Dims) -> Dims:
    return None if isinstance(dims, Sequence) and not dims else dims


def _count(x: Value, dims: Dims) -> int:
    """Elements of `x` that one result element is made of."""
    if dims is None:
        return prod(x.shape)
    return prod(x.shape[d] for d in ([dims] if isinstance(dims, int) else dims)) if x.shape else 1


@reduced("sum.default(self, dtype)", "sum.dim_IntList(self, dim, keepdim, dtype)", arithmetic=ONE, shapes=reduction)
def sum_(c: Call, x: Value, dims: Dims = None, keepdim: bool = False, dtype: object = None) -> Value:
    return x.sum(_all_if_empty(dims), keepdim)


@reduced("nansum.default(self, dim, keepdim, dtype)", arithmetic=ONE, shapes=reduction)
def nansum(c: Call, x: Value, dims: Dims = None, keepdim: bool = False, dtype: object = None) -> Value:
    x = where(predicate("isnan", x), 0, x) if x.dtype in FLOATS else x
    return x.sum(_all_if_empty(dims), keepdim)


@reduced("mean.default(self, dtype)", "mean.dim(self, dim, keepdim, dtype)", arithmetic=ONE, shapes=reduction)
def mean(c: Call, x: Value, dims: Dims = None, keepdim: bool = False, dtype: object = None) -> Value:
    dims = _all_if_empty(dims)
    return x.sum(dims, keepdim) / _count(x, dims)


@reduced("prod.default(self, dtype)", "prod.dim_int(self, dim, keepdim, dtype)", arithmetic=ONE, shapes=reduction)
def product(c: Call, x: Value, dim: Dims = None, keepdim: bool = False, dtype: object = None) -> Value:
    return x.reduce("prod", dim, keepdim)


def first_at(x: Value, extreme: Value, dim: int, keepdim: bool) -> Value:
    """The first position along `dim` that holds `extreme`; NaN is the extreme where there is one."""
    hit = x.eq(extreme)
    if x.dtype in FLOATS:
        hit = hit | predicate("isnan", x)
    return where(hit, x.index(dim), FARTHEST).min(dim, keepdim)


def _place(c: Call, x: Value, kind: Literal["max", "min"], dim: int, keepdim: bool) -> Value:
    """The first position of the extreme along `dim`.

    A GPU finds it in one reduction of 64-bit keys: the rank of the element, then that of its position. So it need not
    wait for the extreme, and reduces any axis in any order.
    """
    is_narrow = x.dtype in ("float32", "int32", "int16", "int8", "uint8", "bool")
    if c.in_cpp or not is_narrow or not x.dims or x.shape[dim] >= 2**31:
        return first_at(x, x.reduce(kind, dim), dim, keepdim)
    rank = ordered(x if kind == "max" else x * -1.0) if x.dtype in FLOATS else x
    key = rank.to_compute("int64")
    if kind == "min" and x.dtype not in FLOATS:
        key = key * -1
    best = (key * 2**32 + (2**32 - 1) - x.index(dim)).max(dim, keepdim)
    return (2**32 - 1) - (best & best.lift(2**32 - 1))


def _extremes(kind: Literal["max", "min"]) -> None:
    # The gradient of an extreme goes to the elements that equal it: backward must meet eager's own extreme.
    @reduced(f"a{kind}.default(self, dim, keepdim)", **EXTREME)
    def _(c: Call, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
        return x.reduce(kind, _all_if_empty(dims), keepdim)

    @reduced(f"{kind}.default(self)", **EXTREME)
    def _(c: Call, x: Value) -> Value:
        return x.reduce(kind, None, keepdim=False)

    @reduced(f"{kind}.dim(self, dim, keepdim)", **WITH_PLACE)
    def _(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        return x.reduce(kind, dim, keepdim), _place(c, x, kind, dim, keepdim)

    @reduced(f"arg{kind}.default(self, dim, keepdim)", **PLACE)
    def _(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if dim is None:
            x, dim = x.view([prod(x.shape)]), 0
        return _place(c, x, kind, dim, keepdim)


def _truth(kind: Literal["any", "all"]) -> None:
    @reduced(f"{kind}.default(self)", f"{kind}.dim(self, dim, keepdim)", f"{kind}.dims(self, dim, keepdim)", **TRUTH)
    def _(c: Call, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
        return x.ne(0).reduce(kind, dims, keepdim)


_extremes("max")
_extremes("min")
_truth("any")
_truth("all")


def variance(x: Value, dims: Dims, correction: Scalar | None, keepdim: bool) -> tuple[Value, Value]:
    """Two passes over the values at hand: the mean, then the squared distances from it."""
    dims = _all_if_empty(dims)
    count = _count(x, dims)
    centred = x - x.sum(dims) / count
    freedom = max(count - (1 if correction is None else correction), 0)
    return (centred * centred).sum(dims, keepdim) / freedom, x.sum(dims, keepdim) / count


def _spread(name: str, *, is_root: bool, with_mean: bool) -> None:
    """A variance or a standard deviation, alone or with the mean."""

    @reduced(
        f"{name}.correction(self, dim, correction, keepdim)",
        arithmetic=VARIANCE,
        shapes=reduction,
        dtypes=("self", "self") if with_mean else ("",),
    )
    def _(c: Call, x: Value, dims: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False) -> Any:
        spread, mean = variance(x, dims, correction, keepdim)
        spread = call("sqrt", spread) if is_root else spread
        return (spread, mean) if with_mean else spread


_spread("var", is_root=False, with_mean=False)
_spread("std", is_root=True, with_mean=False)
_spread("var_mean", is_root=False, with_mean=True)
_spread("std_mean", is_root=True, with_mean=True)


@reduced("logsumexp.default(self, dim, keepdim)", arithmetic=per_operand(3, 1), shapes=reduction)
def logsumexp(c: Call, x: Value, dims: Dims, keepdim: bool = False) -> Value:
    top = x.max(dims)
    shift = where(predicate("isinf", top), 0, top)
    lowered = call("log", call("exp", x - shift).sum(dims))
    total = lowered + shift
    return total if keepdim else total.squeeze([dims] if isinstance(dims, int) else list(dims or ()))


def _of_order(name: str) -> RowFields:
    """A norm whose order is the argument `name`."""
    return {
        "arithmetic": per_operand(2),
        "shapes": reduction,
        "discontinuous": lambda arguments: arguments[name] in (0, math.inf, -math.inf),
    }


@reduced(
    "norm.Scalar(self, p)",
    "norm.ScalarOpt_dtype(self, p, dtype)",
    "norm.ScalarOpt_dim(self, p, dim, keepdim)",
    "norm.ScalarOpt_dim_dtype(self, p, dim, keepdim, dtype)",
    **_of_order("p"),
)
def norm(
    c: Call, x: Value, p: Scalar | None = 2, dims: Dims = None, keepdim: bool = False, dtype: object = None
) -> Value:
    return vector_norm(c, x, 2 if p is None else p, _all_if_empty(dims), keepdim)


@reduced("linalg_vector_norm.default(self, ord, dim, keepdim, dtype)", **_of_order("ord"))
def vector_norm(
    c: Call, x: Value, ord: Scalar = 2, dims: Dims = None, keepdim: bool = False, dtype: object = None
) -> Value:
    if ord == 2:
        return call("sqrt", (x * x).sum(dims, keepdim))
    if ord == 0:
        return x.ne(0).to_compute(x.dtype).sum(dims, keepdim)
    if ord == 1:
        return call("abs", x).sum(dims, keepdim)
    if ord in (math.inf, -math.inf):
        return call("abs", x).reduce("max" if ord > 0 else "min", dims, keepdim)
    return call("pow", call("pow", call("abs", x), ord).sum(dims, keepdim), 1 / ord)


@reduced("aminmax.default(self, dim, keepdim)", **BOTH_EXTREMES)
def aminmax(c: Call, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    return x.min(dim, keepdim), x.max(dim, keepdim)


@reduced("count_nonzero.default(self, dim)", "count_nonzero.dim_IntList(self, dim)", **PLACE)
def count_nonzero(c: Call, x: Value, dims: Dims = None) -> Value:
    return x.ne(0).to_compute("int64").sum(_all_if_empty(dims), keepdim=False)
