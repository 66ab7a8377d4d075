"""Scalar functions of generated Triton kernels that `triton.language` lacks or has with too little accuracy.

All run on a GPU and in Triton's interpreter, so tests without a GPU run the same code. Floating arguments are fp32
or fp64; results are within a few ulp, and NaN propagates. The polynomials are Chebyshev fits made for this file.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import (  # noqa: F401, generated kernels find all functions here
    INFINITY,
    div,
    fused,
    is_negative,
    max_over,
    maximum,
    min_over,
    minimum,
    neg,
    polynomial,
    product_over,
    round_even,
    rsqrt,
    sign,
    sqrt,
    to_bfloat16,
    trunc,
)

LN2_HIGH = tl.constexpr(0.6931471805598903)
"""ln 2 to 42 bits: its product with any exponent of a double is exact."""
LN2_LOW = tl.constexpr(5.497923018708371e-14)
LOG2_E = tl.constexpr(1.44269502162933349609375)
LOG2_E_LOW = tl.constexpr(1.9259629911266175e-08)
PI = tl.constexpr(3.141592653589793)

TANH = tl.constexpr((0.002214902743, -0.008272456733, 0.02174618709, -0.0539563494, 0.1333329075, -0.3333333308))
"""(tanh(x) / x - 1) / x² in powers of x², falling, |x| ≤ 0.65."""
ATAN = tl.constexpr(
    (
        -0.017803896394812564, 0.03796390316111083, -0.05035049795312439, 0.05846866752275139,
        -0.06662950246036792, 0.07692045194561481, -0.09090896801472813, 0.11111110744657099,
        -0.14285714279244968, 0.19999999999940837, -0.3333333333333312, 1.0,
    )
)  # fmt: skip
"""atan(t) / t in powers of t², falling, |t| ≤ tan(π/8)."""
ERFC = tl.constexpr(
    (
        -8.12875215770062e-09, 2.75705002664482e-08, 3.7952298023330864e-08, -2.4915672438399817e-07,
        -7.661560167938382e-08, 1.7488744038055848e-06, -9.5955555482755e-07, -1.1445312657719447e-05,
        2.2378123835165082e-05, 5.165035803926393e-05, -0.0002901524142477777, 0.00029371320341330494,
        0.0017556255719938932, -0.009746579469020964, 0.028362277446966157, -0.05869339859889526,
        0.09230432115887496, -0.10880393014127411, 0.08227673849018106, 0.0035854154854551208,
        -0.14024059858554722, 1.2375126308378277,
    )
)  # fmt: skip
"""erfc(x) · exp(x²) · (1 + 2x) in powers of (x - 3.75) / (x + 3.75), falling, x ≥ ½."""
LOG2_ERFC = tl.constexpr(
    (
        -4.535860352916643e-05, 0.0004455077287275344, -0.0014894419582560658, -0.000774629064835608,
        0.02825368009507656, -0.1484816074371338, -0.9184163808822632, -1.6279085874557495,
    )
)  # fmt: skip
"""log₂(erfc(x)) / x in powers of x, falling, x ≥ 0; fitted so that erfc is right to 2⁻²⁵."""
LOG = tl.constexpr(
    (
        0.1188345239410786, 0.11687962997542156, 0.13335645841949378, 0.15384574966460907, 0.18181818595769064,
        0.22222222219844232, 0.2857142857143541, 0.3999999999999999, 0.6666666666666666,
    )
)  # fmt: skip
"""(2·atanh(s) / s - 2) / s² in powers of s², falling, |s| ≤ 3 - 2√2."""


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    """2ᵗ · (1 + ln 2 · rest), where t = x · log₂ e rounded and `rest` is its rounding error, which `tl.exp` drops.

    `tl.exp2` flushes subnormal results to zero, so these are computed 2²⁴ times as large and scaled back.
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        c = minimum(maximum(x, -104.0), 89.0)
        t = c * LOG2_E
        rest = fused(c, LOG2_E_LOW, fused(c, LOG2_E, neg(t)))
        small = t < -126.0
        power = tl.exp2(tl.where(small, t + 24.0, t)) * fused(rest, 0.6931472, 1.0)
        return tl.where(small, power * 5.9604644775390625e-08, power)


@triton.jit
def expm1(x: tl.tensor) -> tl.tensor:
    """(u - 1) · x / log(u), u = exp(x): the errors of u - 1 and of log(u) cancel (Kahan)."""
    u = exp(x)
    plain = u - 1.0
    near = tl.where(u == 1.0, x, plain * div(x, tl.log(tl.where(u == 1.0, 2.0, u))))
    return tl.where((plain == -1.0) | (u == INFINITY), plain, near)


@triton.jit
def log1p(x: tl.tensor) -> tl.tensor:
    """log(u) · x / (u - 1), u = 1 + x: the rounding of u cancels (Kahan)."""
    u = 1.0 + x
    near = tl.log(u) * div(x, tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == INFINITY, u, near))


@triton.jit
def log10(x: tl.tensor) -> tl.tensor:
    return tl.log(x) * 0.4342944819032518


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def exp_approximate(x: tl.tensor) -> tl.tensor:
    """To 18 bits; subnormal results are zero."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def sigmoid_approximate(x: tl.tensor) -> tl.tensor:
    """To 18 bits."""
    return 1.0 / (1.0 + exp_approximate(neg(x)))


@triton.jit
def _with_sign(size: tl.tensor, x: tl.tensor) -> tl.tensor:
    """`size`, not negative, with the sign of `x`; fp32."""
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tanh_far(size: tl.tensor) -> tl.tensor:
    """1 - 2e / (1 + e), e = exp(-2 · size), with an absolute error of a few ulp of 1."""
    e = tl.exp2(size * (-2.0 * LOG2_E))
    return 1.0 - e * (2.0 / (1.0 + e))


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    size = tl.abs(x)
    if x.dtype == tl.float64:
        e = expm1(2.0 * tl.minimum(size, 20.0))
        result = e / (e + 2.0)
        return tl.where(x != x, x, tl.where(is_negative(x), neg(result), result))
    else:
        u = x * x
        near = size + size * u * polynomial(u, TANH, 5)
        return _with_sign(tl.where(size < 0.65, near, _tanh_far(size)), x)


@triton.jit
def tanh_absolute(x: tl.tensor) -> tl.tensor:
    """tanh(x) with an absolute error of 2⁻²³, for sums with 1."""
    return _with_sign(_tanh_far(tl.abs(x)), x)


@triton.jit
def erf_absolute(x: tl.tensor) -> tl.tensor:
    """erf(x) = 1 - 2^q(|x|) with an absolute error of 2⁻²³, for sums with 1; `tl.erf` is also accurate near 0.

    Eight elements of a GELU in bf16 take 168 instructions with it and 304 with `tl.erf` (sm_90a).
    """
    size = tl.abs(x)
    return _with_sign(1.0 - tl.exp2(size * polynomial(size, LOG2_ERFC, 7)), x)


@triton.jit
def sinh(x: tl.tensor) -> tl.tensor:
    size = tl.abs(x)
    e = expm1(size)
    root = exp(0.5 * size)
    large = 0.5 * root * root - div(div(0.5, root), root)
    result = tl.where(size < 1.0, 0.5 * (e + div(e, e + 1.0)), large)
    return tl.where(is_negative(x), neg(result), result)


@triton.jit
def cosh(x: tl.tensor) -> tl.tensor:
    root = exp(0.5 * tl.abs(x))
    return 0.5 * root * root + div(div(0.5, root), root)


@triton.jit
def tan(x: tl.tensor) -> tl.tensor:
    return div(tl.sin(x), tl.cos(x))


@triton.jit
def atan2(y: tl.tensor, x: tl.tensor) -> tl.tensor:
    """The angle of (x, y): atan of the smaller over the larger, mapped to its octant."""
    run, rise = tl.abs(x), tl.abs(y)
    larger, smaller = tl.maximum(run, rise), tl.minimum(run, rise)
    equal = run == rise
    t = tl.where(equal, tl.where(run == 0.0, 0.0, 1.0), div(smaller, tl.where(larger == 0.0, 1.0, larger)))
    steep = t > 0.41421356
    t = tl.where(steep, div(t - 1.0, t + 1.0), t)
    angle = t * polynomial(t * t, ATAN, 11)
    angle = tl.where(steep, 0.25 * PI + angle, angle)
    angle = tl.where(rise > run, 0.5 * PI - angle, angle)
    angle = tl.where(is_negative(x), PI - angle, angle)
    angle = tl.where(is_negative(y), neg(angle), angle)
    return tl.where((x != x) | (y != y), x + y, angle)


@triton.jit
def atan(x: tl.tensor) -> tl.tensor:
    return atan2(x, tl.full(x.shape, 1.0, x.dtype))


@triton.jit
def asin(x: tl.tensor) -> tl.tensor:
    return atan2(x, sqrt((1.0 - x) * (1.0 + x)))


@triton.jit
def acos(x: tl.tensor) -> tl.tensor:
    return atan2(sqrt((1.0 - x) * (1.0 + x)), x)


@triton.jit
def _erfc64(x: tl.tensor) -> tl.tensor:
    """exp(-x²) · P(t) / (1 + 2x) above ½; x² is split so that its rounding does not reach the exponential."""
    size = tl.minimum(tl.abs(x), 30.0)
    high = size.to(tl.float32).to(tl.float64)
    gauss = tl.exp(-high * high) * tl.exp((high - size) * (high + size))
    far = gauss * polynomial((size - 3.75) / (size + 3.75), ERFC, 21) / (1.0 + 2.0 * size)
    far = tl.where(x < 0, 2.0 - far, far)
    return tl.where((size < 0.5) | (x != x), 1.0 - tl.erf(x), far)


@triton.jit
def erfc(x: tl.tensor) -> tl.tensor:
    return _erfc64(x.to(tl.float64)).to(x.dtype)


@triton.jit
def _split(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """x as a sum of two doubles of at most 26 bits each (Veltkamp)."""
    c = 134217729.0 * x
    high = c - (c - x)
    return high, x - high


@triton.jit
def _log_in_two(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """log(x) as the sum of two doubles, to about 60 bits; x positive, finite, not subnormal."""
    bits = x.to(tl.int64, bitcast=True)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (e << 52)).to(tl.float64, bitcast=True)
    f = m - 1.0
    g = m + 1.0
    g_rest = m - (g - 1.0)
    s = f / g
    s_high, s_low = _split(s)
    g_high, g_low = _split(g)
    left = (((f - s_high * g_high) - s_high * g_low) - s_low * g_high) - s_low * g_low - s * g_rest
    z = s * s
    low = 2.0 * (left / g) + s * z * polynomial(z, LOG, 8)
    exponent = e.to(tl.float64)
    whole = exponent * LN2_HIGH
    high = whole + 2.0 * s
    back = high - whole
    low = ((whole - (high - back)) + (2.0 * s - back)) + (low + exponent * LN2_LOW)
    total = high + low
    return total, (high - total) + low


@triton.jit
def _power64(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """exp(y · log x) for x ≥ 0, the logarithm carried in two doubles."""
    ordinary = (x >= 2.2250738585072014e-308) & (x < INFINITY)
    high, low = _log_in_two(tl.where(ordinary, x, 1.0))
    # Beyond 2⁶⁴ every power of a double but 1 overflows or vanishes.
    y = tl.minimum(tl.maximum(y, -18446744073709551616.0), 18446744073709551616.0)
    y_high, y_low = _split(y)
    high_high, high_low = _split(high)
    product = y * high
    rest = ((y_high * high_high - product) + y_high * high_low + y_low * high_high) + y_low * high_low + y * low
    rest = tl.where(tl.abs(product) < 800.0, rest, 0.0)
    return tl.where(ordinary, tl.exp(product) * (1.0 + rest), tl.exp(y * tl.log(x)))


@triton.jit
def _power_float(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    x64, y64 = x.to(tl.float64), y.to(tl.float64)
    size = tl.abs(x64)
    result = _power64(size, y64) if x.dtype == tl.float64 else tl.exp(y64 * tl.log(size))
    half = 0.5 * y64
    integer = tl.floor(y64) == y64
    odd = integer & (tl.floor(half) != half)
    result = tl.where((size == 1.0) & (y64 == y64), 1.0, result)
    result = tl.where(is_negative(x) & odd, neg(result), result)
    outside = (x64 < 0) & (size != INFINITY) & (integer == 0)
    result = tl.where(outside | (x != x) | (y != y), float("nan"), result)
    return tl.where((x == 1.0) | (y == 0.0), 1.0, result).to(x.dtype)


@triton.jit
def _power_integer(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """By squaring, with wrap-around; negative powers of all but ±1 are 0."""
    result = x * 0 + 1
    base, left = x, y
    for _ in range(63):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    unit = tl.where(x == 1, 1, tl.where(x == -1, tl.where((y & 1) != 0, -1, 1), 0)).to(x.dtype)
    return tl.where(y < 0, unit, result)


@triton.jit
def pow(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    if x.dtype.is_floating():
        return _power_float(x, y)
    else:
        return _power_integer(x, y)
