"""Elementwise operators: each result element depends on one element of each (broadcast) operand."""

from __future__ import annotations

import math
import sys
from functools import partial

from tilewright.operators.arithmetic import NOTHING, per_result
from tilewright.operators.language import FLOATS, Scalar, Unfusable, Value, call, predicate, where
from tilewright.operators.row import Call, Row, RowFields, body, declare, formulas

UNARY = "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh erf erfc sigmoid"
PREDICATE: RowFields = {"promotion": "none", "discontinuous": True, "dtypes": ("bool",)}
LOGIC: RowFields = {**PREDICATE, "arithmetic": NOTHING}
ROUNDING = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "round_even"}


def _rounding(name: str, function: str) -> None:
    @body(f"{name}.default(self)", discontinuous=True)
    def _(c: Call, x: Value) -> Value:
        # Rounding an integer leaves it as it is.
        return call(function, x) if c.dtype in FLOATS else x


for _name, _function in ROUNDING.items():
    _rounding(_name, _function)


formulas({f"{name}.default(self)": partial(lambda function, c, x: call(function, x), name) for name in UNARY.split()})
formulas(
    {
        "neg.default(self)": lambda c, x: -x,
        "abs.default(self)": lambda c, x: call("abs", x),
        "reciprocal.default(self)": lambda c, x: 1 / x,
    }
)
formulas(
    {
        "sign.default(self) sgn.default(self)": lambda c, x: call("sign", x),
        "frac.default(self)": lambda c, x: x - call("trunc", x),
    },
    discontinuous=True,
)
formulas(
    {
        "isnan.default(self)": lambda c, x: predicate("isnan", x),
        "isinf.default(self)": lambda c, x: predicate("isinf", x),
        "isposinf.default(self)": lambda c, x: _equals(c, x, math.inf),
        "isneginf.default(self)": lambda c, x: _equals(c, x, -math.inf),
    },
    **PREDICATE,
)
formulas({"logical_not.default(self)": lambda c, x: x.eq(0)}, **LOGIC)
formulas(
    {"bitwise_not.default(self)": lambda c, x: x.eq(0) if c.dtype == "bool" else call("bitnot", x)},
    arithmetic=NOTHING,
    integral=True,
)


def _equals(c: Call, x: Value, number: float) -> Value:
    return x.eq(number) if x.dtype in FLOATS else c.trace.full(False, "bool", c.shape)


# Arithmetic. `alpha` scales the second operand.


BITS = {"bfloat16": 8, "float16": 11}
"""Of the significand."""


def _nearest(number: Scalar, dtype: str) -> Scalar:
    """`number` as one of a dtype of 16 bits, within its range; other dtypes leave it as it is."""
    if dtype not in BITS or not math.isfinite(number):
        return number
    fraction, scale = math.frexp(number)
    return math.ldexp(round(math.ldexp(fraction, BITS[dtype])), scale - BITS[dtype])


def _term(c: Call, y: Value | Scalar, alpha: Scalar = 1) -> Value | Scalar:
    """y · alpha; where PyTorch adds on a CPU, it takes numbers as those of the dtype."""
    if c.in_cpp:
        y, alpha = y if isinstance(y, Value) else _nearest(y, c.dtype), _nearest(alpha, c.dtype)
    return y if alpha == 1 else y * alpha


formulas(
    {"add.Tensor(self, other, alpha) add.Scalar(self, other, alpha)": lambda c, x, y, alpha=1: x + _term(c, y, alpha)},
    part="sum",
)
formulas(
    {
        "sub.Tensor(self, other, alpha) sub.Scalar(self, other, alpha)": lambda c, x, y, alpha=1: (
            x - _term(c, y, alpha)
        ),
        "rsub.Tensor(self, other, alpha) rsub.Scalar(self, other, alpha)": lambda c, x, y, alpha=1: (
            _term(c, y) - _term(c, x, alpha)
        ),
        "mul.Tensor(self, other) mul.Scalar(self, other)": lambda c, x, y: x * y,
        "div.Tensor(self, other) div.Scalar(self, other) true_divide.Tensor(self, other)": Call.quotient,
        "maximum.default(self, other)": lambda c, x, y: call("maximum", x, y),
        "minimum.default(self, other)": lambda c, x, y: call("minimum", x, y),
        "pow.Tensor_Tensor(self, exponent)": lambda c, x, exponent: call("pow", x, exponent),
        # PyTorch makes the base a tensor of the exponent's dtype: 70000 is infinite in fp16.
        "pow.Scalar(self, exponent)": lambda c, base, exponent: call(
            "pow", exponent.lift(base).rounded(c.dtype), exponent
        ),
        "atan2.default(self, other)": lambda c, x, y: call("atan2", x, y),
        "addcmul.default(self, tensor1, tensor2, value)": lambda c, x, a, b, value=1: x + (a * value) * b,
        "addcdiv.default(self, tensor1, tensor2, value)": lambda c, x, a, b, value=1: x + (a * value) / b,
        # From the nearer end, as PyTorch does, so that weights 0 and 1 give the ends.
        "lerp.Scalar(self, end, weight)": lambda c, x, end, weight: (
            x + (end - x) * weight if weight < 0.5 else end - (end - x) * (1 - weight)
        ),
        "clamp_min.default(self, min) clamp_min.Tensor(self, min)": lambda c, x, low: call("maximum", x, low),
        "clamp_max.default(self, max) clamp_max.Tensor(self, max)": lambda c, x, high: call("minimum", x, high),
        # The larger or smaller; of a number and NaN the number.
        "fmax.default(self, other)": lambda c, x, y: _unless_nan(x, y, call("maximum", x, y)),
        "fmin.default(self, other)": lambda c, x, y: _unless_nan(x, y, call("minimum", x, y)),
    }
)
formulas(
    {
        "lerp.Tensor(self, end, weight)": lambda c, x, end, weight: where(
            call("abs", weight) < 0.5, x + (end - x) * weight, end - (end - x) * (1 - weight)
        )
    },
    arithmetic=per_result(3),
)


def _unless_nan(x: Value, y: Value, otherwise: Value) -> Value:
    return where(predicate("isnan", x), y, where(predicate("isnan", y), x, otherwise))


@body("pow.Tensor_Scalar(self, exponent)")
def power(c: Call, x: Value, exponent: Scalar) -> Value:
    """PyTorch makes the exponent a number of the dtype: 1.7 is 1.703125 in bf16, and 2.001 is 2."""
    exponent = _nearest(exponent, c.dtype)
    if exponent in (2, 3, -2) and (exponent > 0 or c.dtype in FLOATS):
        # PyTorch rounds the square too, in fp16 only on a GPU.
        square = x * x
        square = square.rounded(c.dtype) if c.exact and not (c.in_cpp and c.dtype == "float16") else square
        return x * x if exponent == 2 else square * x if exponent == 3 else 1 / square
    if c.dtype in FLOATS:
        if exponent == 1:
            return x
        # They differ at -inf, where PyTorch takes the power in fp16 and the root in wider floats.
        if abs(exponent) == 0.5 and c.dtype != "float16":
            return call("sqrt" if exponent > 0 else "rsqrt", x)
        if exponent == -1:
            return 1 / x
    return call("pow", x, exponent)


LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": sys.float_info.max,
}


@body("nan_to_num.default(self, nan, posinf, neginf)", arithmetic=NOTHING)
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
    @body(
        f"{name}.Tensor(self, other)",
        f"{name}.Scalar(self, other)",
        promotion="common",
        discontinuous=True,
        dtypes=("bool",),
    )
    def _(c: Call, x: Value, y: Value | Scalar) -> Value:
        other = x.lift(y)
        if not isinstance(y, Value):
            other = other.rounded(c.common)
        return x._call(name, other, dtype="bool")


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


def _logical(name: str, symbol: str) -> None:
    @body(f"logical_{name}.default(self, other)", **LOGIC)
    def _(c: Call, x: Value, y: Value) -> Value:
        return x.ne(0)._call(symbol, y.ne(0))

    @body(f"bitwise_{name}.Tensor(self, other)", f"bitwise_{name}.Scalar(self, other)", integral=True)
    def _(c: Call, x: Value, y: Value | Scalar) -> Value:
        return x._call(symbol, y)


for _name in ("and", "or", "xor"):
    _logical(_name, _name)
formulas(
    {
        "where.self(condition, self, other)": lambda c, condition, x, y: where(
            condition, x.to_compute(c.dtype), y.to_compute(c.dtype)
        ),
        "masked_fill.Scalar(self, mask, value)": lambda c, x, mask, value: where(mask, value, x),
        "masked_fill.Tensor(self, mask, value)": lambda c, x, mask, value: where(mask, value.to_compute(c.dtype), x),
    },
    promotion="none",
)


@body("clamp.default(self, min, max)", "clamp.Tensor(self, min, max)")
def clamp(c: Call, x: Value, low: Value | Scalar | None = None, high: Value | Scalar | None = None) -> Value:
    if low is not None:
        x = call("maximum", x, low)
    return x if high is None else call("minimum", x, high)


@body("logaddexp.default(self, other)")
def logaddexp(c: Call, x: Value, y: Value) -> Value:
    """log(exp x + exp y); of equal infinities that infinity."""
    total = call("maximum", x, y) + call("log1p", call("exp", -call("abs", x - y)))
    return where(predicate("isinf", x) & x.eq(y), x, total)


# Division of integers by a number.


def _quotient(x: Value | Scalar, divisor: Value | Scalar) -> Value:
    """⌊x / divisor⌋. A divisor that may be 0 is left to PyTorch, which raises an error."""
    is_positive = isinstance(divisor, int) and not isinstance(divisor, bool) and divisor > 0
    if not isinstance(x, Value) or x.dtype in FLOATS or not is_positive:
        raise Unfusable("a rounded division is generated only for integers divided by a positive number")
    # For negative x: ⌊x / d⌋ = -1 - ⌊(-1 - x) / d⌋, and -1 - x does not overflow.
    below = call("bitnot", call("idiv", call("bitnot", x), divisor))
    return where(x < 0, below, call("idiv", x, divisor)) if x.dtype != "uint8" else call("idiv", x, divisor)


formulas(
    {
        "floor_divide.default(self, other) floor_divide.Scalar(self, other)": lambda c, x, y: _quotient(x, y),
        # It has the sign of y.
        "remainder.Scalar(self, other)": lambda c, x, y: x - _quotient(x, y) * y,
    },
    arithmetic=per_result(1),
)


@body(
    "div.Tensor_mode(self, other, rounding_mode)",
    "div.Scalar_mode(self, other, rounding_mode)",
    arithmetic=per_result(1),
    discontinuous=True,
)
def divide_and_round(c: Call, x: Value, y: Value | Scalar, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return c.quotient(x, y)
    if rounding_mode == "trunc" and c.dtype in FLOATS:
        quotient = c.quotient(x, y)
        # Eager rounds it first, but not where it divides by a number, or on a CPU by a tensor of one element.
        rounds = isinstance(y, Value) and (any(y.dims) or not c.in_cpp)
        return call("trunc", quotient.rounded(c.dtype) if rounds else quotient)
    quotient = _quotient(x, y)
    return quotient if rounding_mode == "floor" else where((x < 0) & (quotient * y).ne(x), quotient + 1, quotient)


# Conversions.


def _convert(c: Call, x: Value, *_: object, **__: object) -> Value:
    return x.cast(c.dtype)


body("_to_copy.default(self, ...)", promotion="none", discontinuous=True, priced=False, part="copy")(_convert)
declare(
    Row(
        "prims.convert_element_type.default(a, dtype)",
        "pointwise",
        _convert,
        promotion="none",
        discontinuous=True,
        priced=False,
    )
)
body("clone.default(self, memory_format)", promotion="none", priced=False, part="copy")(lambda c, x, **_: x)
# Dynamo's, for `addcmul_` and its like.
declare(Row("prims.fma.default(a, b, c)", "pointwise", lambda c, x, y, z: x * y + z))
