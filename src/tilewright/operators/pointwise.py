"""Elementwise operators: each result element depends on one element of each (broadcast) operand."""

from __future__ import annotations

import math
import sys

from tilewright.operators.language import FLOATS, Scalar, Unfusable, Value, call, predicate, where
from tilewright.operators.row import Call, Row, body, declare

UNARY = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "erf",
    "erfc",
    "sigmoid",
]
ROUNDING = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "round_even"}


def _unary(name: str) -> None:
    @body(f"{name}.default")
    def _(c: Call, x: Value) -> Value:
        return call(name, x)


def _rounding(name: str, function: str) -> None:
    @body(f"{name}.default", discontinuous=True)
    def _(c: Call, x: Value) -> Value:
        # Rounding an integer leaves it as it is.
        return call(function, x) if c.dtype in FLOATS else x


for _name in UNARY:
    _unary(_name)
for _name, _function in ROUNDING.items():
    _rounding(_name, _function)


@body("sign.default", "sgn.default", discontinuous=True)
def sign(c: Call, x: Value) -> Value:
    return call("sign", x)


@body("isnan.default", promotion="none", discontinuous=True)
def isnan(c: Call, x: Value) -> Value:
    return predicate("isnan", x)


@body("isinf.default", promotion="none", discontinuous=True)
def isinf(c: Call, x: Value) -> Value:
    return predicate("isinf", x)


@body("logical_not.default", promotion="none", discontinuous=True)
def logical_not(c: Call, x: Value) -> Value:
    return x.eq(0)


@body("neg.default")
def neg(c: Call, x: Value) -> Value:
    return -x


@body("abs.default")
def absolute(c: Call, x: Value) -> Value:
    return call("abs", x)


@body("reciprocal.default")
def reciprocal(c: Call, x: Value) -> Value:
    return 1 / x


@body("bitwise_not.default")
def bitwise_not(c: Call, x: Value) -> Value:
    return x.eq(0) if c.dtype == "bool" else call("bitnot", x)


# Arithmetic. `alpha` scales the second operand.


@body("add.Tensor", "add.Scalar")
def add(c: Call, x: Value, y: Value | Scalar, alpha: Scalar = 1) -> Value:
    return x + y if alpha == 1 else x + y * alpha


@body("sub.Tensor", "sub.Scalar")
def sub(c: Call, x: Value, y: Value | Scalar, alpha: Scalar = 1) -> Value:
    return x - y if alpha == 1 else x - y * alpha


@body("rsub.Scalar", "rsub.Tensor")
def rsub(c: Call, x: Value, y: Value | Scalar, alpha: Scalar = 1) -> Value:
    return y - x if alpha == 1 else y - x * alpha


@body("mul.Tensor", "mul.Scalar")
def mul(c: Call, x: Value, y: Value | Scalar) -> Value:
    return x * y


@body("div.Tensor", "div.Scalar")
def div(c: Call, x: Value, y: Value | Scalar) -> Value:
    return x / y


@body("maximum.default")
def maximum(c: Call, x: Value, y: Value) -> Value:
    return call("maximum", x, y)


@body("minimum.default")
def minimum(c: Call, x: Value, y: Value) -> Value:
    return call("minimum", x, y)


@body("pow.Tensor_Scalar")
def power(c: Call, x: Value, exponent: Scalar) -> Value:
    if exponent == 2:
        return x * x
    if exponent == 3:
        return x * x * x
    if c.dtype in FLOATS:
        if exponent == 1:
            return x
        # They differ at -inf, where PyTorch takes the power in fp16 and the root in wider floats.
        if abs(exponent) == 0.5 and c.dtype != "float16":
            return call("sqrt" if exponent > 0 else "rsqrt", x)
        if exponent == -1:
            return 1 / x
    return call("pow", x, exponent)


@body("pow.Tensor_Tensor")
def power_tensor(c: Call, x: Value, exponent: Value) -> Value:
    return call("pow", x, exponent)


@body("atan2.default")
def atan2(c: Call, x: Value, y: Value) -> Value:
    return call("atan2", x, y)


@body("addcmul.default")
def addcmul(c: Call, x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + (a * value) * b


@body("addcdiv.default")
def addcdiv(c: Call, x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + (a * value) / b


@body("lerp.Scalar")
def lerp(c: Call, x: Value, end: Value, weight: Scalar) -> Value:
    """From the nearer end, as PyTorch does, so that weights 0 and 1 give the ends."""
    return x + (end - x) * weight if weight < 0.5 else end - (end - x) * (1 - weight)


@body("lerp.Tensor")
def lerp_each(c: Call, x: Value, end: Value, weight: Value) -> Value:
    return where(call("abs", weight) < 0.5, x + (end - x) * weight, end - (end - x) * (1 - weight))


LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": sys.float_info.max,
}


@body("nan_to_num.default")
def nan_to_num(
    c: Call, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if c.dtype not in FLOATS:
        return x
    high = LARGEST[c.dtype] if posinf is None else posinf
    low = -LARGEST[c.dtype] if neginf is None else neginf
    finite = where(x.eq(math.inf), high, where(x.eq(-math.inf), low, x))
    return where(predicate("isnan", x), nan or 0.0, finite)


# Comparison and logic: the operands meet in their common dtype, 16-bit floats as stored.


def _comparison(name: str) -> None:
    @body(f"{name}.Tensor", f"{name}.Scalar", promotion="common", discontinuous=True)
    def _(c: Call, x: Value, y: Value | Scalar) -> Value:
        other = x.lift(y)
        if not isinstance(y, Value):
            other = other.rounded(c.common)
        return x._call(name, other, dtype="bool")


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


def _logical(name: str, symbol: str) -> None:
    @body(f"logical_{name}.default", promotion="none", discontinuous=True)
    def _(c: Call, x: Value, y: Value) -> Value:
        return x.ne(0)._call(symbol, y.ne(0))

    @body(f"bitwise_{name}.Tensor")
    def _(c: Call, x: Value, y: Value) -> Value:
        return x._call(symbol, y)


for _name in ("and", "or", "xor"):
    _logical(_name, _name)


@body("where.self", promotion="none")
def where_self(c: Call, condition: Value, x: Value, y: Value) -> Value:
    return where(condition, x.to_compute(c.dtype), y.to_compute(c.dtype))


@body("masked_fill.Scalar", promotion="none")
def masked_fill_scalar(c: Call, x: Value, mask: Value, value: Scalar) -> Value:
    return where(mask, value, x)


@body("masked_fill.Tensor", promotion="none")
def masked_fill_tensor(c: Call, x: Value, mask: Value, value: Value) -> Value:
    return where(mask, value.to_compute(c.dtype), x)


@body("clamp.default", "clamp.Tensor")
def clamp(c: Call, x: Value, low: Value | Scalar | None = None, high: Value | Scalar | None = None) -> Value:
    if low is not None:
        x = call("maximum", x, low)
    return x if high is None else call("minimum", x, high)


@body("clamp_min.default", "clamp_min.Tensor")
def clamp_min(c: Call, x: Value, low: Value | Scalar) -> Value:
    return call("maximum", x, low)


@body("clamp_max.default", "clamp_max.Tensor")
def clamp_max(c: Call, x: Value, high: Value | Scalar) -> Value:
    return call("minimum", x, high)


# Conversions and constants.


def _convert(c: Call, x: Value) -> Value:
    return x.cast(c.dtype)


body("_to_copy.default", promotion="none", discontinuous=True)(lambda c, x, **_: _convert(c, x))
declare(Row("prims.convert_element_type.default", "pointwise", lambda c, x, _: _convert(c, x), "none", True))
body("clone.default", promotion="none")(lambda c, x, **_: x)
body("full.default", promotion="none")(lambda c, shape, value, **_: c.trace.full(value, c.dtype, shape))
body("full_like.default", promotion="none")(lambda c, x, value, **_: c.trace.full(value, c.dtype, c.shape))
body("fill.Scalar", promotion="none")(lambda c, x, value: c.trace.full(value, c.dtype, c.shape))
body("fill.Tensor", promotion="none")(lambda c, x, value: value.to_compute(c.dtype).expand(c.shape))
body("zero.default", promotion="none")(lambda c, x: c.trace.full(0, c.dtype, c.shape))
body("zeros.default", promotion="none")(lambda c, shape, **_: c.trace.full(0, c.dtype, shape))
body("ones.default", promotion="none")(lambda c, shape, **_: c.trace.full(1, c.dtype, shape))
body("zeros_like.default", promotion="none")(lambda c, x, **_: c.trace.full(0, c.dtype, c.shape))
body("ones_like.default", promotion="none")(lambda c, x, **_: c.trace.full(1, c.dtype, c.shape))
body("new_zeros.default", promotion="none")(lambda c, x, shape, **_: c.trace.full(0, c.dtype, shape))
body("new_ones.default", promotion="none")(lambda c, x, shape, **_: c.trace.full(1, c.dtype, shape))
body("new_full.default", promotion="none")(lambda c, x, shape, value, **_: c.trace.full(value, c.dtype, shape))
body("scalar_tensor.default", promotion="none")(lambda c, value, **_: c.trace.full(value, c.dtype, ()))


@body("arange.start_step", promotion="none")
def arange(c: Call, start: Scalar, end: Scalar, step: Scalar = 1, **_: object) -> Value:
    position = c.trace.arange(c.shape[0]).to_compute(c.dtype)
    return position * step + start


@body("scatter.src", "scatter.value", promotion="none")
def scatter(c: Call, x: Value, dim: int, index: Value, source: Value | Scalar) -> Value:
    """One element along `dim` replaced, as the gradient of a maximum is put where the maximum was."""
    shape = list(c.shape)
    if shape:
        shape[dim] = 1
    one = index.shape == tuple(shape) and (not isinstance(source, Value) or source.shape == index.shape)
    if not one:
        raise Unfusable("a scatter of several elements along an axis")
    if isinstance(source, Value):
        source = source.to_compute(c.dtype)
    return where(x.index(dim).eq(index), source, x)


body("arange.default", promotion="none")(lambda c, end, **_: arange(c, 0, end))
body("arange.start", promotion="none")(lambda c, start, end, **_: arange(c, start, end))
