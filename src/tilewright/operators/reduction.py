"""Reductions: sums, means, extremes and where they are, moments, norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from math import prod

from tilewright.operators.arithmetic import NOTHING, per_operand
from tilewright.operators.language import FLOATS, Scalar, Value, call, predicate, where
from tilewright.operators.row import Call, Says, body
from tilewright.operators.shapes import reduction

Dims = Sequence[int] | int | None
FARTHEST = 2**62
ONE, VARIANCE = per_operand(1), per_operand(4)
EXTREME: Says = {"arithmetic": ONE, "shapes": reduction, "discontinuous": True}
WITH_PLACE: Says = {**EXTREME, "promotion": "none", "dtypes": ("self", "int64")}
PLACE: Says = {**WITH_PLACE, "dtypes": ("int64",)}
TRUTH: Says = {**PLACE, "arithmetic": NOTHING, "dtypes": ("bool",)}
BOTH_EXTREMES: Says = {**WITH_PLACE, "arithmetic": per_operand(2), "dtypes": ("self", "self")}

reduced = functools.partial(body, operator_class="reduction")


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


@reduced("mean.default(self, dtype)", "mean.dim(self, dim, keepdim, dtype)", arithmetic=ONE, shapes=reduction)
def mean(c: Call, x: Value, dims: Dims = None, keepdim: bool = False, dtype: object = None) -> Value:
    dims = _all_if_empty(dims)
    return x.sum(dims, keepdim) / _count(x, dims)


@reduced("prod.default(self, dtype)", "prod.dim_int(self, dim, keepdim, dtype)", arithmetic=ONE, shapes=reduction)
def product(c: Call, x: Value, dim: Dims = None, keepdim: bool = False, dtype: object = None) -> Value:
    return x.reduce("prod", dim, keepdim)


# The gradient of an extreme goes to the elements that equal it: backward must meet eager's own extreme.


@reduced("amax.default(self, dim, keepdim)", **EXTREME)
def amax(c: Call, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return x.max(_all_if_empty(dims), keepdim)


@reduced("amin.default(self, dim, keepdim)", **EXTREME)
def amin(c: Call, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return x.min(_all_if_empty(dims), keepdim)


@reduced("max.default(self)", **EXTREME)
def max_all(c: Call, x: Value) -> Value:
    return x.max(None, keepdim=False)


@reduced("min.default(self)", **EXTREME)
def min_all(c: Call, x: Value) -> Value:
    return x.min(None, keepdim=False)


def _first_at(x: Value, extreme: Value, dim: int, keepdim: bool) -> Value:
    """The first position along `dim` that holds `extreme`; NaN is the extreme where there is one."""
    hit = x.eq(extreme)
    if x.dtype in FLOATS:
        hit = hit | predicate("isnan", x)
    return where(hit, x.index(dim), FARTHEST).min(dim, keepdim)


@reduced("max.dim(self, dim, keepdim)", **WITH_PLACE)
def max_dim(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return x.max(dim, keepdim), _first_at(x, x.max(dim), dim, keepdim)


@reduced("min.dim(self, dim, keepdim)", **WITH_PLACE)
def min_dim(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return x.min(dim, keepdim), _first_at(x, x.min(dim), dim, keepdim)


@reduced("argmax.default(self, dim, keepdim)", **PLACE)
def argmax(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is None:
        x, dim = x.view([prod(x.shape)]), 0
    return _first_at(x, x.max(dim), dim, keepdim)


@reduced("argmin.default(self, dim, keepdim)", **PLACE)
def argmin(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is None:
        x, dim = x.view([prod(x.shape)]), 0
    return _first_at(x, x.min(dim), dim, keepdim)


@reduced("any.default(self)", "any.dim(self, dim, keepdim)", "any.dims(self, dim, keepdim)", **TRUTH)
def any_(c: Call, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return x.ne(0).reduce("any", dims, keepdim)


@reduced("all.default(self)", "all.dim(self, dim, keepdim)", "all.dims(self, dim, keepdim)", **TRUTH)
def all_(c: Call, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return x.ne(0).reduce("all", dims, keepdim)


def variance(x: Value, dims: Dims, correction: Scalar | None, keepdim: bool) -> tuple[Value, Value]:
    """Two passes over the values at hand: the mean, then the squared distances from it."""
    dims = _all_if_empty(dims)
    count = _count(x, dims)
    centred = x - x.sum(dims) / count
    freedom = max(count - (1 if correction is None else correction), 0)
    return (centred * centred).sum(dims, keepdim) / freedom, x.sum(dims, keepdim) / count


@reduced("var.correction(self, dim, correction, keepdim)", arithmetic=VARIANCE, shapes=reduction)
def var(c: Call, x: Value, dims: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False) -> Value:
    return variance(x, dims, correction, keepdim)[0]


@reduced("std.correction(self, dim, correction, keepdim)", arithmetic=VARIANCE, shapes=reduction)
def std(c: Call, x: Value, dims: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False) -> Value:
    return call("sqrt", variance(x, dims, correction, keepdim)[0])


@reduced(
    "var_mean.correction(self, dim, correction, keepdim)",
    arithmetic=VARIANCE,
    shapes=reduction,
    dtypes=("self", "self"),
)
def var_mean(
    c: Call, x: Value, dims: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    return variance(x, dims, correction, keepdim)


@reduced("logsumexp.default(self, dim, keepdim)", arithmetic=per_operand(3, 1), shapes=reduction)
def logsumexp(c: Call, x: Value, dims: Dims, keepdim: bool = False) -> Value:
    top = x.max(dims)
    shift = where(predicate("isinf", top), 0, top)
    lowered = call("log", call("exp", x - shift).sum(dims))
    total = lowered + shift
    return total if keepdim else total.squeeze([dims] if isinstance(dims, int) else list(dims or ()))


@reduced("linalg_vector_norm.default(self, ord, dim, keepdim, dtype)", arithmetic=per_operand(2), shapes=reduction)
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


@reduced(
    "std_mean.correction(self, dim, correction, keepdim)",
    arithmetic=VARIANCE,
    shapes=reduction,
    dtypes=("self", "self"),
)
def std_mean(
    c: Call, x: Value, dims: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    spread, mean = variance(x, dims, correction, keepdim)
    return call("sqrt", spread), mean


@reduced("aminmax.default(self, dim, keepdim)", **BOTH_EXTREMES)
def aminmax(c: Call, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    return x.min(dim, keepdim), x.max(dim, keepdim)


@reduced("count_nonzero.dim_IntList(self, dim)", **PLACE)
def count_nonzero(c: Call, x: Value, dims: Dims = None) -> Value:
    return x.ne(0).to_compute("int64").sum(_all_if_empty(dims), keepdim=False)
