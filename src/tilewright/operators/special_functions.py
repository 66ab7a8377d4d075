"""Elementwise operators that stay calls of a library, and those whose formula is short."""

from __future__ import annotations

import math
from functools import partial

from tilewright.operators.arithmetic import NOTHING, per_result
from tilewright.operators.language import Scalar, Value, call, predicate, where
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


def _times_log(x: Value | Scalar, y: Value | Scalar, logarithm: str) -> Value:
    """x·log y, or x·log1p y; 0 where x is, unless y is NaN."""
    if not isinstance(y, Value):
        assert isinstance(x, Value)
        y = x.lift(y)
    product = x * call(logarithm, y)
    if isinstance(x, Value):
        return where(predicate("isnan", y), y, where(x.eq(0), 0, product))
    return product if x else where(predicate("isnan", y), y, 0)


formulas(
    {
        "xlogy.Tensor(self, other) xlogy.Scalar_Self(self, other) xlogy.Scalar_Other(self, other)": lambda c, x, y: (
            _times_log(x, y, "log")
        ),
        "special_xlog1py.default(self, other) special_xlog1py.self_scalar(self, other) "
        "special_xlog1py.other_scalar(self, other)": lambda c, x, y: _times_log(x, y, "log1p"),
        # -x·log x: its limit 0 at 0, -inf below.
        "special_entr.default(self)": lambda c, x: where(
            predicate("isnan", x), x, where(x > 0, -x * call("log", x), where(x < 0, x.lift(-math.inf), 0))
        ),
    }
)


@body("hypot.default(self, other)", arithmetic=per_result(3, 1))
def hypot(c: Call, x: Value, y: Value) -> Value:
    """√(x² + y²) from the quotient of the smaller and the larger, so that no square overflows."""
    a, b = call("abs", x), call("abs", y)
    large, small = call("maximum", a, b), call("minimum", a, b)
    ratio = small / large
    length = where(large.eq(0), large, large * call("sqrt", ratio * ratio + 1))
    return where(predicate("isinf", x) | predicate("isinf", y), x.lift(math.inf), length)


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
    special_bessel_j0.default(self)
    special_bessel_j1.default(self)
    special_modified_bessel_i0.default(self)
    special_modified_bessel_i1.default(self)
    special_modified_bessel_k0.default(self)
    special_modified_bessel_k1.default(self)
    special_scaled_modified_bessel_k0.default(x)
    special_scaled_modified_bessel_k1.default(x)
    special_spherical_bessel_j0.default(x)
    special_airy_ai.default(x)
    special_bessel_y0.default(self)
    special_bessel_y1.default(self)
    special_erfcx.default(self)
    special_i0e.default(self)
    special_i1.default(self)
    special_i1e.default(self)
    special_log_ndtr.default(self)
    special_ndtri.default(self)
    special_zeta.default(self, other)
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
CHEBYSHEV = [f"{kind}chebyshev_polynomial_{letter}" for kind in ("", "shifted_") for letter in "tuvw"]
HERMITE = [f"hermite_polynomial_{kind}" for kind in ("h", "he")]
for name in (*CHEBYSHEV, *HERMITE, "laguerre_polynomial_l", "legendre_polynomial_p"):
    calls(f"special_{name}.default(x, n)\nspecial_{name}.n_scalar(x, n)", "library", arithmetic=per_result(0, 1))
calls("logit_backward.default(grad_output, self, eps)", "library", arithmetic=per_result(3))
calls("copysign.Tensor(self, other)\ncopysign.Scalar(self, other)", "library", arithmetic=NOTHING)
calls("frexp.Tensor(self)", "library", arithmetic=NOTHING, dtypes=("self", "int32"), discontinuous=True)
calls("gcd.default(self, other)\nlcm.default(self, other)", "library", integral=True)
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
