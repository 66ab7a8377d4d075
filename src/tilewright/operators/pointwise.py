"""Elementwise operators: each result element depends on one element of each (broadcast) operand."""

from __future__ import annotations

import math
import sys

from tilewright.operators.arithmetic import NOTHING, per_result
from tilewright.operators.language import FLOATS, Scalar, Unfusable, Value, call, predicate, where
from tilewright.operators.row import Call, Row, Says, body, declare

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
PREDICATE: Says = {"promotion": "none", "discontinuous": True, "dtypes": ("bool",)}
LOGIC: Says = {**PREDICATE, "arithmetic": NOTHING}
ROUNDING = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "round_even"}


def _unary(name: str) -> None:
    @body(f"{name}.default(self)")
    def _(c: Call, x: Value) -> Value:
        return call(name, x)


def _rounding(name: str, function: str) -> None:
    @body(f"{name}.default(self)", discontinuous=True)
    def _(c: Call, x: Value) -> Value:
        # Rounding an integer leaves it as it is.
        return call(function, x) if c.dtype in FLOATS else x


for _name in UNARY:
    _unary(_name)
for _name, _function in ROUNDING.items():
    _rounding(_name, _function)


@body("sign.default(self)", "sgn.default(self)", discontinuous=True)
def sign(c: Call, x: Value) -> Value:
    return call("sign", x)


@body("isnan.default(self)", **PREDICATE)
def isnan(c: Call, x: Value) -> Value:
    return predicate("isnan", x)


@body("isinf.default(self)", **PREDICATE)
def isinf(c: Call, x: Value) -> Value:
    return predicate("isinf", x)


def _infinity(name: str, number: float) -> None:
    @body(f"{name}.default(self)", **PREDICATE)
    def _(c: Call, x: Value) -> Value:
        return x.eq(number) if x.dtype in FLOATS else c.trace.full(False, "bool", c.shape)


_infinity("isposinf", math.inf)
_infinity("isneginf", -math.inf)


@body("logical_not.default(self)", **LOGIC)
def logical_not(c: Call, x: Value) -> Value:
    return x.eq(0)


@body("neg.default(self)")
def neg(c: Call, x: Value) -> Value:
    return -x


@body("abs.default(self)")
def absolute(c: Call, x: Value) -> Value:
    return call("abs", x)


@body("reciprocal.default(self)")
def reciprocal(c: Call, x: Value) -> Value:
    return 1 / x


@body("bitwise_not.default(self)", arithmetic=NOTHING)
def bitwise_not(c: Call, x: Value) -> Value:
    return x.eq(0) if c.dtype == "bool" else call("bitnot", x)


# Arithmetic. `alpha` scales the second operand.


@body("add.Tensor(self, other, alpha)", "add.Scalar(self, other, alpha)", part="sum")
def add(c: Call, x: Value, y: Value | Scalar, alpha: Scalar = 1) -> Value:
    return x + y if alpha == 1 else x + y * alpha


@body("sub.Tensor(self, other, alpha)", "sub.Scalar(self, other, alpha)")
def sub(c: Call, x: Value, y: Value | Scalar, alpha: Scalar = 1) -> Value:
    return x - y if alpha == 1 else x - y * alpha


@body("rsub.Scalar(self, other, alpha)", "rsub.Tensor(self, other, alpha)")
def rsub(c: Call, x: Value, y: Value | Scalar, alpha: Scalar = 1) -> Value:
    return y - x if alpha == 1 else y - x * alpha


@body("mul.Tensor(self, other)", "mul.Scalar(self, other)")
def mul(c: Call, x: Value, y: Value | Scalar) -> Value:
    return x * y


@body("div.Tensor(self, other)", "div.Scalar(self, other)")
def div(c: Call, x: Value, y: Value | Scalar) -> Value:
    return x / y


@body("maximum.default(self, other)")
def maximum(c: Call, x: Value, y: Value) -> Value:
    return call("maximum", x, y)


@body("minimum.default(self, other)")
def minimum(c: Call, x: Value, y: Value) -> Value:
    return call("minimum", x, y)


@body("pow.Tensor_Scalar(self, exponent)")
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


@body("pow.Tensor_Tensor(self, exponent)")
def power_tensor(c: Call, x: Value, exponent: Value) -> Value:
    return call("pow", x, exponent)


@body("atan2.default(self, other)")
def atan2(c: Call, x: Value, y: Value) -> Value:
    return call("atan2", x, y)


@body("addcmul.default(self, tensor1, tensor2, value)")
def addcmul(c: Call, x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + (a * value) * b


@body("addcdiv.default(self, tensor1, tensor2, value)")
def addcdiv(c: Call, x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + (a * value) / b


@body("lerp.Scalar(self, end, weight)")
def lerp(c: Call, x: Value, end: Value, weight: Scalar) -> Value:
    """From the nearer end, as PyTorch does, so that weights 0 and 1 give the ends."""
    return x + (end - x) * weight if weight < 0.5 else end - (end - x) * (1 - weight)


@body("lerp.Tensor(self, end, weight)", arithmetic=per_result(3))
def lerp_each(c: Call, x: Value, end: Value, weight: Value) -> Value:
    return where(call("abs", weight) < 0.5, x + (end - x) * weight, end - (end - x) * (1 - weight))


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

    @body(f"bitwise_{name}.Tensor(self, other)", f"bitwise_{name}.Scalar(self, other)")
    def _(c: Call, x: Value, y: Value | Scalar) -> Value:
        return x._call(symbol, y)


for _name in ("and", "or", "xor"):
    _logical(_name, _name)


@body("where.self(condition, self, other)", promotion="none")
def where_self(c: Call, condition: Value, x: Value, y: Value) -> Value:
    return where(condition, x.to_compute(c.dtype), y.to_compute(c.dtype))


@body("masked_fill.Scalar(self, mask, value)", promotion="none")
def masked_fill_scalar(c: Call, x: Value, mask: Value, value: Scalar) -> Value:
    return where(mask, value, x)


@body("masked_fill.Tensor(self, mask, value)", promotion="none")
def masked_fill_tensor(c: Call, x: Value, mask: Value, value: Value) -> Value:
    return where(mask, value.to_compute(c.dtype), x)


@body("clamp.default(self, min, max)", "clamp.Tensor(self, min, max)")
def clamp(c: Call, x: Value, low: Value | Scalar | None = None, high: Value | Scalar | None = None) -> Value:
    if low is not None:
        x = call("maximum", x, low)
    return x if high is None else call("minimum", x, high)


@body("clamp_min.default(self, min)", "clamp_min.Tensor(self, min)")
def clamp_min(c: Call, x: Value, low: Value | Scalar) -> Value:
    return call("maximum", x, low)


@body("clamp_max.default(self, max)", "clamp_max.Tensor(self, max)")
def clamp_max(c: Call, x: Value, high: Value | Scalar) -> Value:
    return call("minimum", x, high)


@body("frac.default(self)", discontinuous=True)
def frac(c: Call, x: Value) -> Value:
    return x - call("trunc", x)


@body("pow.Scalar(self, exponent)")
def power_of_number(c: Call, base: Scalar, exponent: Value) -> Value:
    return call("pow", exponent.lift(base), exponent)


@body("fmax.default(self, other)")
def fmax(c: Call, x: Value, y: Value) -> Value:
    """The larger; of a number and NaN the number."""
    return where(predicate("isnan", x), y, where(predicate("isnan", y), x, call("maximum", x, y)))


@body("fmin.default(self, other)")
def fmin(c: Call, x: Value, y: Value) -> Value:
    return where(predicate("isnan", x), y, where(predicate("isnan", y), x, call("minimum", x, y)))


@body("xlogy.Tensor(self, other)")
def xlogy(c: Call, x: Value, y: Value) -> Value:
    """x·log y; 0 where x is, unless y is NaN."""
    return where(predicate("isnan", y), y, where(x.eq(0), 0, x * call("log", y)))


@body("logaddexp.default(self, other)")
def logaddexp(c: Call, x: Value, y: Value) -> Value:
    """log(exp x + exp y); of equal infinities that infinity."""
    total = call("maximum", x, y) + call("log1p", call("exp", -call("abs", x - y)))
    return where(predicate("isinf", x) & x.eq(y), x, total)


# Division of integers by a number.


def _quotient(x: Value, divisor: Value | Scalar) -> Value:
    """⌊x / divisor⌋. A divisor that may be 0 is left to PyTorch, which raises an error."""
    if x.dtype in FLOATS or not isinstance(divisor, int) or isinstance(divisor, bool) or divisor <= 0:
        raise Unfusable("a division that is rounded, but for integers by a positive number")
    # Of a negative x the division is that of -1 - x, which does not overflow.
    below = call("bitnot", call("idiv", call("bitnot", x), divisor))
    return where(x < 0, below, call("idiv", x, divisor)) if x.dtype != "uint8" else call("idiv", x, divisor)


@body("floor_divide.default(self, other)", "floor_divide.Scalar(self, other)", arithmetic=per_result(1))
def floor_divide(c: Call, x: Value, y: Value | Scalar) -> Value:
    return _quotient(x, y)


@body("remainder.Scalar(self, other)", arithmetic=per_result(1))
def remainder(c: Call, x: Value, y: Scalar) -> Value:
    """x - ⌊x / y⌋·y, which has the sign of y."""
    return x - _quotient(x, y) * y


@body(
    "div.Tensor_mode(self, other, rounding_mode)",
    "div.Scalar_mode(self, other, rounding_mode)",
    arithmetic=per_result(1),
    discontinuous=True,
)
def divide_and_round(c: Call, x: Value, y: Value | Scalar, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return x / y
    if rounding_mode == "trunc" and c.dtype in FLOATS:
        return call("trunc", x / y)
    quotient = _quotient(x, y)
    return quotient if rounding_mode == "floor" else where((x < 0) & (quotient * y).ne(x), quotient + 1, quotient)


# Conversions.


def _convert(c: Call, x: Value) -> Value:
    return x.cast(c.dtype)


body("_to_copy.default(self, ...)", promotion="none", discontinuous=True, priced=False, part="copy")(
    lambda c, x, **_: _convert(c, x)
)
declare(
    Row(
        "prims.convert_element_type.default(a, dtype)",
        "pointwise",
        lambda c, x, _: _convert(c, x),
        promotion="none",
        discontinuous=True,
        priced=False,
    )
)
body("clone.default(self, memory_format)", promotion="none", priced=False, part="copy")(lambda c, x, **_: x)
# Dynamo's, for `addcmul_` and its like.
declare(Row("prims.fma.default(a, b, c)", "pointwise", lambda c, x, y, z: x * y + z))
