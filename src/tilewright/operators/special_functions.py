"""Elementwise operators that stay calls of a library, and those whose formula is short."""

from __future__ import annotations

import math
from functools import partial

from tilewright.operators.arithmetic import NOTHING, per_result
from tilewright.operators.language import Value, call, where
from tilewright.operators.row import Call, body, calls, formulas

formulas(
    {
        "deg2rad.default(self)": lambda c, x: x * (math.pi / 180),
        "rad2deg.default(self)": lambda c, x: x * (180 / math.pi),
    }
)


@body("atanh.default(self)")
def atanh(c: Call, x: Value) -> Value:
    """log((1 + |x|) / (1 - |x|)) / 2 with the sign of x; exact near 0 and near both ends."""
    size = call("abs", x)
    half = call("log1p", 2 * size / (1 - size)) * 0.5
    return where(x < 0, -half, half)


@body("sinc.default(self)")
def sinc(c: Call, x: Value) -> Value:
    """sin(πx) / πx; 1 at 0."""
    angle = x * math.pi
    return where(x.eq(0), 1, call("sin", angle) / angle)


calls(
    """
    acosh.default(self)
    asinh.default(self)
    digamma.default(self)
    erfinv.default(self)
    i0.default(self)
    lgamma.default(self)
    special_i1.default(self)
    igamma.default(self, other)
    igammac.default(self, other)
    ldexp.Tensor(self, other)
    logaddexp2.default(self, other)
    polygamma.default(n, self)
    mvlgamma.default(self, p)
    """,
    "library",
    arithmetic=per_result(0, 1),
)
calls("logit_backward.default(grad_output, self, eps)", "library", arithmetic=per_result(3))
calls("copysign.Tensor(self, other)", "library", arithmetic=NOTHING)
calls("signbit.default(self)", "library", arithmetic=NOTHING, dtypes=("bool",), discontinuous=True)
jumps = partial(calls, operator_class="library", arithmetic=per_result(1), discontinuous=True)
jumps(
    """
    fmod.Tensor(self, other)
    fmod.Scalar(self, other)
    remainder.Tensor(self, other)
    remainder.Scalar_Tensor(self, other)
    round.decimals(self, decimals)
    nextafter.default(self, other)
    """
)
calls(
    """
    bitwise_left_shift.Tensor(self, other)
    bitwise_left_shift.Tensor_Scalar(self, other)
    bitwise_right_shift.Tensor(self, other)
    bitwise_right_shift.Tensor_Scalar(self, other)
    __lshift__.Scalar(self, other)
    __lshift__.Tensor(self, other)
    __rshift__.Scalar(self, other)
    __rshift__.Tensor(self, other)
    """,
    "library",
    arithmetic=NOTHING,
    integral=True,
)
# Parts and pairs of complex numbers.
calls("_conj_physical.default(self)", "library", arithmetic=NOTHING)
calls("_conj.default(self)\n_neg_view.default(self)", "layout")
calls("angle.default(self)", "library", arithmetic=per_result(0, 1), priced=False)
calls("complex.default(real, imag)", "library", arithmetic=NOTHING, priced=False)
calls("polar.default(abs, angle)", "library", arithmetic=per_result(2, 2), priced=False)
